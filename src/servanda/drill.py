# A drill: one fault of the catalogue injected into a contract's kernels, and the check run.

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from servanda import run
from servanda.contract import Contract
from servanda.engines.worker import spawn
from servanda.errors import IdentityError
from servanda.faults import FAULTS, injected
from servanda.faults.field import Reading, readings
from servanda.measurement import Open, Watch, unwatched
from servanda.plan import Plan
from servanda.rounds import read_rounds
from servanda.rundir import RunDirectory
from servanda.verdict import Verdict


@dataclass(frozen=True)
class Drill:
    """What came of a check with a fault in it.

    Args:
        verdict: None where the two sides were refused before anything was measured.
        refused: why they were.
        field: what the field's thresholds say of the tokens the verdict was judged on; empty
            where there was no token that both sides have a logprob for.
        tokens: how many those are.
    """

    fault: str
    value: Any
    verdict: Verdict | None
    refused: IdentityError | None = None
    field: tuple[Reading, ...] = ()
    tokens: int = 0

    @property
    def exit_code(self) -> int:
        """That of `servanda check` on the same kernels."""
        if self.verdict is not None:
            return self.verdict.exit_code
        return IdentityError.exit_code

    @property
    def outcome(self) -> str:
        return self.verdict.outcome if self.verdict is not None else "refused"

    @property
    def deciding(self) -> tuple[str, ...]:
        """The enforced cells that made the outcome, "clause on slice"; nothing where it holds."""
        if self.verdict is None or self.outcome == "holds":
            return ()
        return tuple(
            f"{c.clause} on {c.slice}"
            for c in self.verdict.cells
            if c.enforced and c.outcome == self.outcome
        )


def drill(
    contract: Contract,
    name: str,
    value: Any = None,
    *,
    open: Open = spawn,
    watch: Watch = unwatched,
) -> Drill:
    """Check a contract with one fault in the kernel of the fault's side.

    Args:
        value: None takes the fault's default.

    Raises:
        MeasurementError: no such fault, a value it does not take, or a failed measurement.
        ContractError, Interrupted: as `run.check` does.
    """
    faulty = injected(contract, name, value)
    value = FAULTS[name].default if value is None else value
    with tempfile.TemporaryDirectory(prefix="servanda-drill-") as folder:
        try:
            verdict = run.check(faulty, run_dir=folder, open=open, watch=watch)
        except IdentityError as error:
            return Drill(name, value, None, error)
        train_N, infer_N = _logprobs(run.compile(faulty), Path(folder), verdict)
    field = readings(train_N, infer_N) if len(train_N) else ()
    return Drill(name, value, verdict, None, field, len(train_N))


def _logprobs(plan: Plan, folder: Path, verdict: Verdict) -> tuple[Any, Any]:
    """(train, infer) of the usable tokens that the verdict was judged on, [N], nats."""
    sides: dict[str, list[Any]] = {"train": [np.zeros(0)], "infer": [np.zeros(0)]}
    for measured in read_rounds(plan, RunDirectory(folder, verdict.key.attempt)):
        if measured.units[0].group >= verdict.groups:
            break  # drawn ahead, and never judged
        usable_N = measured.pair.usable_N
        for side, parts in sides.items():
            parts.append(getattr(measured.pair, side).columns["logp"][usable_N])
    return np.concatenate(sides["train"]), np.concatenate(sides["infer"])
