# The monitor of a training run: judges the tokens of every step.
