# A fault drill: a check of a contract with one injected fault of the catalogue.

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from servanda.contract.model import Contract
from servanda.engines.faults import FAULTS, injected
from servanda.engines.worker import spawn
from servanda.errors import IdentityError
from servanda.judgement.token_profile import Gate, gates
from servanda.judgement.verdict import Verdict
from servanda.runner import run
from servanda.runner.measurement import Open, Watch, unwatched


@dataclass(frozen=True)
class Drill:
    """The result of a check with an injected fault.

    Args:
        verdict: None if the two sides were refused before any measurement.
        refused: the reason of a refusal.
        gates: thresholds of other projects on the tokens of the verdict; empty if no token has both
            logprobs.
        tokens: the number of these tokens.
    """

    fault: str | None
    value: Any
    verdict: Verdict | None
    refused: IdentityError | None = None
    gates: tuple[Gate, ...] = ()
    tokens: int = 0

    @property
    def exit_code(self) -> int:
        """The exit code of `servanda check` on the same kernels."""
        return IdentityError.exit_code if self.verdict is None else self.verdict.exit_code

    @property
    def outcome(self) -> str:
        return self.verdict.outcome if self.verdict is not None else "refused"

    @property
    def deciding(self) -> tuple[str, ...]:
        """The deciding enforced cells, "clause on slice"; empty if the contract holds."""
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
        name: None: no fault, for the baseline of a drill.
        value: None: the fault's default.
        deadline: returns whether the time is over; then no round starts.

    Raises:
        MeasurementError: no such fault, an invalid value, or a failed measurement.
        ContractError, Interrupted: as in `run.check`.
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
