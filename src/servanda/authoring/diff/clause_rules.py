# Fields of a clause and of a slice whose direction depends on other parts of the contract.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from servanda.authoring.diff.directions import REWRITTEN, Rule, as_text, moved, set_move
from servanda.authoring.diff.values import Change, Kind, Pair, flow_text
from servanda.contract.model import Clause
from servanda.contract.stages import FIRST_STEP, MIRRORED, SAMPLED
from servanda.judgement.clauses.scope import slices_of
from servanda.judgement.slices.rules import known


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
