# What "tightened" claims, held against its meaning: tokens that keep the tighter clause keep the
# other one too.  The oracle judges a clause by its definition, on tokens that are all there are.

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from servanda.authoring.diff.difference import changes
from servanda.contract.model import Clause, Contract
from tests.authoring.diff.made import fresh

LABELS = ("a", "b", "c")


class Token(NamedTuple):
    label: str
    position: int
    value: float


tokens = st.lists(
    st.builds(
        Token, st.sampled_from(LABELS), st.integers(0, 30), st.sampled_from([0, 0.1, 0.2, 0.5, 1])
    ),
    min_size=1,
    max_size=40,
)
edges = st.sets(st.sampled_from([4, 8, 16, 24]), min_size=1)
limits = st.sampled_from([0.1, 0.15, 0.2, 0.3, 0.5])


@st.composite
def clauses(draw: st.DrawFn) -> dict[str, Any]:
    key = draw(st.sampled_from(["at_most", "at_most", "at_least"]))
    aggregates = ["mean", "max", "p50", "p90", "p99", "p99.9"] if key == "at_most" else ["mean"]
    slices = draw(st.none() | st.sets(st.sampled_from(["all", "domain", "depth"]), min_size=1))
    return {
        "id": "one",
        "metric": "tv",
        "aggregate": draw(st.sampled_from(aggregates)),
        key: draw(limits),
        "slices": None if slices is None else sorted(slices),
    }


def contract(clause: dict[str, Any], at: set[int]) -> Contract:
    slices = [
        {"name": "domain", "split": "labels.domain"},
        {"name": "depth", "split": "context.position", "at": sorted(at)},
    ]
    return Contract.model_validate({**fresh(), "statistical": [clause], "slices": slices})


def cells(one: Contract, clause: Clause, found: list[Token]) -> list[list[Token]]:
    """The tokens of each cell, where it has any: the whole, each label, each bucket."""
    bounds = itertools.pairwise([-math.inf, *(one.slices[1].at or ()), math.inf])
    parts = {
        "all": [found],
        "domain": [[t for t in found if t.label == label] for label in LABELS],
        "depth": [[t for t in found if low <= t.position < high] for low, high in bounds],
    }
    named = clause.slices or tuple(parts)
    return [part for name in named for part in parts[name] if part]


def keeps(one: Contract, found: list[Token]) -> bool:
    """Whether the tokens keep the promise, by the definition of its aggregate."""
    clause = one.statistical[0]
    for cell in cells(one, clause, found):
        values = [token.value for token in cell]
        if clause.at_least is not None:
            kept = math.fsum(values) / len(values) >= clause.at_least
        elif clause.aggregate == "mean":
            kept = math.fsum(values) / len(values) <= clause.at_most
        elif clause.aggregate == "max":
            kept = max(values) <= clause.at_most
        else:
            beyond = sum(value > clause.at_most for value in values)
            kept = 100 * beyond <= (100 - clause.percentile) * len(values)
        if not kept:
            return False
    return True


@pytest.mark.slow
@given(clauses(), clauses(), edges, edges, tokens)
def test_what_keeps_the_tightened_clause_keeps_the_old_one(before, after, at, at_after, found):
    old, new = contract(before, at), contract(after, at_after)
    kinds = {change.kind for change in changes(old, new)}
    assume(kinds <= {"tightened", "cosmetic"} or kinds <= {"loosened", "cosmetic"})
    tighter, looser = (old, new) if "loosened" in kinds else (new, old)
    event(f"{kinds or 'equal'}")

    assert keeps(looser, found) or not keeps(tighter, found)


@pytest.mark.slow
@given(limits, limits, edges, edges, st.data())
def test_finer_buckets_are_tighter(limit, limit_after, at, more, data):
    """Of nothing but tightened moves: limits down, buckets split, tokens as they are."""
    clause = {"id": "one", "metric": "tv", "aggregate": "mean"}
    high, low = max(limit, limit_after), min(limit, limit_after)
    old = contract({**clause, "at_most": high}, at)
    new = contract({**clause, "at_most": low}, at | more)
    assert {c.kind for c in changes(old, new)} <= {"tightened"}
    found = data.draw(tokens)

    assert keeps(old, found) or not keeps(new, found)


def test_on_outcomes_finer_is_not_tighter():
    """Two parts that each gain .01 of the mass gain .02 together: the old clause is broken."""
    gaps = {"low": 0.01, "high": 0.01}
    limit = 0.015
    assert all(gap <= limit for gap in gaps.values())
    assert sum(gaps.values()) > limit

    data = fresh()
    old = Contract.model_validate(data)
    data["slices"][3]["at"] = [2, 10, 50]

    (change,) = changes(old, Contract.model_validate(data))
    assert change.kind == "retargeted"
