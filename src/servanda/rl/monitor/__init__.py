# The monitor of a training run: every step's own tokens, judged.
