# Rounds on disk: the names of their files, and how traces become a closed round.

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from servanda.errors import EvidenceError
from servanda.evidence import Round
from servanda.plan import Plan, Unit
from servanda.rundir import RunDirectory
from servanda.trace import Batch, Trace, align

SIDES = ("train", "infer")


def read_rounds(plan: Plan, run: RunDirectory) -> Iterator[Round]:
    """The closed rounds of a run directory; no engine is needed.

    Raises:
        EvidenceError: a file holds other sequences than the plan launched.
    """
    for index in range(plan.rounds):
        units = tuple(plan.units(index))
        names = [round_name(index, what) for what in ("infer", "train")]
        if not all(map(run.has, names)):
            return
        infer, train = map(run.read, names)
        if infer.sequence_S.tolist() != [u.sequence for u in units]:
            raise EvidenceError(
                f"{run.path / names[0]}.parquet holds other sequences than round {index} launched",
                hint="it belongs to another run; measure in a run directory of its own",
            )
        names = [round_name(index, f"self_{side}") for side in SIDES]
        if any(not infer.lost_S[r] for r in plan.noise_rows(len(units))):
            if not all(map(run.has, names)):
                return
            selves = list(map(run.read, names))
        else:
            selves = []
        yield closed_round(index, units, infer, train, *selves)


def round_name(index: int, what: str) -> str:
    return f"rounds/{index:06d}.{what}"


def closed_round(
    index: int, units: tuple[Unit, ...], infer: Trace, train: Trace, *selves: Trace
) -> Round:
    """A closed round; without `selves` where there was nothing to measure again."""
    pair = align(train, infer)
    if not selves:
        return Round(index, units, pair)
    self_train, self_infer = (
        align(again, some(side, again.sequence_S.tolist()))
        for again, side in zip(selves, (train, infer), strict=True)
    )
    return Round(index, units, pair, self_train, self_infer)


def in_order(batch: Batch, verb: Callable[..., Trace], *options: object) -> Trace:
    """Run a batch with prompts of like length side by side, and return it in launch order.

    Lengths of prompts are known at launch, so the composition does not depend on an outcome.
    """
    rows = sorted(range(len(batch)), key=lambda row: len(batch.prompts[row]))
    return some(verb(batch.take(rows), *options), list(batch.sequence_S))


def some(trace: Trace, sequences: list[int]) -> Trace:
    """The given sequences of a trace, in the given order."""
    starts = np.cumsum(trace.length_S) - trace.length_S
    row_of = {int(s): row for row, s in enumerate(trace.sequence_S)}
    rows = [row_of[s] for s in sequences]
    spans = [np.arange(starts[r], starts[r] + trace.length_S[r]) for r in rows]
    at = np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)
    return replace(
        trace,
        sequence_S=trace.sequence_S[rows],
        length_S=trace.length_S[rows],
        lost_S=trace.lost_S[rows],
        prompt_tokens_S=trace.prompt_tokens_S[rows],
        token_N=trace.token_N[at],
        columns={name: column[at] for name, column in trace.columns.items()},
    )
