# A hundred healthy dumps of differing shape: none is red, unsound, or warned of.

import numpy as np
import pytest

from servanda.rl.dumps.formats.parquet import Writer
from servanda.rl.dumps.judge import DumpOptions, judge_dump

_SHAPES = 100
_MOST_TOKENS = 40_000  # of a dump, so that a hundred are minutes


def _dump(folder, seed):
    """Sequences of a softmax-like sampler and a trainer that differs by rounding noise."""
    rng = np.random.default_rng(seed)
    steps = int(rng.choice([1, 2, 5, 12, 40, 200]))
    longest = int(rng.choice([5, 20, 80, 300, 2000]))
    turns = int(rng.choice([1, 1, 2, 4]))
    groups, size = int(rng.integers(1, 9)), int(rng.integers(1, 9))
    noise = float(rng.choice([0.001, 0.005, 0.012]))
    sequences = max(1, min(groups * size, _MOST_TOKENS // (steps * longest)))
    writer = Writer(folder)
    for step in range(1, steps + 1):
        columns = [[], [], [], []]
        for _ in range(sequences):
            length = max(int(rng.integers(max(longest // 4, 1), longest + 1)), turns)
            mask = np.zeros(8 + length + 3 * (turns - 1), dtype=bool)
            mask[8:] = True
            for turn in range(1, turns):  # a tool's words
                at = 8 + turn * length // turns + 3 * (turn - 1)
                mask[at : at + 3] = False
            infer = -rng.exponential(0.8, len(mask)) * (rng.random(len(mask)) < 0.7) - 1e-4
            train = np.minimum(infer + rng.normal(-(noise**2) / 2, noise, len(mask)), -1e-7)
            if seed % 3 == 0:  # as a trainer keeps them
                infer, train = infer.astype(np.float32), train.astype(np.float32)
            infer = np.where(mask, infer, np.nan)
            made = rng.integers(0, 50_000, len(mask)), mask, train, infer
            for column, values in zip(columns, made, strict=True):
                column.append(values)
        names = [f"p{step}.{i // size}" for i in range(sequences)]
        writer.step(step, *columns, groups=names)


@pytest.mark.parametrize("part", range(25))
def test_healthy_dumps_are_never_red_unsound_or_warned_of(tmp_path, part):
    for seed in range(part * _SHAPES // 25, (part + 1) * _SHAPES // 25):
        folder = tmp_path / str(seed)
        _dump(folder, seed)
        answer = judge_dump(DumpOptions(folder))
        assert answer.verdict.outcome in ("holds", "inconclusive"), seed
        assert not [line for line in answer.lines if line.level == "error"], seed
        found = answer.verdict.breakdown
        assert not any(row.outcome == "violated" for row in found.steps), seed
        assert found.beyond == 0 and found.removed is None, seed
        few = ("too few to check", "cannot", "line up at no lag")  # of some ten tokens
        warned = [t.text for t in answer.lines if t.level == "warning"]
        assert not [text for text in warned if not any(word in text for word in few)], seed
