# Which cells of a contract routing acts on, and which it leaves to others.
#
# Routing needs to know the slice of a request before it is sent, so it watches enforced
# certificates on slices of labels and of the length of the prompt, and on the whole.  It speaks
# of a population of requests, whatever the contract claims: one request is one prompt group.
#
# Beside them it watches, on each of these slices, whether tokens are drawn from the distribution
# that infer reports: certificates compare logprobs, and another temperature need not show in them.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from servanda.contract.model import EXTERNAL, Contract, Kernel, base_of
from servanda.contract.stages import Leg, course_of
from servanda.contract.workload import Workload
from servanda.errors import ContractError, Problem
from servanda.gateway.controller.status import UnwatchedCell
from servanda.gateway.routing.state import Rules, WatchedCell
from servanda.judgement.clauses.base import Cell
from servanda.judgement.clauses.relative import RelativeCertificate
from servanda.judgement.clauses.statistical import BySequence, Certificate
from servanda.judgement.escalation import action_of
from servanda.judgement.plan import Plan
from servanda.judgement.slices.rules import LABEL, Cut
from servanda.runner.load import compile

_TOKENS = "request.prompt_tokens"
_FIDELITY = "sampler_fidelity"  # the metric, and the name of the clause where a contract has none


@dataclass(frozen=True)
class WatchedCells:
    """What of a contract is watched on live traffic.

    Args:
        plan: of its last stage.
        by_name: (clause, slice) -> the cell, whose prompt groups are requests.
        watched: the same cells as routing sees them, in the order of the contract, and one for
            how tokens are drawn on each of their slices.
        left_out: the other enforced ones.
    """

    contract: Contract
    plan: Plan
    by_name: Mapping[tuple[str, str], Cell]
    watched: tuple[WatchedCell, ...]
    left_out: tuple[UnwatchedCell, ...] = ()

    @property
    def rules(self) -> Rules:
        return Rules(self.contract, self.watched)

    @property
    def workload(self) -> Workload:
        """Traffic is one: the first."""
        return self.plan.schedules[0].workload

    @property
    def width(self) -> int:
        """New tokens that a request has room for."""
        return self.plan.schedules[0].width

    @cached_property
    def draws(self) -> tuple[WatchedCell, ...]:
        """What is watched of how tokens are drawn."""
        return tuple(cell for cell in self.watched if cell.refutes)

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        return tuple(dict.fromkeys(cell.cut for cell in self.by_name.values()))

    @cached_property
    def fields(self) -> frozenset[str]:
        """That any slice is cut by."""
        return frozenset(field for cut in self.cuts for field in cut.fields)


def select_cells(contract: Contract) -> WatchedCells:
    """What routing watches of a contract.

    A contract without live stages is watched as one that serves everybody.  Where no rule asks
    for a divert, and nothing is done anyway, what is shown is what `divert: slice` would do.

    Raises:
        ContractError: nothing can be watched, no one here can score, or the referee is an arm.
    """
    problems = [*_refused(contract)]
    if problems:
        raise ContractError.all(problems)
    if not any(c.enforced and "full" in c.stages for c in contract.statistical):
        raise _nothing(contract, ())
    full = next((leg for leg in course_of(contract) if leg.stage == "full"), Leg("full", share=1.0))
    # traffic has no last request: what is decided here is decided by anyone who looks, not by sizes
    plan = compile(contract, leg=replace(full, if_inconclusive="wait"))
    width = plan.schedules[0].width
    cells: dict[tuple[str, str], Cell] = {}
    left_out: list[UnwatchedCell] = []
    for cell in plan.cells:
        if cell.section != "statistical" or not cell.clause.enforced:
            continue
        if why := _unwatched(cell):
            left_out.append(UnwatchedCell(cell.clause.id, cell.cut.name, why))
            continue
        room = 1 if isinstance(cell.kind, BySequence) else cell.cut.positions(width)
        cells[cell.clause.id, cell.cut.name] = replace(cell, claim="population", capacity=room)
    if not cells:
        raise _nothing(contract, left_out)
    watched = tuple(_watched(contract, cell) for cell in cells.values())
    watched += tuple(_draws(contract, watched))
    return WatchedCells(contract, plan, cells, watched, tuple(left_out))


def _nothing(contract: Contract, left_out: Sequence[UnwatchedCell]) -> ContractError:
    reasons = "; ".join(f"{cell.clause} on {cell.slice}: {cell.why}" for cell in left_out)
    return ContractError(
        f"no statistical clause of {contract.metadata.name} can be watched on traffic"
        + (f": {reasons}" if reasons else ""),
        where=contract.where("statistical"),
        hint="promise a mean or a percentile of a sampled metric on [all], or on slices of "
        "labels.* or request.prompt_tokens, enforced at stage full",
    )


def _refused(contract: Contract) -> Iterator[Problem]:
    train, infer = contract.kernels.train, contract.kernels.infer
    if train.engine == EXTERNAL:
        yield Problem(
            "kernels.train is external, so responses of infer cannot be scored",
            contract.where("kernels", "train", "engine"),
            "name the engine that evaluates the training kernel, such as transformers",
        )
    elif _run(train) == _run(infer) or _one_server(train, infer):
        yield Problem(
            "kernels.train and kernels.infer are one kernel: the reference scorer must not serve",
            contract.where("kernels", "train"),
            "let train be the kernel that infer is held to, on an engine of its own",
        )
    elif contract.stable is not None and _one_server(train, contract.stable):
        yield Problem(
            "kernels.train and stable are one server: the reference scorer must not serve",
            contract.where("kernels", "train", "url"),
            "let train have a server of its own, or an engine such as transformers",
        )


def _one_server(kernel_: Kernel, other: Kernel) -> bool:
    """Whether two kernels are asked at one place, with or without the /v1 of its API."""
    places = [base_of(kernel.url or "") for kernel in (kernel_, other)]
    return bool(places[0]) and places[0] == places[1]


def _run(kernel: Any) -> dict[str, Any]:
    """What a kernel is, but for the name that people gave it."""
    return kernel.model_dump(exclude={"title"})


def _unwatched(cell: Cell) -> str:
    """Why a cell cannot be watched here; "" where it can."""
    kind = cell.kind
    if not isinstance(kind, Certificate):
        return getattr(kind, "reason", "") or "it is no certificate about sampled tokens"
    if isinstance(kind, RelativeCertificate):
        return "its limit is relative to what stable, or train itself, shows"
    if not kind.feed.proves:
        return "its mean has no bound, so that nothing could bring its slice back"
    late = sorted(f for f in cell.cut.fields if f != _TOKENS and not f.startswith(LABEL))
    if late:
        return f"{', '.join(late)} is not known before the request"
    return ""


def _watched(contract: Contract, cell: Cell) -> WatchedCell:
    kind = cell.kind
    assert isinstance(kind, Certificate)
    diverts, pages = _actions_of(contract, cell.clause.id, cell.section)
    return WatchedCell(
        clause=cell.clause.id,
        cut=cell.cut,
        limit=kind.feed.limit,
        scale=kind.feed.scale,
        low=kind.feed.low,
        unit="" if kind.feed.threshold is not None else kind.unit(cell),
        critical=cell.clause.severity == "critical",
        diverts=diverts,
        pages=pages,
    )


def _draws(contract: Contract, watched: Sequence[WatchedCell]) -> Iterator[WatchedCell]:
    """How tokens are drawn, on each slice that has a cell.

    The contract's own clause gives the name.  It moves a slice where any cell of the slice does,
    for it says whether those mean anything, or where a rule of its own asks for it.
    """
    taken = {cell.clause for cell in watched}
    own = (c.id for c in contract.observability.clauses if c.metric == _FIDELITY and c.enforced)
    clause = next(own, _FIDELITY)
    while clause in taken:
        clause += "_"
    diverts, pages = _actions_of(contract, clause, "observability")
    for cut in dict.fromkeys(cell.cut for cell in watched):
        cells = [cell for cell in watched if cell.cut == cut]
        yield WatchedCell(
            clause=clause,
            cut=cut,
            limit=0.0,
            unit="nats",
            critical=any(cell.critical for cell in cells),
            refutes=True,
            diverts=diverts or ("slice" if any(cell.diverts for cell in cells) else ""),
            pages=tuple(dict.fromkeys((*pages, *(who for cell in cells for who in cell.pages)))),
        )


Diverts = Literal["", "slice", "all"]


def _actions_of(contract: Contract, clause: str, section: str) -> tuple[Diverts, tuple[str, ...]]:
    """What rules ask for where a clause is violated: what is diverted, and who is paged."""
    actions = [action_of(do) for rule in _rules(contract, clause, section) for do in rule.do]
    to = {value for name, value in actions if name == "divert"}
    every = (action_of(do)[0] for rule in contract.escalation for do in rule.do)
    diverts: Diverts = "all" if "all" in to else "slice" if to or "divert" not in every else ""
    return diverts, tuple(dict.fromkeys(value for name, value in actions if name == "page"))


def _rules(contract: Contract, clause: str, section: str) -> Iterator[Any]:
    """Rules that are met where a clause is violated."""
    for rule in contract.escalation:
        when = rule.when
        ours = when.get("clause") == clause or when.get("section") == section
        if ours and (when.get("is") == "violated" or when.get("is_not") not in (None, "violated")):
            yield rule
