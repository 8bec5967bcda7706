# Directions: the meaning of a changed value for a promise.
#
# Each rule has the reason for its direction.  `tightened` always implies the other version: keeping
# the new limit keeps the old one.

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from servanda.authoring.diff.values import MIRROR, Change, Kind, Pair, flow_text
from servanda.contract.fields import duration_text
from servanda.contract.model import Clause
from servanda.contract.stages import FIRST_STEP, MIRRORED, SAMPLED
from servanda.judgement.clauses.scope import slices_of
from servanda.judgement.slices.rules import known

Direction = Callable[[Any, Any, Pair], Kind]

REWRITTEN = "it means the same, written in another way"


@dataclass(frozen=True)
class Rule:
    """The interpretation of a change of one field.

    Args:
        says: the direction as text, such as "lower is tightened".
        why: the reason for it, in a line.
        of: the kind of a move from one value to another.
        absent: text for a missing field.
        show: formats a value for messages.
    """

    says: str
    why: str
    of: Direction
    absent: str = "none"
    show: Callable[[Any], str] = flow_text

    def __call__(self, pair: Pair, old: Any, new: Any) -> Iterator[Change]:
        if _same(old, new):
            return
        kind = "cosmetic" if old == new else self.of(old, new, pair)
        why = REWRITTEN if kind == "cosmetic" and self.of is not _cosmetic else self.why
        names = [self._value_text(pair, i, value) for i, value in enumerate((old, new))]
        yield pair.change(kind, " -> ".join(names), why)

    def _value_text(self, pair: Pair, side: int, value: Any) -> str:
        """A value, and whether it is only the default."""
        if value is None:
            return self.absent
        owner, key = pair.owners[side], pair.place[-1]
        fields = getattr(type(owner), "model_fields", {})
        own = next((name for name, field in fields.items() if key in (name, field.alias)), key)
        written = own in getattr(owner, "model_fields_set", {own})
        return f"{self.show(value)}{'' if written else ' (default)'}"


@dataclass(frozen=True)
class Part:
    """A field with a structured value, whose fields are compared one by one.

    Args:
        scalar: rule for two scalars, if the field may be one.
        none: the kind if it is added, mirrored if it is removed.
    """

    why: str
    scalar: Rule | None = None
    none: Kind = "added"
    says: str = "by its own keys; added, removed"


@dataclass(frozen=True)
class Items:
    """A field with many parts, identified by name.

    Args:
        first: what depends on the first part; "" if the order is irrelevant.
    """

    why: str
    noun: str
    says: str = "item by item, by name; added, removed"
    first: str = ""


@dataclass(frozen=True)
class With:
    """A field that is compared together with another one."""

    field: str
    why: str

    @property
    def says(self) -> str:
        return f"with `{self.field}`"


@dataclass(frozen=True)
class Custom:
    """A field whose meaning depends on other parts of its contract."""

    says: str
    why: str
    compare: Callable[[Pair, Any, Any, str], Iterator[Change]]


Handling = Rule | Part | Items | With | Custom


def _same(old: Any, new: Any) -> bool:
    """Fields of one type are equal or not; in free data 1 is not 1.0, for the digest sees both."""
    free = isinstance(old, dict | tuple) and isinstance(new, dict | tuple)
    return as_text(old) == as_text(new) if free else old == new


def as_text(value: Any) -> str:
    """A value as text, as in the digest of a contract: 1 is not 1.0, nor true."""
    return json.dumps(to_jsonable_python(value), sort_keys=True)


def moved(old: float, new: float, *, up: Kind = "tightened") -> Kind:
    """The kind of a change of a number, if up is tighter, or looser."""
    if old == new:
        return "cosmetic"
    return up if new > old else MIRROR[up]


def _move(up: Kind, absent: float | None) -> Direction:
    def kind(old: float | None, new: float | None, _: Pair) -> Kind:
        before, after = (absent if value is None else value for value in (old, new))
        if before is None or after is None:
            return "retargeted"
        return moved(before, after, up=up)

    return kind


def higher(why: str, *, absent: float | None = None, time: bool = False) -> Rule:
    """More is tighter; absent: the number that a missing field counts as, if any."""
    show = duration_text if time else flow_text
    return Rule("higher is tightened", why, _move("tightened", absent), show=show)


def lower(why: str, *, absent: float | None = None, time: bool = False) -> Rule:
    """Less is tighter."""
    show = duration_text if time else flow_text
    return Rule("lower is tightened", why, _move("loosened", absent), show=show)


def ranked(*order: Any, why: str) -> Rule:
    """Words from the loosest to the tightest; those in a tuple are not comparable."""
    ranks = {
        word: rank
        for rank, words in enumerate(order)
        for word in (words if isinstance(words, tuple) else (words,))
    }

    def kind(old: Any, new: Any, _: Pair) -> Kind:
        same = ranks[old] == ranks[new]
        return "retargeted" if same else moved(ranks[old], ranks[new])

    names = [" = ".join(map(flow_text, w)) if isinstance(w, tuple) else flow_text(w) for w in order]
    return Rule(f"{' < '.join(names)}", why, kind)


def set_move(old: set[Any], new: set[Any]) -> Kind:
    """More of a set is tighter; neither more nor less is something else."""
    if old == new:
        return "cosmetic"
    return "tightened" if old < new else "loosened" if new < old else "retargeted"


def inclusion(why: str) -> Rule:
    """A set of names: a superset is tighter."""
    return Rule("superset is tightened", why, lambda old, new, _: set_move({*old}, {*new}))


def _wider(old: tuple[float, float] | None, new: tuple[float, float] | None, _: Pair) -> Kind:
    if old is None or new is None:
        return "retargeted"
    if new[0] <= old[0] and new[1] >= old[1]:
        return "tightened"
    return "loosened" if old[0] <= new[0] and old[1] >= new[1] else "retargeted"


def wider(why: str) -> Rule:
    """A range: the one that contains the other is tighter."""
    return Rule("wider is tightened", why, _wider)


def other(why: str, *, says: str = "retargeted") -> Rule:
    """Any change makes it a different promise."""
    return Rule(says, why, lambda *_: "retargeted")


def _cosmetic(*_: Any) -> Kind:
    return "cosmetic"


def cosmetic(why: str) -> Rule:
    """No change affects a promise."""
    return Rule("cosmetic", why, _cosmetic)


NEVER = math.inf  # for a time after which an action follows


# Fields of a clause and of a slice whose direction depends on other parts of the contract.


def _limit(old: float, new: float, pair: Pair) -> Kind:
    key = pair.place[-2] if pair.place[-1] == "times" else pair.place[-1]
    return moved(old, new, up="tightened" if key == "at_least" else "loosened")


LIMIT = Rule(
    "`at_most` lower, `at_least` higher is tightened",
    "a kernel within the tighter limit is within the other",
    _limit,
    absent="no limit",
)


def _rank(clause: Clause, pair: Pair) -> float | None:
    """The share of the tokens that a limit covers; None for a mean, and for at_least."""
    if clause.at_most is None:
        return None
    unsaid = "max" if pair.place[0] == "numerical" else ""
    return 100.0 if (clause.aggregate or unsaid) == "max" else clause.percentile


def _aggregate(_old: str | None, _new: str | None, pair: Pair) -> Kind:
    before, after = (_rank(clause, pair) for clause in pair.owners)
    return "retargeted" if before is None or after is None else moved(before, after)


AGGREGATE = Rule(
    "a higher percentile is tightened; `mean` to or from one is retargeted",
    "fewer tokens may exceed the same limit; a mean is another quantity",
    _aggregate,
)


def _concurrency(old: int, new: int, pair: Pair) -> Kind:
    # the owners here are loads: the limit is in their clauses
    for contract in pair.contracts:
        clause = next(c for _, _, c in contract.clauses() if c.id == pair.place[-3])
        if clause.at_most is None:
            return "retargeted"
    return moved(old, new)


CONCURRENCY = Rule(
    "higher is tightened under `at_most`, else retargeted",
    "the same time with more requests in flight; speed over all of them is another quantity",
    _concurrency,
)


def slices(pair: Pair, old: Any, new: Any, why: str) -> Iterator[Change]:
    """Slices by name; a clause without slices applies to all on which its metric is defined."""
    if old == new:
        return
    before, after = (
        {*slices_of(contract, section, clause)}
        for contract, owner in zip(pair.contracts, pair.owners, strict=True)
        for section, _, clause in contract.clauses()
        if clause.id == owner.id
    )
    kind = set_move(before, after)
    names = ("every slice" if value is None else flow_text(value) for value in (old, new))
    yield pair.change(kind, " -> ".join(names), REWRITTEN if kind == "cosmetic" else why)


def claim(pair: Pair, old: Any, new: Any, why: str) -> Iterator[Change]:
    """A clause without a claim has the contract's, whose change is reported there."""
    if old == new:
        return
    before, after = (
        value or contract.claim for value, contract in zip((old, new), pair.contracts, strict=True)
    )
    names = " -> ".join(v or f"{w} (default)" for v, w in ((old, before), (new, after)))
    same = before == after
    yield pair.change("cosmetic" if same else "retargeted", names, REWRITTEN if same else why)


def workload(pair: Pair, old: Any, new: Any, why: str) -> Iterator[Change]:
    """A clause without a workload is judged on the first."""
    before, after = (
        contract.workload_of(clause)
        for contract, clause in zip(pair.contracts, pair.owners, strict=True)
    )
    names = f"{before or 'none'} -> {after or 'none'}"
    olds, news = (contract.all_workloads for contract in pair.contracts)
    if old is None and new is None and after not in olds and before not in news:
        return  # the workload itself was replaced, which is reported there
    if before != after:
        yield pair.change("retargeted", names, why)
    elif old != new:
        names = " -> ".join(v or f"{before} (default)" for v in (old, new))
        yield pair.change("cosmetic", names, REWRITTEN)


def _finer(old: Any, new: Any, pair: Pair) -> Kind:
    """A slice in more parts, by their number or by its edges."""
    # a gap on a union of outcomes may be the sum of its parts' gaps: there finer is not tighter
    if old is None or new is None or any(known(rule) == "outcome" for rule in pair.owners):
        return "retargeted"
    return moved(old, new) if isinstance(old, int) else set_move({*old}, {*new})


_WHY_FINER = "parts that each keep a limit keep it together; gaps on outcomes add up instead"
MOST = Rule("higher is tightened; of outcomes retargeted", _WHY_FINER, _finer)
EDGES = Rule("superset is tightened; of outcomes retargeted", _WHY_FINER, _finer)


def _sample(old: float | None, new: float | None, pair: Pair) -> Kind:
    unsaid = SAMPLED if pair.place[-2] in ("canary", "full") else 1.0
    return moved(old or unsaid, new or unsaid)


SHARE = Rule(
    "higher is tightened",
    "more of the traffic is mirrored",
    lambda old, new, _: moved(old or MIRRORED, new or MIRRORED),
    absent=f"{MIRRORED:g} (default)",
)
SAMPLE = Rule(
    "higher is tightened", "more of the served requests are scored", _sample, absent="default"
)
STEPS = Rule(
    "superset is tightened",
    "one more step is one more stop before all traffic",
    lambda old, new, _: set_move({*(old or (FIRST_STEP,))}, {*(new or (FIRST_STEP,))}),
    absent=f"[{FIRST_STEP:g}] (default)",
)


def _sequences(old: tuple[int, int], new: tuple[int, int], _: Pair) -> Kind:
    kinds: set[Kind] = {moved(a, b) for a, b in zip(old, new, strict=True) if a != b}
    return kinds.pop() if len(kinds) == 1 else "retargeted"


SEQUENCES = Rule(
    "both numbers higher is tightened; one each way is retargeted",
    "more evidence before the first evaluation, and more before the run stops",
    _sequences,
)


ACTIONS = Rule(
    "superset is tightened",
    "more actions follow from the same finding",
    lambda old, new, _: set_move({*map(as_text, old)}, {*map(as_text, new)}),
)
