# The comparison of two contracts, field by field, with the meaning of each difference.

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from servanda.authoring.diff.directions import Custom, Items, Part, Rule, With, as_text
from servanda.authoring.diff.rules import RULES
from servanda.authoring.diff.values import MIRROR, Change, Pair, clause_text, flow_text
from servanda.contract.model import Clause, Contract, Place
from servanda.contract.policy import Escalation
from servanda.judgement.clause_kinds import DEFAULT_GUARDS
from servanda.judgement.clauses.scope import slices_of

_NAMES = {"id", "name"}  # identifying keys of items
_ONLY_RENAMED = "did it only change its name? evidence is kept by it"
_ANOTHER_KIND = "a number, or what follows from something else: neither keeps the other"
_THERE_ANYWAY = "a validity check that applies even if it is not written"
_ANOTHER_SECTION = "judged on other texts, by another procedure"


@dataclass(frozen=True)
class _Item:
    """An item of a list: its value, its index, and its place in changes."""

    value: BaseModel
    at: Place
    place: Place
    enforced: bool = True

    @property
    def content(self) -> str:
        """The item without its name; a clause of another section is a different one."""
        section = self.place[0] if isinstance(self.value, Clause) else ""
        return as_text([section, self.value.model_dump(exclude=_NAMES)])


def changes(old: Contract, new: Contract) -> tuple[Change, ...]:
    """The changes of a contract against an older one, in the order of the language.

    Files are not opened: contracts are compared as written.

    Returns:
        Empty for equal contracts; in reverse, tightened becomes loosened and added removed.

    >>> from servanda.contract.model import API_VERSION
    >>> kernel = {"engine": "table", "model": "q.json"}
    >>> def contract(limit):
    ...     tv = {"id": "tv", "metric": "tv", "aggregate": "mean", "at_most": limit}
    ...     return Contract.model_validate({
    ...         "apiVersion": API_VERSION, "kind": "KernelContract", "metadata": {"name": "x"},
    ...         "kernels": {"train": kernel, "infer": kernel}, "statistical": [tv],
    ...     })
    >>> [(c.kind, c.name, c.what) for c in changes(contract(0.02), contract(0.05))]
    [('loosened', 'statistical.tv.at_most', '0.02 -> 0.05')]
    """
    return tuple(_fields(Pair((old, new)), old, new))


def _fields(pair: Pair, old: BaseModel, new: BaseModel) -> Iterator[Change]:
    for name, rule in RULES[type(old)].items():
        key = type(old).model_fields[name].alias or name
        inner = pair.key(key, (old, new))
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(rule, Rule):
            yield from rule(inner, before, after)
        elif isinstance(rule, Custom):
            yield from rule.compare(inner, before, after, rule.why)
        elif isinstance(rule, Part):
            yield from _part(inner, rule, before, after)
        elif isinstance(rule, Items):
            yield from _items(inner, rule, *map(_FINDERS[name], inner.contracts))
        else:
            assert isinstance(rule, With)  # compared together with another field


def _part(pair: Pair, rule: Part, old: Any, new: Any) -> Iterator[Change]:
    if isinstance(old, BaseModel) and type(old) is type(new):
        yield from _fields(pair, old, new)
    elif old is None or new is None:
        if old is new:
            return
        kind = rule.none if old is None else MIRROR[rule.none]
        if rule.scalar is None:
            yield pair.change(kind, flow_text(new if old is None else old), rule.why)
        else:
            names = (rule.scalar.absent if v is None else flow_text(v) for v in (old, new))
            yield pair.change(kind, " -> ".join(names), rule.scalar.why)
    elif type(old) is type(new) and rule.scalar is not None:
        yield from rule.scalar(pair, old, new)
    else:
        yield pair.change("retargeted", f"{flow_text(old)} -> {flow_text(new)}", _ANOTHER_KIND)


def _items(
    pair: Pair, rule: Items, old: Mapping[str, _Item], new: Mapping[str, _Item]
) -> Iterator[Change]:
    """Changes of common items, of items in one only, and of their order."""
    removed = {name: item for name, item in old.items() if name not in new}
    for name, item in new.items():
        if name in old:
            yield from _same(pair, old[name], item)
        else:
            before = next((n for n, was in removed.items() if was.content == item.content), None)
            if before is None:
                yield _alone(_spot(pair, None, item), rule, item, pair.contracts[0])
            else:
                there = _spot(pair, removed.pop(before), item)
                what = f"{before} -> {name} ({_ONLY_RENAMED})"
                yield there.change("retargeted", what, "all else is equal")
    for item in removed.values():
        yield _alone(_spot(pair, item, None), rule, item, pair.contracts[1])
    yield from _order(pair, rule, old, new)


def _spot(pair: Pair, old: _Item | None, new: _Item | None) -> Pair:
    """The pair of an item in both, or in only one."""
    item = new or old
    assert item is not None
    at = (old.at if old else None, new.at if new else None)
    enforced = ((old or item).enforced, (new or item).enforced)
    return replace(pair, place=item.place, at=at, enforced=enforced)


def _alone(there: Pair, rule: Items, item: _Item, other: Contract) -> Change:
    """An item that the other contract does not have."""
    if isinstance(item.value, Clause) and _unwritten(item.value, other):
        return there.change("cosmetic", _described(item), _THERE_ANYWAY)
    kind = "added" if there.at[0] is None else "removed"
    return there.change(kind, _described(item), rule.why)


def _unwritten(clause: Clause, contract: Contract) -> bool:
    """Whether a contract has a validity check that it does not write."""
    trained = any(w.source == "trainer" for w in contract.all_workloads.values())
    metrics = {c.metric for _, _, c in contract.clauses()}
    if not contract.statistical or trained or metrics & {clause.metric, "served_fidelity"}:
        return False
    written = clause.model_dump(exclude=_NAMES)
    return any(written == guard.model_dump(exclude=_NAMES) for guard in DEFAULT_GUARDS)


def _same(pair: Pair, old: _Item, new: _Item) -> Iterator[Change]:
    there = _spot(pair, old, new)
    if isinstance(new.value, Clause) and old.place != new.place:
        names = (str(item.place[0]) for item in (old, new))
        yield there.change("retargeted", " -> ".join(names), _ANOTHER_SECTION)
    yield from _fields(there, old.value, new.value)


def _order(pair: Pair, rule: Items, old: Collection[str], new: Collection[str]) -> Iterator[Change]:
    """A different order of common items, which matters only for the first."""
    before, after = (next(iter(names), "") for names in (old, new))
    # if neither is in both, one was replaced by the other, which is reported there
    if rule.first and before != after and (before in new or after in old):
        at: Place = ("workloads",)
        there = replace(pair, place=at, at=(at, at))
        yield there.change("retargeted", f"{before} first -> {after} first", rule.first)
        return
    both = [n for n in old if n in new], [n for n in new if n in old]
    if both[0] != both[1]:
        names = " -> ".join(map(flow_text, both))
        yield pair.change("cosmetic", names, "the order says nothing")


def _described(item: _Item) -> str:
    value = item.value
    if isinstance(value, Clause):
        return clause_text(value)
    if isinstance(value, Escalation):
        return f"do: {flow_text(value.do)}"  # when is its name
    return flow_text(value.model_dump(exclude=_NAMES, exclude_defaults=True, by_alias=True))


def _workloads(contract: Contract) -> dict[str, _Item]:
    listed = isinstance(contract.workloads, tuple)
    items = {}
    for i, (name, value) in enumerate(contract.all_workloads.items()):
        single = contract.workload is not None and name == "workload"
        index = i - (contract.workload is not None)
        at: Place = ("workload",) if single else ("workloads", index if listed else name)
        items[name] = _Item(value, at, at if single else ("workloads", name))
    return items


def _slices(contract: Contract) -> dict[str, _Item]:
    """Declared slices; one without an enforced clause cannot fail the contract."""
    spoken = {
        name
        for section, _, clause in contract.clauses()
        if clause.enforced
        for name in slices_of(contract, section, clause)
    }
    return {
        rule.name: _Item(rule, ("slices", i), ("slices", rule.name), rule.name in spoken)
        for i, rule in enumerate(contract.slices)
    }


def _clauses(contract: Contract) -> dict[str, _Item]:
    return {
        clause.id: _Item(clause, at, (*at[:-1], clause.id), clause.enforced)
        for _, at, clause in contract.clauses()
    }


def _rules(contract: Contract) -> dict[str, _Item]:
    """Escalation rules by condition; a second one with the same condition is a different rule."""
    items: dict[str, _Item] = {}
    for i, rule in enumerate(contract.escalation):
        name = flow_text(rule.when, longest=0)
        while name in items:
            name = f"{name} (again)"
        items[name] = _Item(rule, ("escalation", i), ("escalation", name))
    return items


# a field of many parts -> how they are found in a contract
_FINDERS: Mapping[str, Callable[[Contract], dict[str, _Item]]] = {
    "workload": _workloads,
    "labels": lambda c: {n: _Item(v, ("labels", n), ("labels", n)) for n, v in c.labels.items()},
    "slices": _slices,
    "numerical": _clauses,
    "escalation": _rules,
}
