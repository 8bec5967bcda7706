# Makes the dump beside it: python examples/tiny-dump/make.py
#
# Sixteen steps of two-turn and three-turn rollouts with known truth.  infer draws one of two
# tokens with probability q, train gives it q - tv: tv is .004, but .12 on the first three
# tokens after a tool has spoken, from step 10 on.

from pathlib import Path

import numpy as np

from servanda.rl.dumps.formats.parquet import Writer

PROMPT, TURN, TOOL = 12, 24, 6
STEPS, SEQUENCES, SINCE = 16, 24, 10


def sequence(rng: np.random.Generator, step: int) -> tuple[list, list, list, list]:
    """Token ids, loss mask and both logprobs of one sequence."""
    token, mask, train, infer = [], [], [], []

    def given(n: int) -> None:
        token.extend(rng.integers(100, 200, n).tolist())
        mask.extend([0] * n)
        train.extend([np.nan] * n)
        infer.extend([np.nan] * n)

    given(PROMPT)
    for turn in range(int(rng.integers(2, 4))):
        if turn:
            given(TOOL)
        for i in range(TURN):
            tv = 0.12 if step >= SINCE and turn and i < 3 else 0.004
            q = round(float(rng.uniform(0.3, 0.8)), 2)
            drawn = rng.random() < q
            token.append(0 if drawn else 1)
            mask.append(1)
            infer.append(np.log(q if drawn else 1 - q))
            train.append(np.log(q - tv if drawn else 1 - q + tv))
    return token, mask, train, infer


def main() -> None:
    rng, writer = np.random.default_rng(7), Writer(Path(__file__).parent)
    for step in range(1, STEPS + 1):
        made = [sequence(rng, step) for _ in range(SEQUENCES)]
        columns = [[row[i] for row in made] for i in range(4)]
        writer.step(
            step,
            *columns,
            groups=[f"{step}.{s // 4}" for s in range(SEQUENCES)],
            labels={"env": [("search", "shell")[s % 2] for s in range(SEQUENCES)]},
        )


if __name__ == "__main__":
    main()
