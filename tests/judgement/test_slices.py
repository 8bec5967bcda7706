# Slices: rules to cuts, cuts to masks, and the room a prompt group has in one.

import numpy as np
import pytest

from servanda.contract.clause import SliceRule
from servanda.contract.workload import Workload
from servanda.judgement.schedule import Schedule
from servanda.judgement.slices.rules import Cut, Term, column, cuts_of, known
from servanda.traces.corpus import Corpus

LINES = [
    '{"prompt": "a", "labels": {"d": "x"}, "group": "g"}',
    '{"prompt": "b", "labels": {"d": "y"}, "group": "g"}',
    '{"prompt": "c", "labels": {"d": "x"}}',
    '{"prompt": "e"}',
]
CORPUS = Corpus.parse("\n".join(LINES), "p.jsonl")


def rule(**fields):
    return SliceRule.model_validate({"name": "s", **fields})


def names(**fields):
    return [cut.name for cut in cuts_of([rule(**fields)], CORPUS)["s"]]


def test_a_split_of_a_label_has_a_cut_for_each_value_and_one_for_none():
    assert names(split="labels.d") == ["s=x", "s=y", "s=(none)"]
    assert names(split="labels.d", most=1) == ["s=x", "s=(other)", "s=(none)"]


def test_a_split_of_a_number_covers_the_line_once():
    cuts = cuts_of([rule(split="context.position", at=[2, 4.5])], CORPUS)["s"]
    assert [c.name for c in cuts] == ["s<2", "s=2..4.5", "s>=4.5"]
    columns = {"context.position": np.arange(8, dtype=float)}
    masks = np.array([c.mask(columns, 8) for c in cuts])
    assert (masks.sum(axis=0) == 1).all()
    assert masks.argmax(axis=0).tolist() == [0, 0, 1, 1, 1, 2, 2, 2]


def test_edges_that_are_near_keep_their_own_names():
    cuts = names(split="context.p_max", at=[0.9000001, 0.9000002, 0.9000003])
    assert len(set(cuts)) == 4


@pytest.mark.parametrize(
    ("op", "value", "expected"),
    [
        ("gte", 2, [False, True, True, False]),
        ("gt", 2, [False, False, True, False]),
        ("lte", 2, [True, True, False, False]),
        ("lt", 2, [True, False, False, False]),
    ],
)
def test_a_number_that_was_not_recorded_is_what_it_is_said_to_be(op, value, expected):
    column = np.array([1.0, 2.0, 3.0, np.nan])
    term = Term("context.entropy_nats", op, value)
    assert term.mask(column).tolist() == expected
    assert term.mask(column, unknown=True).tolist() == [*expected[:3], True]


def test_a_label_that_is_absent_exists_nowhere():
    column = np.array(["x", None, "y"], dtype=object)
    assert Term("labels.d", "exists", False).mask(column).tolist() == [False, True, False]
    assert Term("labels.d", "in", ("x",)).mask(column).tolist() == [True, False, False]
    assert Term("labels.d", "not_in", ("x",)).mask(column).tolist() == [False, False, True]


def test_capacity_is_the_most_that_one_group_can_have():
    def capacity(cut, samples, width):
        sampling = {"max_new_tokens": width}
        workload = Workload(prompts="p.jsonl", samples=samples, sampling=sampling)
        return Schedule("workload", workload, CORPUS, 0, 1, 1).capacity(cut)

    assert capacity(Cut("all"), samples=3, width=10) == 2 * 3 * 10
    x = Cut("x", (Term("labels.d", "in", ("x",)),))
    assert capacity(x, samples=3, width=10) == 1 * 3 * 10
    late = Cut("late", (Term("context.position", "gte", 8),))
    assert capacity(late, samples=1, width=10) == 2 * 2
    assert capacity(late, samples=1, width=8) == 0


def test_one_request_is_classified_by_the_same_cut():
    long = Cut("long", (Term("request.prompt_tokens", "gte", 5),))
    prompt = CORPUS.prompts[0]
    assert long.may_meet(prompt) and long.may_meet(prompt, 5) and not long.may_meet(prompt, 4)


def test_a_recorded_class_is_its_index_and_nothing_else_is_one():
    recorded = {"token_class": np.array([0.0, 5.0, np.nan, 7.0]), "logp": np.array([-1.0] * 4)}
    assert column("outcome.token_class", recorded, 4).tolist() == ["digit", "end", None, None]
    assert column("outcome.logp_nats", recorded, 4).tolist() == [-1.0] * 4
    assert np.isnan(column("outcome.rank", recorded, 4)).all()
    assert column("context.previous_class", recorded, 4).tolist() == [None] * 4


def test_a_class_that_was_not_recorded_may_be_any_and_an_absent_label_is_none():
    values = np.array(["digit", "space", None], dtype=object)
    of_class = Term("outcome.token_class", "in", ("digit",))
    of_label = Term("labels.a", "in", ("digit",))
    assert of_class.mask(values).tolist() == [True, False, False]
    assert of_class.mask(values, unknown=True).tolist() == [True, False, True]
    assert of_label.mask(values, unknown=True).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("fields", "when"),
    [
        ({"split": "labels.a"}, "request"),
        ({"match": {"request.prompt_tokens": {"gte": 1}, "labels.a": {"exists": True}}}, "request"),
        ({"match": {"labels.a": {"exists": True}, "context.position": {"gte": 1}}}, "context"),
        ({"match": {"outcome.rank": {"gte": 1}, "context.position": {"gte": 1}}}, "outcome"),
    ],
)
def test_a_slice_is_known_when_its_last_field_is(fields, when):
    assert known(rule(**fields)) == when
