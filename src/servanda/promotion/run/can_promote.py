# Whether a build may be at a stage, from the ledger alone, with an exit code.

from __future__ import annotations

from dataclasses import dataclass

from servanda.contract.model import Contract
from servanda.contract.stages import refuse_absent
from servanda.errors import EvidenceError
from servanda.promotion.advance import in_order, judged
from servanda.promotion.ledger.ledger import Ledger
from servanda.promotion.run.history import History, histories, histories_of, history_of
from servanda.promotion.run.report import cell_text, when

_WAITS = 3  # neither allowed nor forbidden


@dataclass(frozen=True)
class Answer:
    """Whether a build may be at a stage.

    Args:
        exit_code: 0 yes, 1 its contract is violated, 3 no sufficient evidence.
        why: the reason, with the deciding numbers; history: history of the run.
    """

    exit_code: int
    why: str
    history: History | None = None

    @property
    def yes(self) -> bool:
        return self.exit_code == 0

    def __str__(self) -> str:
        return f"{'YES' if self.yes else 'NO'}: {self.why}"


def can_promote(
    ledger: Ledger, contract: Contract, to: str, *, now: float, infer: str = "", train: str = ""
) -> Answer:
    """Whether the ledger allows a build of a contract to be at a stage.

    Args:
        infer, train: prefixes of the kernels' digests; "": the only one in the ledger.
        now: unix seconds, for expiry.

    Raises:
        ContractError: the promotion has no such stage.
        EvidenceError: several builds match, or the clock went back.
    """
    refuse_absent(contract, to)
    name = contract.metadata.name
    ours = histories_of(ledger, name)
    if not ours:
        return Answer(_WAITS, f"the ledger has no promotion of {name}")
    same = [s for s in ours if s.state.key.contract == contract.digest]
    if not same:
        held = ", ".join(dict.fromkeys(s.state.key.contract[:8] for s in ours))
        why = f"the evidence is for another version of {name}: digest {held}, this one is "
        return Answer(_WAITS, f"{why}{contract.digest[:8]}", ours[-1])
    meant = [
        s
        for s in same
        if s.state.key.infer.startswith(infer) and s.state.key.train.startswith(train)
    ]
    if not meant:
        held = ", ".join(dict.fromkeys(s.state.key.infer[:8] for s in same))
        why = f"the evidence is for another build: infer {held}, not {infer or train}"
        return Answer(_WAITS, why, same[-1])
    builds = {(s.state.key.infer, s.state.key.train) for s in meant}
    if len(builds) > 1:
        named = ", ".join(sorted({infer_digest[:8] for infer_digest, _ in builds}))
        raise EvidenceError(
            f"the ledger has promotions of {len(builds)} builds of {name}: infer {named}",
            hint="name one: --infer-digest DIGEST",
        )
    return _of(meant[-1], to, now)


def _of(history: History, to: str, now: float) -> Answer:
    state = history.state
    in_order(state, now)
    about = f"promotion {history.run} "
    decided = _decided(history)
    numbers = f" ({decided})" if decided else ""
    if state.status == "rolled_back":
        return Answer(1, f"{about}is rolled back: {state.why}{numbers}", history)
    if state.status == "superseded":
        return Answer(_WAITS, f"{about}is superseded: {state.why}", history)
    if state.valid_until is not None and now >= state.valid_until:
        why = f"{about}has evidence that expired {when(state.valid_until)}"
        return Answer(_WAITS, why, history)
    if not history.reached(to):
        status = state.status.replace("_", " ")
        why = f"{about}is {status} on {history.leg.name}: {state.why}{numbers}"
        return Answer(_WAITS, why, history)
    until = f", valid until {when(state.valid_until)}" if state.valid_until is not None else ""
    return Answer(0, f"{about}has reached {history.leg.name}{numbers}{until}", history)


def _decided(history: History) -> str:
    """The cell that decided the latest evaluation with a measurement."""
    evaluations = [evaluation for evaluation in history.evaluations if not evaluation.finding.error]
    if not evaluations:
        return ""
    cell = judged(evaluations[-1].finding.cells)[1]
    return cell_text(cell) if cell is not None and cell.n else ""


def named(ledger: Ledger, text: str) -> History:
    """The run with a name, or the only active run with this prefix.

    Raises:
        EvidenceError: no run, or several.
    """
    known = ledger.runs()
    exact = history_of(ledger, text) if text in known else None
    if exact is not None:
        return exact
    matching = [*histories(ledger, beginning=text)]
    under_way = [s for s in matching if not s.state.ended]
    for candidates in (matching, under_way):
        if len(candidates) == 1:
            return candidates[0]
    names = ", ".join([s.run for s in under_way or matching] or known) or "none"
    raise EvidenceError(
        f"{'no promotion is' if not matching else 'several promotions are'} named {text!r}",
        hint=f"the ledger has: {names}" if not matching else f"name one: {names}",
    )
