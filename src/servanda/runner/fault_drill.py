# A drill: one fault of the catalogue injected into a contract's kernels, and the check run.

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from servanda.contract.model import Contract
from servanda.engines.faults import FAULTS, injected
from servanda.engines.worker import spawn
from servanda.errors import IdentityError
from servanda.judgement.field_thresholds import Gate, gates
from servanda.judgement.verdict import Verdict
from servanda.runner import run
from servanda.runner.measurement import Open, Watch, unwatched


@dataclass(frozen=True)
class Drill:
    """What came of a check with a fault in it.

    Args:
        verdict: None where the two sides were refused before anything was measured.
        refused: why they were.
        gates: thresholds of other projects on the tokens of the verdict; empty if no token has both
            logprobs.
        tokens: how many those are.
    """

    fault: str | None
    value: Any
    verdict: Verdict | None
    refused: IdentityError | None = None
    gates: tuple[Gate, ...] = ()
    tokens: int = 0

    @property
    def exit_code(self) -> int:
        """That of `servanda check` on the same kernels."""
        return IdentityError.exit_code if self.verdict is None else self.verdict.exit_code

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
    name: str | None,
    value: Any = None,
    *,
    open: Open = spawn,
    watch: Watch = unwatched,
    deadline: Callable[[], bool] | None = None,
) -> Drill:
    """Check a contract with one fault in the kernel of the fault's side.

    Args:
        name: None injects nothing: the check that a drill is held against.
        value: None takes the fault's default.
        deadline: whether the time is over; no round starts after that.

    Raises:
        MeasurementError: no such fault, a value it does not take, or a failed measurement.
        ContractError, Interrupted: as `run.check` does.
    """
    if name is not None:
        contract = injected(contract, name, value)
        value = FAULTS[name].default if value is None else value
    with tempfile.TemporaryDirectory(prefix="servanda-drill-") as folder:
        try:
            verdict = run.check(contract, run_dir=folder, open=open, watch=watch, deadline=deadline)
        except IdentityError as error:
            return Drill(name, value, None, error)
    tokens = verdict.portraits["infer"].total.n if "infer" in verdict.portraits else 0
    return Drill(name, value, verdict, None, gates(verdict.portraits) if tokens else (), tokens)
