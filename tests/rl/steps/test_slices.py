# Which slices a dump gets: those that it has, with tokens enough to decide.

from collections import Counter

import numpy as np
import pytest

from servanda.rl.monitor.batch import COLUMNS
from servanda.rl.steps.blocks import paired
from servanda.rl.steps.contract import STEP_FIELDS, Counts, rules_of
from tests.rl.dumps import made


def rules(needed=50, **how):
    counts = Counts()
    counts.add(paired(made.rollouts(np.random.default_rng(0), 1, 48, **how), 0))
    found, notes = rules_of(counts, needed)
    return [rule.name for rule in found], notes


def test_what_a_dump_lacks_is_left_out():
    assert rules(turn_tokens=8) == ([], ())


def test_turns_and_their_first_tokens_are_slices():
    names, _ = rules(turns=5, turn_tokens=8)
    assert names[:8] == [
        *("turn-1", "turn-2", "turn-3", "turn-4-on"),
        *("start-1", "start-2", "start-3", "start-4-on"),
    ]


def test_a_slice_of_too_few_tokens_is_joined_to_its_neighbour():
    counts = Counts(turns=Counter({1: 100, 2: 100, 3: 20, 4: 5}), starts=Counter({1: 60, 2: 60}))
    found, _ = rules_of(counts, 50)
    assert [r.name for r in found] == ["turn-1", "turn-2-on", "start-1", "start-2-on"]
    assert found[1].match == {"context.turn": {"gte": 2}}


def test_labels_with_tokens_enough_are_slices_and_the_rest_is_told():
    names, notes = rules(labels={"env": lambda s: "rare" if s == 0 else f"e/{s % 2}"})
    assert [n for n in names if n.startswith("env")] == ["env-e-1", "env-e-0"]  # most first
    assert notes == (
        "1 of 3 values of env ('rare') have fewer than 50 tokens each: they are judged with the "
        "whole alone",
    )


def test_values_of_too_few_tokens_each_are_one_slice_where_they_have_enough_together():
    found, notes = rules_of(
        Counts(labels={"env": Counter(big=500, other=300, a=30, b=25)}), needed=50
    )
    assert {r.name: r.match["labels.env"]["in"] for r in found} == {
        "env-big": ["big"],
        "env-other": ["other"],
        "env-other.2": ["a", "b"],
    }
    assert notes[0].endswith("fewer than 50 tokens each: they are judged together, as env-other")


def test_of_many_values_the_largest_have_slices_and_the_rest_one():
    values = Counter({f"e{i:02}": 100 - i for i in range(20)})
    found, notes = rules_of(Counts(labels={"env": values}), needed=50)
    assert len(found) == 9 and found[-1].match["labels.env"]["in"] == sorted(values)[8:]
    assert "12 of 20 values of env" in notes[0] and "not among the 8 largest" in notes[0]


def test_two_labels_that_look_alike_as_names_are_two_slices():
    names, _ = rules(labels={"env": lambda s: ["a/b", "a b"][s % 2]})
    assert [n for n in names if n.startswith("env")] == ["env-a-b", "env-a-b.2"]


def test_staleness_is_a_slice_where_any_token_is_stale():
    assert not [n for n in rules(staleness=lambda _: 0)[0] if n.startswith("stale")]
    names, _ = rules(staleness=lambda s: s % 4)
    assert [n for n in names if n.startswith("stale")] == ["stale-0", "stale-1", "stale-2-on"]


@pytest.mark.parametrize("later", [50, 90, 480])
@pytest.mark.parametrize("first", [0, 30, 480])
def test_starts_of_later_turns_are_a_slice_whatever_turn_1_has(first, later):
    """Those of turn 1 stand behind a prompt: joined with them, a torn boundary is diluted away."""
    counts = Counts(turns=Counter({1: 4000, 2: 4000}), starts=Counter({1: first, 2: later}))
    found, notes = rules_of(counts, 50)
    names = [r.name for r in found if r.name.startswith("start")]
    assert names == [*(["start-1"] if first >= 50 else []), "start-2-on"]
    assert not notes


def test_starts_that_are_too_few_are_said():
    counts = Counts(turns=Counter({1: 4000, 2: 40}), starts=Counter({1: 480, 2: 20, 3: 9}))
    found, notes = rules_of(counts, 50)
    assert not [r.name for r in found if r.name.startswith("start-2")]
    assert notes == (
        "no slice by turn: those after the first have 40 tokens",
        "the first tokens of later turns are 29, fewer than 50: no slice shows tool boundaries",
    )


def test_a_batch_has_the_fields_that_a_step_is_sliced_by():
    assert {*COLUMNS} == {*STEP_FIELDS}
