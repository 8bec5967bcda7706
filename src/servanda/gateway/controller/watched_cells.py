# The cells of a contract that routing watches, and those that it does not.
#
# Routing must know the slice of a request before dispatch, so it watches enforced anytime-valid
# bounds on slices by label or prompt length, and on the whole traffic.  Its claim is about the
# population of requests, whatever the contract claims: one request is one prompt group.
#
# On each of these slices it also tests whether tokens are sampled from the distribution that the
# infer kernel reports: the bounds compare logprobs, which another temperature need not change.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from servanda.contract.clause import SAMPLE_RATIO, Relative
from servanda.contract.model import EXTERNAL, Contract, Kernel, base_of
from servanda.contract.stages import Leg, course_of
from servanda.contract.workload import Workload
from servanda.errors import ContractError, Problem
from servanda.gateway.controller.status import UnwatchedCell
from servanda.gateway.routing.state import Rules, WatchedCell
from servanda.judgement.clauses.base import Cell, limit_of
from servanda.judgement.escalation import action_of
from servanda.judgement.plan import Plan
from servanda.judgement.slices.rules import LABEL, Cut
from servanda.runner.load import compile

_TOKENS = "request.prompt_tokens"
_FIDELITY = "sampler_fidelity"  # the metric, and the default name of its clause


@dataclass(frozen=True)
class WatchedCells:
    """The cells of a contract that are watched on live traffic.

    Args:
        plan: plan of its last stage.
        by_name: (clause, slice) -> cell; its prompt groups are requests.
        watched: the same cells in the form of routing, in the order of the contract, plus one
            sampler test per slice.
        left_out: the other enforced cells.
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
        """The workload of the traffic: the first."""
        return self.plan.schedules[0].workload

    @property
    def width(self) -> int:
        """Most new tokens of a request."""
        return self.plan.schedules[0].width

    def split_tolerance(self, leg: str) -> float | None:
        """Relative difference of a step's split that is permitted; None: no clause tests it."""
        stage = leg.partition("-")[0]
        clauses = (c for c in self.contract.observability.clauses if c.metric == SAMPLE_RATIO)
        return min((limit_of(clause) for clause in clauses if stage in clause.stages), default=None)

    @cached_property
    def draws(self) -> tuple[WatchedCell, ...]:
        """The watched tests of the sampler."""
        return tuple(cell for cell in self.watched if cell.refutes)

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        return tuple(dict.fromkeys(cell.cut for cell in self.by_name.values()))

    @cached_property
    def fields(self) -> frozenset[str]:
        """The fields that slices are defined by."""
        return frozenset(field for cut in self.cuts for field in cut.fields)


def select_cells(contract: Contract) -> WatchedCells:
    """Select the cells that routing watches.

    A contract without live stages is watched as if infer served all traffic.  If no rule diverts,
    and decisions are only recorded, the status shows the effect of `divert: slice`.

    Raises:
        ContractError: no cell can be watched, no scorer is available, or the reference scorer is a
            serving backend.
    """
    problems = [*_refused(contract)]
    if problems:
        raise ContractError.all(problems)
    if not any(c.enforced and "full" in c.stages for c in contract.statistical):
        raise _nothing(contract, ())
    full = next((leg for leg in course_of(contract) if leg.stage == "full"), Leg("full", share=1.0))
    # traffic has no last request: decisions are sequential, not by sample size
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
        room = 1 if cell.kind.each == "sequence" else cell.cut.positions(width)
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
            "set kernels.train to the reference kernel, on a separate engine",
        )
    elif contract.stable is not None and _one_server(train, contract.stable):
        yield Problem(
            "kernels.train and stable are one server: the reference scorer must not serve",
            contract.where("kernels", "train", "url"),
            "give kernels.train a separate server, or an engine such as transformers",
        )


def _one_server(kernel_: Kernel, other: Kernel) -> bool:
    """Whether two kernels have one URL, with or without the /v1 of its API."""
    places = [base_of(kernel.url or "") for kernel in (kernel_, other)]
    return bool(places[0]) and places[0] == places[1]


def _run(kernel: Any) -> dict[str, Any]:
    """A kernel's definition without its title."""
    return kernel.model_dump(exclude={"title"})


def _unwatched(cell: Cell) -> str:
    """The reason why a cell cannot be watched; "" if it can."""
    kind = cell.kind
    if kind.reason:
        return kind.reason
    if isinstance(cell.clause.at_most, Relative):
        return "its limit is relative to a value of the stable or train kernel"
    if kind.certificate is None:
        return "it is no anytime-valid bound on sampled tokens"
    if not kind.certificate.feed.proves:
        return "its mean is unbounded, so the return test could never pass"
    late = sorted(f for f in cell.cut.fields if f != _TOKENS and not f.startswith(LABEL))
    if late:
        return f"{', '.join(late)} is not known before the request"
    return ""


def _watched(contract: Contract, cell: Cell) -> WatchedCell:
    kind = cell.kind.certificate
    assert kind
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
    """The sampler test on each slice that has a cell.

    The contract's own clause gives the name.  The test diverts a slice if any cell of the slice
    may, because the cells depend on it, or if a rule for it says so.
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
    """The actions of rules for a violated clause: what is diverted, and who is paged."""
    actions = [action_of(do) for rule in _rules(contract, clause, section) for do in rule.do]
    to = {value for name, value in actions if name == "divert"}
    every = (action_of(do)[0] for rule in contract.escalation for do in rule.do)
    diverts: Diverts = "all" if "all" in to else "slice" if to or "divert" not in every else ""
    return diverts, tuple(dict.fromkeys(value for name, value in actions if name == "page"))


def _rules(contract: Contract, clause: str, section: str) -> Iterator[Any]:
    """Rules that apply if a clause is violated."""
    for rule in contract.escalation:
        when = rule.when
        ours = when.get("clause") == clause or when.get("section") == section
        if ours and (when.get("is") == "violated" or when.get("is_not") not in (None, "violated")):
            yield rule
