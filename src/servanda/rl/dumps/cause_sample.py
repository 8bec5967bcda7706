# Advice on a dump's verdict, from a sample of its steps that is read once more.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from servanda.judgement.breakdown import Advice
from servanda.judgement.causes.forecast import advise
from servanda.judgement.causes.gap_cause import Explanation, explain
from servanda.judgement.causes.token_table import TokenTable
from servanda.rl.dumps.blocks import blocks, paired, taken
from servanda.rl.dumps.formats import Dump
from servanda.traces.rollouts import Rollouts
from servanda.traces.trace import TracePair

SAMPLE_TOKENS = 400_000  # trained tokens of the sample
_STEPS = 32  # most steps of the sample


def explain_dump(
    dump: Dump, limit: float, problems: Mapping[str, str], place: str, update_tokens: int
) -> tuple[Explanation, Advice] | None:
    """The likely cause of a dump's gap, and what to do; None without a usable token.

    Args:
        limit: on the mean of (1 - w)^+.
        problems: failed data quality checks, by name.
        place: of the dump, for commands.
        update_tokens: trained tokens of one update.
    """
    steps = _spread(dump.steps)
    pairs = _pairs(blocks(dump.of(steps).read()), SAMPLE_TOKENS // max(len(steps), 1))
    table = TokenTable.of(pairs)
    if table is None:
        return None
    found = explain(table, limit, problems, place)
    return found, advise(table, found, update_tokens)


def _spread(steps: Sequence[int]) -> list[int]:
    """At most _STEPS steps, evenly spread, with the first and the last."""
    if len(steps) <= _STEPS:
        return [*steps]
    at = np.linspace(0, len(steps) - 1, _STEPS).round().astype(int)
    return [steps[i] for i in at]


def _pairs(read: Iterator[Rollouts], each: int) -> Iterator[tuple[int, TracePair, Sequence[str]]]:
    """The first sequences of each step, up to about `each` trained tokens."""
    step, first, left = None, 0, 0
    for block in read:
        if block.step != step:
            step, first, left = block.step, 0, each
        if left > 0:
            ends = np.flatnonzero(block.trained_S.cumsum() >= left)
            end = int(ends[0]) + 1 if len(ends) else len(block)
            part = taken(block, 0, end)
            yield block.step, paired(part, first), part.source_S
            left -= int(part.trained_S.sum())
        first += len(block)
