# Rounds on disk: their file names, and the assembly of traces to a closed round.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from servanda.errors import EvidenceError
from servanda.judgement.clauses.base import DRAWS, FORMAT
from servanda.judgement.evidence import Round
from servanda.judgement.plan import Plan
from servanda.judgement.schedule import Schedule, Unit
from servanda.runner.run_directory import RunDirectory
from servanda.traces.trace import Batch, Trace, TracePair, align, some

SIDES = ("train", "infer")
STABLE = ("stable", "stable_train")  # the stable kernel's samples, and train's scores of them


def read_rounds(plan: Plan, run: RunDirectory) -> Iterator[Round]:
    """The closed rounds of a run directory; no engine is needed.

    Raises:
        EvidenceError: a file has other sequences than the plan.
    """
    for schedule in plan.schedules:
        for index in range(schedule.rounds):
            closed = _read_round(plan, run, schedule, index)
            if closed is None:
                break
            yield closed


def _read_round(plan: Plan, run: RunDirectory, schedule: Schedule, index: int) -> Round | None:
    units = schedule.units(index)
    names = [round_name(schedule, index, what) for what in ("infer", "train")]
    if not all(map(run.has, names)):
        return None
    infer, train = map(run.read, names)
    if infer.sequence_S.tolist() != [u.sequence for u in units]:
        raise EvidenceError(
            f"{run.path / names[0]}.parquet holds other sequences than round {index} launched",
            hint="it belongs to another run; measure in a run directory of its own",
        )
    again = any(not infer.lost_S[r] for r in schedule.noise_rows(len(units)))
    wanted = [f"self_{side}" for side in SIDES] * again + [*STABLE] * plan.stable_rounds
    wanted += [DRAWS] * bool(plan.scored(schedule.name)) + [FORMAT] * (plan.format is not None)
    paths = {what: round_name(schedule, index, what) for what in wanted}
    if not all(map(run.has, paths.values())):
        return None
    others = {what: run.read(path) for what, path in paths.items()}
    return Round(schedule.name, index, units, align(train, infer), peers(infer, train, others))


def round_name(schedule: Schedule, index: int, what: str) -> str:
    return f"{schedule.folder}/{index:06d}.{what}"


def peers(infer: Trace, train: Trace, others: Mapping[str, Trace]) -> dict[str, TracePair]:
    """The comparison data (peers) of a round, from its further traces."""
    pairs = {}
    for name, side in (("self_train", train), ("self_infer", infer)):
        if name in others and len(others[name].sequence_S):
            again = others[name]
            rows = again.sequence_S.tolist()
            own, drawn = some(side, rows), some(infer, rows)
            # scores have no token classes: use those of the samples, which are the same tokens
            own = replace(own, columns={**drawn.columns, **own.columns})
            pairs[name] = align(again, own)
    if "stable" in others:
        pairs["stable"] = align(others["stable_train"], others["stable"])
    if FORMAT in others:
        pairs[FORMAT] = align(others[FORMAT], infer)
    if DRAWS in others:
        own = others[DRAWS]
        if not np.array_equal(own.sequence_S, infer.sequence_S):
            raise EvidenceError(
                "train answered other prompts than infer did: their rewards are no pairs",
                hint="measure in a run directory of its own",
            )
        pairs[DRAWS] = align(own, own)
    return pairs


def batch_of(
    units: Sequence[Unit],
    ids: Sequence[tuple[int, ...]],
    width: int,
    continuations: tuple[tuple[int, ...], ...] = (),
) -> Batch:
    """The batch of dispatched units, from the token ids of each line and given tokens."""
    sequences = tuple(unit.sequence for unit in units)
    return Batch(sequences, tuple(ids[unit.row] for unit in units), width, continuations)


def in_order(batch: Batch, verb: Callable[..., Trace], *options: object) -> Trace:
    """Run a batch with prompts of similar length together, and return it in dispatch order.

    Lengths of prompts are known at dispatch, so the composition does not depend on an outcome.
    """
    rows = sorted(range(len(batch)), key=lambda row: len(batch.prompts[row]))
    return some(verb(batch.take(rows), *options), list(batch.sequence_S))
