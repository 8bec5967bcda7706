# What changed between two contracts: every field has a direction, and backwards it is the other.

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import pytest
from hypothesis import given
from pydantic import BaseModel

from servanda.authoring.diff.difference import RULES, changes
from servanda.authoring.diff.directions import REWRITTEN, Items, With
from servanda.authoring.diff.values import BREAKING, MIRROR, Change
from servanda.contract.model import Contract
from servanda.contract.workload import NamedWorkload
from tests.authoring.diff.made import ABSENT, MOVES, NO_MOVE, Move, contract, contracts
from tests.contract.test_whole_language import WHOLE
from tests.kit import parse


def models(annotation: Any) -> set[type[BaseModel]]:
    """Every model that a contract is made of."""
    found: set[type[BaseModel]] = set()
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        found = {annotation}.union(
            *(models(f.annotation) for f in annotation.model_fields.values())
        )
    return found.union(*map(models, get_args(annotation)))


def seen(found: tuple[Change, ...]) -> Counter[tuple[str, str]]:
    return Counter((change.kind, change.name) for change in found)


@pytest.mark.parametrize("model", sorted(models(Contract), key=lambda m: m.__name__))
def test_every_field_of_the_language_has_a_direction(model):
    """A field that is added to the language, and not here, fails this."""
    assert {*RULES[model]} == {*model.model_fields}


def test_no_direction_is_for_something_that_is_not_in_the_language():
    assert {*RULES} == models(Contract)


def test_every_field_is_moved_by_these_tests():
    moved = {(move.model, move.field) for move in MOVES} | NO_MOVE
    fields = {
        (model.__name__, name)
        for model in models(Contract) - {NamedWorkload}
        for name in model.model_fields
    }
    assert moved == fields


def test_what_is_compared_elsewhere_is_compared():
    for rules in RULES.values():
        for rule in rules.values():
            if isinstance(rule, With):
                assert isinstance(RULES[Contract][rule.field], Items)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("move", MOVES, ids=lambda m: f"{m.path}: {m.old} -> {m.new}")
def test_a_move_is_what_it_is(move: Move):
    old, new = contract((move.path, move.old)), contract((move.path, move.new))

    (forth,), (back,) = changes(old, new), changes(new, old)

    assert (forth.kind, back.kind) == (move.kind, MIRROR[move.kind])
    assert forth.place == back.place
    assert forth.name.startswith(move.place)
    assert forth.what.split(" -> ") == back.what.split(" -> ")[::-1] or forth.kind == "added"


@pytest.mark.parametrize("move", MOVES, ids=lambda m: f"{m.path}: {m.old} -> {m.new}")
def test_what_is_cosmetic_leaves_the_evidence_and_what_is_not_says_why(move: Move):
    """But for what means the same in other words: the digest is of the words."""
    old, new = contract((move.path, move.old)), contract((move.path, move.new))
    (change,) = changes(old, new)

    if change.kind == "cosmetic":
        assert old.digest == new.digest or change.why == REWRITTEN
    else:
        assert change.why


@given(contracts())
def test_a_contract_has_not_changed_from_itself(one):
    assert changes(one, one) == ()


@pytest.mark.slow
@given(contracts(), contracts())
def test_backwards_what_was_tightened_is_loosened_and_what_was_added_is_removed(old, new):
    forth, back = changes(old, new), changes(new, old)

    assert seen(back) == Counter((MIRROR[c.kind], c.name) for c in forth)


@given(contracts(), contracts())
def test_nothing_changed_only_where_the_two_are_equal(old, new):
    """Workloads as a list, or as a mapping, are the same."""

    def said(one: Contract) -> Any:
        return one.model_dump(exclude={"workloads"}), [*one.all_workloads.items()]

    assert (changes(old, new) == ()) == (said(old) == said(new))
    if old.digest != new.digest:
        assert changes(old, new)


@pytest.mark.slow
@given(contracts(), contracts())
def test_each_change_is_of_a_place_of_its_own(old, new):
    assert max([0, *seen(changes(old, new)).values()]) <= 1


def test_a_change_knows_both_places_in_the_texts():
    loose = WHOLE.replace("at_most: 0.02, workload: code", "at_most: 0.05, workload: code")
    old = parse(WHOLE, "old.yaml", engines=["table"])[0]
    new = parse(f"# a comment\n{loose}", "new.yaml", engines=["table"])[0]

    (change,) = changes(old, new)

    assert (change.kind, change.name, change.what) == (
        "loosened",
        "statistical.tv.at_most",
        "0.02 -> 0.05",
    )
    assert change.where_old is not None
    assert change.where_new is not None
    assert str(change.where_old) == f"old.yaml:{change.where_new.line - 1}:52"
    assert change.where_new.text[51:55] == "0.05"


def test_what_was_added_stands_in_one_text_only():
    old = parse(WHOLE.replace("  shadow: {share: 0.05}\n", ""), "a", engines=["table"])[0]
    new = parse(WHOLE, "b", engines=["table"])[0]

    (added,), (removed,) = changes(old, new), changes(new, old)

    assert (added.kind, added.name, added.where_old) == ("added", "promotion.shadow", None)
    assert (removed.kind, removed.where_new) == ("removed", None)


# clauses, and what can fail nothing


@pytest.mark.parametrize(("mode", "breaks"), [("enforce", True), ("monitor", False)])
def test_a_clause_that_comes_or_goes(mode, breaks):
    more = {"id": "new", "metric": "tv", "aggregate": "p99", "at_most": 0.2, "mode": mode}
    base = contract()
    data = base.model_dump(mode="json", by_alias=True)
    data["statistical"].append(more)
    new = Contract.model_validate(data)

    (come,), (gone,) = changes(base, new), changes(new, base)

    monitored = "" if breaks else ", monitored"
    assert (come.kind, come.name) == ("added", "statistical.new")
    assert come.what == gone.what == f"p99 tv at most 0.2{monitored}"
    assert (come.breaks("producer"), come.breaks("consumer")) == (breaks, False)
    assert (gone.breaks("producer"), gone.breaks("consumer")) == (False, breaks)


def test_a_clause_that_only_changed_its_name():
    (change,) = changes(contract(), contract(("statistical/0/id", "mean-tv")))

    assert (change.kind, change.name) == ("retargeted", "statistical.mean-tv")
    assert change.what == ("tv -> mean-tv (did it only change its name? evidence is kept by it)")


def test_a_clause_that_changed_its_name_and_its_limit_is_another():
    new = contract(("statistical/0/id", "mean-tv"), ("statistical/0/at_most", 0.01))

    assert seen(changes(contract(), new)) == Counter(
        [("added", "statistical.mean-tv"), ("removed", "statistical.tv")]
    )


def test_a_clause_that_moved_to_another_section_is_retargeted():
    base = contract()
    data = base.model_dump(mode="json", by_alias=True)
    data["numerical"].append(data["statistical"].pop(0))
    new = Contract.model_validate(data)

    (change,) = changes(base, new)

    assert (change.kind, change.name) == ("retargeted", "numerical.tv")
    assert change.what == "statistical -> numerical"


@pytest.mark.parametrize("limit", [0.2, 0.05])
def test_the_limit_of_what_is_monitored_breaks_nobody(limit):
    (change,) = changes(contract(), contract(("statistical/4/at_most", limit)))

    assert change.kind in ("tightened", "loosened")
    assert not change.enforced
    assert not change.breaks("consumer")
    assert not change.breaks("producer")


def test_a_promise_that_was_not_enforced_takes_nothing_from_its_consumer():
    """It is loosened and enforced at once: who has to keep it has more to keep."""
    new = contract(("statistical/4/at_most", 0.2), ("statistical/4/mode", "enforce"))

    found = changes(contract(), new)

    assert Counter(c.kind for c in found) == Counter(["loosened", "tightened"])
    assert not any(c.breaks("consumer") for c in found)
    assert [c.kind for c in found if c.breaks("producer")] == ["tightened"]


def test_a_slice_that_no_enforced_clause_speaks_of_breaks_nobody():
    paths = ("numerical/0", *(f"statistical/{i}" for i in range(5)))
    named = [(f"{path}/slices", ["all"]) for path in paths]
    data = contract(*named).model_dump(mode="json", by_alias=True)
    data["slices"] = data["slices"][1:]

    (change,) = changes(contract(*named), Contract.model_validate(data))

    assert (change.kind, change.name) == ("removed", "slices.domain")
    assert not change.breaks("consumer")


@pytest.mark.parametrize("move", MOVES, ids=lambda m: f"{m.path}: {m.old} -> {m.new}")
def test_a_move_breaks_one_side_or_both_or_none(move: Move):
    (change,) = changes(contract((move.path, move.old)), contract((move.path, move.new)))

    breaks = {side for side in BREAKING if change.breaks(side)}

    if change.enforced:
        wanted = {"retargeted": {"consumer", "producer"}, "cosmetic": set()}
        more = {"tightened", "added"}
        one = {"producer"} if change.kind in more else {"consumer"}
        assert breaks == wanted.get(change.kind, one)


@pytest.mark.parametrize("at_least", [0.999, 0.99])
def test_a_guard_that_is_there_anyway_need_not_be_written(at_least):
    """The plan adds it to a contract that has none, and with its own limit."""
    old = contract(("observability/clauses/0/at_least", at_least))
    data = old.model_dump(mode="json", by_alias=True)
    data["observability"]["clauses"].pop(0)
    new = Contract.model_validate(data)

    (gone,), (come,) = changes(old, new), changes(new, old)

    kinds = ("cosmetic", "cosmetic") if at_least == 0.999 else ("removed", "added")
    assert (gone.kind, come.kind) == kinds
    assert gone.breaks("consumer") is (at_least != 0.999)


def test_a_guard_beside_another_of_its_kind_is_written_for_a_reason():
    more = {"id": "finer", "metric": "valid_ratio", "at_least": 0.999}
    data = contract(("observability/clauses/0/at_least", 0.9)).model_dump(mode="json")
    loose = Contract.model_validate(data)
    data["observability"]["clauses"].append(more)

    (change,) = changes(loose, Contract.model_validate(data))

    assert change.kind == "added"


# workloads


def test_the_first_workload_is_that_of_clauses_which_name_none():
    base = contract()
    data = base.model_dump(mode="json", by_alias=True)
    data["workloads"] = dict(reversed(data["workloads"].items()))
    found = changes(base, Contract.model_validate(data))

    assert [c.what for c in found if c.name == "statistical.tv.workload"] == ["chat -> code"]
    assert ("retargeted", "workloads") in seen(found)
    assert contract().digest != Contract.model_validate(data).digest


def test_a_single_workload_and_one_of_that_content_are_one_that_changed_its_name():
    single = contract(("workloads", ABSENT), ("workload", {"prompts": "c"}))
    several = contract(("workloads", {"code": {"prompts": "c"}}))

    assert seen(changes(single, several)) == Counter([("retargeted", "workloads.code")])


def test_numbers_that_are_written_in_another_way_are_the_same():
    """In free data the digest tells them apart, so evidence expires, and it is said why."""
    path = "slices/2/match/outcome.rank/gte"
    old, new = contract((path, 10)), contract((path, 10.0))

    (change,) = changes(old, new)

    assert (change.kind, change.why) == ("cosmetic", REWRITTEN)
    assert old.digest != new.digest
    assert not changes(contract(), contract(("routing/enter_evidence", 1000)))
