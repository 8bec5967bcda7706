# Mutants: a contract with one thing changed, each a mistake that its tests are to notice.
#
# A limit is moved in both directions, a clause, a slice or a rule is removed, a clause is only
# shown.  How much is measured does not change: sizes say how soon an answer comes, not which.

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from servanda.authoring.mutation import missing_case
from servanda.contract.clause import Relative, Section
from servanda.contract.model import Clause, Contract, Place
from servanda.contract.yaml_reader import Marks, Source
from servanda.errors import Where
from servanda.judgement.clauses.base import GUARDS
from servanda.judgement.lint import linter
from servanda.theory.divergence.base import DIVERGENCES

Kind = Literal["limit", "clause", "slice", "severity", "escalation"]
Span = tuple[float, float]

_NOISES = 2.0  # times self_noise; a limit below lies inside the noise


@dataclass(frozen=True)
class Mutant:
    """One contract in which one thing is another.

    Args:
        name: short, and its own.
        kind: what was changed; "limit" covers limits, percentiles and the confidence.
        place: of what was changed, in the contract as it was.
        contract: what it became.
        sentence: the change, for people.
        unasked: what no test asks where it survives.
        clause: whose; "" where it is no clause's.
        between: the values of the clause's cells that only one of both limits allows; None
            where the change is not of that kind.
    """

    name: str
    kind: Kind
    place: Place
    contract: Contract
    sentence: str
    unasked: str
    clause: str = ""
    between: Span | None = None

    @property
    def where(self) -> Where | None:
        """In the text of the contract, if it was read from one."""
        return self.contract.where(*self.place)


def mutants(contract: Contract) -> Iterator[Mutant]:
    """Every mutant of a contract, in the order of its parts; pure.

    Only enforced clauses have any: nothing hangs on the others.  A change that the language rejects
    is no mutant, because lint reports it; for a limit the next best value is taken instead.
    """
    known = _refusals(contract)
    for change in _changes(contract):
        for mutant in change:
            if _refusals(mutant.contract) <= known:
                yield mutant
                break


def _changes(contract: Contract) -> Iterator[Iterator[Mutant]]:
    """Each change as the mutants that would do, the preferred one first."""
    yield from _confidence(contract)
    for section, place, clause in contract.clauses():
        if not clause.enforced:
            continue
        yield from _ClauseMutants(contract, section, place, clause).changes()
    yield from (iter([_without_slice(contract, i)]) for i in range(len(contract.slices)))
    for i, rule in enumerate(contract.escalation):
        if "diverted_traffic" not in rule.when:  # traffic is the gateway's; no test has any
            yield iter([_without_rule(contract, i)])


def _confidence(contract: Contract) -> Iterator[Iterator[Mutant]]:
    was = contract.confidence
    for moved in (lowered(was, top=1.0), raised(was, top=1.0)):
        yield (
            Mutant(
                name=f"confidence {now:g}",
                kind="limit",
                place=("confidence",),
                contract=contract.model_copy(update={"confidence": now}),
                sentence=f"confidence {was:g} becomes {now:g}",
                unasked=missing_case.confidence(was, now),
            )
            for now in moved
        )


@dataclass(frozen=True)
class _ClauseMutants:
    contract: Contract
    section: Section
    place: Place
    clause: Clause

    def changes(self) -> Iterator[Iterator[Mutant]]:
        for which in ("at_most", "at_least"):
            limit = getattr(self.clause, which)
            if isinstance(limit, Relative):
                least = _NOISES if limit.of == "self_noise" else 0.0
                for moved in (lowered(limit.times, least=least), raised(limit.times)):
                    yield (self._limit(which, limit.times, now) for now in moved)
            elif limit is not None:
                top = _top(self.contract, self.section, self.clause)
                for moved in (lowered(limit, top=top), raised(limit, top=top)):
                    yield (self._limit(which, limit, now) for now in moved)
        was = self.clause.percentile
        if was is not None:
            for moved in (lowered(was, top=100.0), raised(was, top=100.0)):
                yield (self._percentile(was, now) for now in moved)
        yield iter([self._severity()])
        yield iter([self._removal()])

    def _mutant(
        self,
        name: str,
        kind: Kind,
        key: tuple[str, ...],
        update: Mapping[str, Any],
        sentence: str,
        unasked: str,
        between: Span | None = None,
    ) -> Mutant:
        """The clause with some of its values changed."""
        changed = _with_clause(self.contract, self.place, self.clause.model_copy(update=update))
        place, id_ = (*self.place, *key), self.clause.id
        return Mutant(name, kind, place, changed, f"{id_}: {sentence}", unasked, id_, between)

    def _limit(self, which: str, was: float, now: float) -> Mutant:
        clause, limit = self.clause, getattr(self.clause, which)
        relative = isinstance(limit, Relative)
        # cells of a percentile clause speak of the share beyond the limit, and relative ones of
        # a limit that is known only when it is judged
        comparable = clause.percentile is None and not relative
        low, high = sorted((was, now))
        # a value that is the limit itself keeps it
        between = (math.nextafter(low, math.inf), high)
        if which == "at_least":
            between = (low, math.nextafter(high, -math.inf))
        return self._mutant(
            f"{clause.id}.{which} {now:g}",
            "limit",
            (which, "times") if relative else (which,),
            {which: limit.model_copy(update={"times": now}) if relative else now},
            f"{which} {was:g} becomes {now:g}" + (f" times {limit.of}" if relative else ""),
            missing_case.limit(self.contract, self.section, clause, was, now),
            between if comparable else None,
        )

    def _percentile(self, was: float, now: float) -> Mutant:
        clause, aggregate = self.clause, f"p{now:.12g}"
        low, high = sorted(round(1 - p / 100, 12) for p in (was, now))
        return self._mutant(
            f"{clause.id}.aggregate {aggregate}",
            "limit",
            ("aggregate",),
            {"aggregate": aggregate},
            f"{clause.aggregate} becomes {aggregate}",
            missing_case.percentile(self.contract, self.section, clause, low, high),
            (math.nextafter(low, math.inf), high) if self.section == "statistical" else None,
        )

    def _severity(self) -> Mutant:
        return self._mutant(
            f"{self.clause.id} as a warning",
            "severity",
            ("severity",),
            {"severity": "warning"},
            f"severity {self.clause.severity} becomes warning, so it is only shown",
            missing_case.severity(self.clause),
        )

    def _removal(self) -> Mutant:
        contract, id_ = self.contract, self.clause.id
        rules = tuple(rule for rule in contract.escalation if rule.when.get("clause") != id_)
        watching = len(contract.escalation) - len(rules)
        verb = "watches" if watching == 1 else "watch"
        also = f", and {watching} rule{'s' * (watching > 1)} of escalation that {verb} it"
        without = _with_clause(contract, self.place, None)
        return Mutant(
            name=f"without clause {id_}",
            kind="clause",
            place=self.place,
            contract=without.model_copy(update={"escalation": rules}),
            sentence=f"clause {id_} is removed{also if watching else ''}",
            unasked=missing_case.clause(self.clause),
            clause=id_,
        )


def _without_slice(contract: Contract, i: int) -> Mutant:
    """Its name goes from every clause, and a clause that concerns nothing else goes too."""
    name = contract.slices[i].name
    rest = contract.slices[:i] + contract.slices[i + 1 :]
    mutated = contract.model_copy(update={"slices": rest})
    removed = []
    for _, place, clause in reversed([*contract.clauses()]):  # places before it stay as they are
        if name not in (clause.slices or ()):
            continue
        named = tuple(s for s in clause.slices or () if s != name)
        removed += [] if named else [clause.id]
        narrowed = clause.model_copy(update={"slices": named}) if named else None
        mutated = _with_clause(mutated, place, narrowed)
    rules = tuple(r for r in contract.escalation if r.when.get("clause") not in removed)
    also = f", and {', '.join(reversed(removed))}, which concerns nothing else" if removed else ""
    return Mutant(
        name=f"without slice {name}",
        kind="slice",
        place=("slices", i),
        contract=mutated.model_copy(update={"escalation": rules}),
        sentence=f"slice {name} is removed{also}",
        unasked=missing_case.slice_(name),
    )


def _without_rule(contract: Contract, i: int) -> Mutant:
    rule = contract.escalation[i]
    rest = contract.escalation[:i] + contract.escalation[i + 1 :]
    return Mutant(
        name=f"without rule {i + 1} of escalation",
        kind="escalation",
        place=("escalation", i),
        contract=contract.model_copy(update={"escalation": rest}),
        sentence=f"rule {i + 1} of escalation is removed: {missing_case.rule_words(rule)}",
        unasked=missing_case.rule(rule),
    )


def _with_clause(contract: Contract, place: Place, clause: Clause | None) -> Contract:
    """The contract with another clause at a place, or with none there."""
    section, i = str(place[0]), int(place[-1])
    part = getattr(contract, section)
    nested = len(place) > 2
    clauses = part.clauses if nested else part
    new = (*clauses[:i], *([clause] if clause is not None else []), *clauses[i + 1 :])
    return contract.model_copy(
        update={section: part.model_copy(update={"clauses": new}) if nested else new}
    )


def _top(contract: Contract, section: Section, clause: Clause) -> float:
    """The largest value that what is held to the limit can have."""
    if clause.metric in GUARDS:
        return 1.0
    if clause.metric in ("reward_drift", "reward_gap") and contract.reward is not None:
        low, high = contract.reward.range
        return high - low
    if clause.metric not in DIVERGENCES:
        return math.inf
    metric = DIVERGENCES[clause.metric]
    exact = section == "numerical" or clause.aggregate == "mean"
    _, top = metric.span_of("logits") if exact and "logits" in metric.forms else metric.span
    clipped = clause.clip is not None and clause.aggregate == "mean"
    return min(top, clause.clip) if clipped and clause.clip is not None else top


def _refusals(contract: Contract) -> frozenset[str]:
    """What the language says against a contract; places do not count."""
    try:
        Contract.model_validate(contract.model_dump())
    except ValidationError as error:
        return frozenset(f"{e['loc']}: {e['msg']}" for e in error.errors(include_url=False))
    kernels = [*vars(contract.kernels).values(), *([contract.stable] if contract.stable else [])]
    nowhere = Marks(Source("", ""))
    nowhere.note((), 0)
    problems = linter.check(
        contract,
        nowhere,
        engines={k.engine for k in kernels},
        faults={name for k in kernels for name in k.fault or ()},
    )
    return frozenset(p.message for p in problems)


# a number near the top of its range is moved by its distance to the top: twice 0.999 would say
# nothing, and 0.998 lets twice as much through
FACTOR = 2.0
FROM_ZERO = 1e-3  # what a limit of 0 becomes, in its own unit: no multiple of 0 is another limit


def raised(x: float, *, top: float = math.inf) -> Iterator[float]:
    """Larger limits, the preferred one first; all below `top`.

    >>> list(raised(0.03, top=1.0)), list(raised(0.999, top=1.0)), list(raised(3.0))
    ([0.06, 0.515], [0.9995], [6.0])
    """
    if x == 0:
        yield FROM_ZERO
    elif x < 0:
        yield _clean(x / FACTOR)
    elif x * FACTOR < top and not x > top / 2:
        yield _clean(x * FACTOR)
    if 0 < x < top < math.inf:
        yield _clean(top - (top - x) / FACTOR)


def lowered(x: float, *, top: float = math.inf, least: float = 0.0) -> Iterator[float]:
    """Smaller limits, the preferred one first; none of 0, nor below `least`.

    >>> list(lowered(0.03, top=1.0)), list(lowered(0.999, top=1.0)), list(lowered(3.0, least=2.0))
    ([0.015], [0.998, 0.4995], [2.5])
    """
    if x < 0:
        yield _clean(x * FACTOR)
        return
    if top / 2 < x < top:
        yield _clean(top - (top - x) * FACTOR)
    if x / FACTOR > least:
        yield _clean(x / FACTOR)
    elif x > least:
        yield _clean((x + least) / 2)


def _clean(x: float) -> float:
    """Without the rounding of 1 - 0.999, which no one wrote."""
    return float(f"{x:.12g}")
