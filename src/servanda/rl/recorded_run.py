# Recorded runs as references: the states of monitors, and dumps of trainers.

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import numpy as np

from servanda.errors import ContractError, EvidenceError
from servanda.rl.dumps.formats import open_dump
from servanda.rl.steps.blocks import blocks, paired
from servanda.rl.trend.changes import GoodRun, StepScalars, scalars_of
from servanda.rl.watch.monitor_state import Unreadable, read_line, states_in
from servanda.theory.stats.histogram import BINS
from servanda.theory.stats.tally import tally

# step and generation -> its numbers, and its tokens
_Steps = dict[tuple[int, int], tuple[dict[str, float], int]]


def recorded_run(path: Path, *, unsafe_pickles: bool = False) -> GoodRun:
    """A recorded run, from the state of a monitor or from a dump.

    Raises:
        ContractError: there is neither, or several states.
        EvidenceError: the data of a step is no evidence.
        MeasurementError: a file cannot be read.
    """
    if not path.exists():
        raise ContractError(
            f"there is no {str(path)!r}",
            hint="name the state file of a monitor, or the folder of a dump",
        )
    states = states_in(path)
    if len(states) > 1:
        names = ", ".join(state.name for state in states[:4])
        raise ContractError(f"{path} holds {len(states)} states: {names}", hint="name each file")
    return _of_state(states[0]) if states else _of_dump(path, unsafe_pickles=unsafe_pickles)


def _of_state(path: Path) -> GoodRun:
    data, steps, contract = path.read_bytes(), _Steps(), ""
    for number, text in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            line = read_line(text, f"{path}:{number}")
        except Unreadable as unreadable:
            raise EvidenceError(f"{path}:{number}: {unreadable}") from None
        if line.outcome == "error":
            raise EvidenceError(
                f"step {line.weights} of {path} is an error, so its numbers are no reference",
                hint="record a run without errors",
            )
        contract = line.name
        if line.tokens:  # a step that a restart repeats replaces the later ones
            place = line.weights, line.generation
            steps = {before: own for before, own in steps.items() if before < place}
            steps[place] = scalars_of(line.metrics), line.tokens
    digest = blake2b(data, digest_size=16).hexdigest()
    return _run(path, digest, steps, contract)


def _of_dump(path: Path, *, unsafe_pickles: bool) -> GoodRun:
    found = open_dump(path, None, unsafe_pickles=unsafe_pickles)
    digest, steps = blake2b(digest_size=16), _Steps()
    for step in found.steps:
        sums = StepScalars()
        for block in blocks(found.of([step]).read()):
            pair = paired(block, 0)
            train_N, infer_N = (side.columns["logp"] for side in (pair.train, pair.infer))
            digest.update(np.stack([train_N, infer_N]).tobytes())
            (count_K,) = tally(train_N, infer_N, np.ones(len(train_N), dtype=bool))
            sums += StepScalars.of(count_K[:BINS], int(count_K[BINS]))
        if sums.usable:
            steps[step, 0] = sums.values, sums.usable + sums.lost
    return _run(path, digest.hexdigest(), steps)


def _run(path: Path, digest: str, steps: _Steps, contract: str = "") -> GoodRun:
    ordered = sorted(steps.items())
    values = tuple((step, own) for (step, _), (own, _) in ordered)
    tokens = tuple(tokens for _, (_, tokens) in ordered)
    return GoodRun(str(path), digest, values, tokens, contract)
