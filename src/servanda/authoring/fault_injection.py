# Faults injected: whether a contract lets a conforming kernel pass and catches a faulty one.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from servanda.contract.model import PACK, Contract, Kernels
from servanda.engines.faults.base import cannot
from servanda.engines.worker import spawn
from servanda.errors import Interrupted, ServandaError
from servanda.judgement.clauses.base import CellVerdict
from servanda.report.format import line
from servanda.runner.fault_drill import Drill, drill
from servanda.runner.measurement import Open, Watch, unwatched
from servanda.runner.sequential import named

# of a check without a fault "passes" and "fails"; "open" is one that the time was over for
Fate = Literal["passes", "fails", "caught", "missed", "undecided", "not applicable", "open"]

_RECORDED = (PACK, "recorded")  # engines that answer nothing new
_GLYPH = {"passes": "✓", "fails": "✗", "caught": "✓", "missed": "✗", "not applicable": "–"}
_CELLS = 3  # that made an outcome, by name; the rest is counted


@dataclass(frozen=True)
class FaultCheck:
    """A check of a contract with a fault in its kernels, or without one.

    Args:
        fault: its name; "" without one.
        kernels: the two sides.
        outcome: of the check; "refused" where nothing was measured, "" where there was none.
        by: the enforced cells that made the outcome, with numbers where there is no fault.
        why: why it was refused, or cannot be injected.
    """

    fault: str
    kernels: str
    fate: Fate
    outcome: str = ""
    by: tuple[str, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        more = len(self.by) - _CELLS
        by = [*self.by[:_CELLS], *([f"{more} more"] if more > 0 else [])]
        parts = (self.outcome, ", ".join(map(line, by)) or line(self.why))
        found = ": ".join(part for part in parts if part)
        name = self.fault or f"no fault, {line(self.kernels)}"
        return f"{_GLYPH.get(self.fate, '?')} {name}: {', '.join(filter(None, (self.fate, found)))}"


def fault_checks(
    contract: Contract,
    faults: Sequence[str],
    *,
    open: Open = spawn,
    watch: Watch = unwatched,
    deadline: Callable[[], bool] = lambda: False,
) -> Iterator[FaultCheck]:
    """The checks of a contract: without a fault, and then with each fault.

    Two copies of the train kernel are checked first, then the kernels of the contract.  Faults are
    injected into the latter; where these do not pass without a fault, into the former, for else
    every fault would seem to be caught.  Where neither passes, none is injected.

    Args:
        faults: names of the catalogue.
        deadline: returns whether the time is over; then no round starts.

    Raises:
        ContractError: the contract cannot be measured, or its sizes certify a limit for no one.
        MeasurementError: a check without a fault failed.
        Interrupted: Ctrl-C.
    """
    good: tuple[Contract, FaultCheck] | None = None
    itself = _against_itself(contract)
    for one in (itself, contract):
        if one is None or (one is contract and itself and itself.kernels == contract.kernels):
            continue
        check = _without_fault(
            one, drill(one, None, open=open, watch=named(watch, "no fault"), deadline=deadline)
        )
        yield check
        if check.fate == "passes":
            good = one, check
        elif one is itself:
            return
    if good is None:
        return
    for name in faults:
        if deadline():
            yield FaultCheck(name, good[1].kernels, "open", why="the time was over")
            continue
        try:
            result = drill(good[0], name, open=open, watch=named(watch, name), deadline=deadline)
        except Interrupted:
            raise
        except ServandaError as error:
            why = error.problems[0].message
            fate: Fate = "not applicable" if cannot(name) in why else "undecided"
            yield FaultCheck(name, good[1].kernels, fate, why=why)
        else:
            why = result.refused.problems[0].message if result.refused else ""
            by = result.deciding
            yield FaultCheck(name, good[1].kernels, _fate(result), result.outcome, by, why)


def valid(checks: Sequence[FaultCheck], *, every: bool = False) -> bool | None:
    """Whether a conforming kernel passes and a fault is caught; None: not known in the time.

    Args:
        every: whether each fault has to be caught, and not only one.
    """
    fates = {check.fate for check in checks if check.fault}
    if not any(check.fate == "passes" for check in checks):
        return None if any(check.fate == "open" for check in checks) else False
    if every:
        return False if fates - {"caught", "open"} else None if "open" in fates else True
    if "caught" in fates:
        return True
    return False if fates & {"missed", "undecided"} and "open" not in fates else None


def share_caught(checks: Sequence[FaultCheck]) -> tuple[int, int]:
    """(caught, those that can be injected and were) of the faults."""
    fates = [check.fate for check in checks if check.fault]
    return fates.count("caught"), sum(f in ("caught", "missed", "undecided") for f in fates)


def _against_itself(contract: Contract) -> Contract | None:
    """The contract with its train kernel on both sides; None where train is a recording."""
    train = contract.kernels.train
    if train.engine in _RECORDED:
        return None
    # a transform and a mask of its own are what train scores by; what is drawn is the workload's
    infer = train.model_copy(update={"sampling": None, "mask": "own"})
    # equal bits are what one kernel on both sides is there to show
    return contract.model_copy(
        update={"kernels": Kernels(train=train, infer=infer), "bitwise": True}
    )


def _without_fault(contract: Contract, result: Drill) -> FaultCheck:
    train, infer = str(contract.kernels.train), str(contract.kernels.infer)
    kernels = f"{train} against itself" if train == infer else f"{infer} against {train}"
    if result.verdict is None:
        why = result.refused.problems[0].message if result.refused else ""
        return FaultCheck("", kernels, "fails", "refused", why=why)
    if result.outcome == "holds":
        return FaultCheck("", kernels, "passes", "holds")
    fate: Fate = "open" if result.verdict.circumstances.stopped == "time" else "fails"
    odd = [c for c in result.verdict.cells if c.enforced and c.outcome == result.outcome]
    return FaultCheck("", kernels, fate, result.outcome, tuple(map(_numbers, odd)))


def _numbers(cell: CellVerdict) -> str:
    """A cell that a conforming kernel does not keep: its noise, or too small a size."""
    text = f"{cell.clause} on {cell.slice}"
    if cell.value is not None and cell.limit is not None:
        text += f" {cell.value:.3g} (limit {cell.limit:g}"
        if cell.floor is not None and cell.floor >= cell.limit:
            text += f", below the noise floor {cell.floor:.3g}"
        text += ")"
    return text


def _fate(result: Drill) -> Fate:
    """Caught is what is violated or refused, and what a precondition makes an error."""
    if result.verdict is None or result.outcome == "violated":
        return "caught"
    guards = [c for c in result.verdict.cells if c.section == "observability" and c.enforced]
    if any(guard.outcome == "error" for guard in guards):
        return "caught"
    if result.verdict.circumstances.stopped == "time":
        return "open"
    return "missed" if result.outcome == "holds" else "undecided"
