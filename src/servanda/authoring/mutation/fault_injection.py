# Faults injected: whether the contract catches each fault of the catalogue in real kernels.

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

from servanda.authoring.mutation.result import Fate, FaultResult, Nearest
from servanda.contract.model import Contract
from servanda.engines.faults import FAULTS
from servanda.engines.faults.base import cannot
from servanda.errors import Interrupted, MeasurementError, ServandaError
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.lint.runtime import RUNTIME_METRICS
from servanda.judgement.verdict import Verdict
from servanda.runner.fault_drill import Drill, drill
from servanda.runner.measurement import Open, Progress, Watch


def named(names: Sequence[str]) -> tuple[str, ...]:
    """The faults that were asked for, in the order of the catalogue; none is all of it.

    Raises:
        MeasurementError: there is no such fault.
    """
    for name in names:
        if name not in FAULTS:
            raise MeasurementError(f"there is no fault {name!r}", hint=FAULTS.hint(name))
    return tuple(name for name in FAULTS if not names or name in names)


def inject(
    contract: Contract, name: str, *, open: Open, watch: Watch, deadline: Callable[[], bool]
) -> FaultResult:
    """Drill one fault, and say whether the contract caught it.

    Caught is what is violated or refused, and what a precondition of the contract makes an
    error: none of them passes a gate, and each names its reason.

    Raises:
        Interrupted: Ctrl-C.
    """
    value, began = FAULTS[name].default, time.monotonic()

    def watch_fault(progress: Progress) -> None:
        watch(Progress(f"{name}: {progress.what}", progress.done, progress.total))

    try:
        result = drill(contract, name, open=open, watch=watch_fault, deadline=deadline)
    except Interrupted:
        raise
    except ServandaError as error:
        message = error.problems[0].message
        fate: Fate = "not applicable" if cannot(name) in message else "undecided"
        return FaultResult(name, value, fate, why=message, seconds=time.monotonic() - began)
    seconds = time.monotonic() - began
    if result.verdict is None:
        why = result.refused.problems[0].message if result.refused else ""
        return FaultResult(name, value, "caught", "refused", why=why, seconds=seconds)
    fate = _fate(result, result.verdict)
    return FaultResult(
        name,
        value,
        fate,
        result.outcome,
        by=result.deciding,
        near=None if fate == "caught" else nearest(result.verdict),
        seconds=seconds,
    )


def _fate(result: Drill, verdict: Verdict) -> Fate:
    if result.outcome == "violated":
        return "caught"
    guards = [c for c in verdict.cells if c.section == "observability" and c.enforced]
    if any(guard.outcome == "error" for guard in guards):
        return "caught"
    if verdict.circumstances.stopped == "time":
        return "open"
    return "missed" if result.outcome == "holds" else "undecided"


def nearest(verdict: Verdict) -> Nearest | None:
    """The enforced cell of a verdict that came nearest to being red."""
    price = math.log(max(verdict.price_cells, 1) / verdict.alpha)
    cells = [near for c in verdict.cells if c.enforced for near in _near(c, price)]
    return max(cells, key=lambda near: near.part, default=None)


def _near(cell: CellVerdict, price: float) -> Iterator[Nearest]:
    """How far a cell is on the way to its limit; to its price, where it has no limit."""
    name = f"{cell.clause} on {cell.slice}"
    value, limit = cell.value, cell.limit
    if value is not None and limit:
        yield Nearest(name, _part(cell.metric, value, limit), f"{value:.3g} of {limit:.3g}")
    elif limit is None and cell.e_violated is not None:
        part = max(cell.e_violated, 0.0) / price
        yield Nearest(name, part, f"{100 * part:.0f} % of the evidence that it takes")


def _part(metric: str, value: float, limit: float) -> float:
    if metric in ("usable_ratio", "kept_ratio"):
        return (1 - value) / (1 - limit) if limit < 1 else 0.0
    if metric in RUNTIME_METRICS and RUNTIME_METRICS[metric].limit == "at_least":
        return limit / value if value else math.inf
    return value / limit
