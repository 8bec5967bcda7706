# The result of a mutation: its score, its exit code and its text, counted by an oracle.

import itertools
import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.authoring.mutation.report import render
from servanda.authoring.mutation.result import Conformance, FaultResult, MutantResult, Mutation

MARKS = ("killed", "survived", "equivalent", "refused", "open")
FATES = ("caught", "missed", "undecided", "not applicable", "open")
KINDS = ("limit", "clause")
HOLDS = Conformance("train against itself", "holds", cells=3, groups=64)
FAILS = Conformance("train against itself", "violated")
OPEN = Conformance("train against itself", "inconclusive", open=True)

limits = st.lists(st.tuples(st.sampled_from(MARKS), st.sampled_from(KINDS)), max_size=6)
fates = st.lists(st.sampled_from(FATES), max_size=6)


def mutation(marks=(), found=(), itself=HOLDS, stopped=""):
    """A result in which mutants and faults have these marks."""
    return Mutation(
        "toy",
        "d" * 32,
        ("limits", "faults"),
        limits=tuple(MutantResult(f"m{i}", k, f"m{i} moves", m) for i, (m, k) in enumerate(marks)),
        itself=itself,
        faults=tuple(FaultResult(f"f{i}", 1, fate) for i, fate in enumerate(found)),
        stopped=stopped,
    )


def asked(marks, found):
    """Whether each mutant and fault that counts was noticed, one by one."""
    killed = [mark == "killed" for mark, _ in marks if mark in ("killed", "survived")]
    drilled = ("caught", "missed", "undecided")
    return [*killed, *(fate == "caught" for fate in found if fate in drilled)]


@given(limits, fates)
def test_the_score_is_the_share_of_what_counts_that_is_noticed(marks, found):
    counted = asked(marks, found)

    result = mutation(marks, found)

    assert result.counts() == (sum(counted), len(counted))
    exact = Fraction(sum(counted), len(counted)) if counted else None
    assert result.score == (None if exact is None else float(exact))


@given(limits, fates)
def test_toothless_is_what_was_asked_wholly_and_noticed_nothing(marks, found):
    moved = [m for m, kind in marks if kind == "limit" and m not in ("equivalent", "refused")]
    drilled = [fate for fate in found if fate != "not applicable"]
    expected = []
    if moved and {*moved} == {"survived"}:
        expected.append("limits")
    if drilled and {*drilled} <= {"missed", "undecided"}:
        expected.append("faults")

    assert mutation(marks, found).toothless == tuple(expected)


@given(limits, fates, st.sampled_from([None, 0.5, 1.0]))
def test_the_exit_code_is_that_of_every_way_in_which_open_ones_may_end(marks, found, at_least):
    """0 where all of them pass, 1 where none does, else 3; toothless and unsatisfiable apart."""
    result = mutation(marks, found)
    code = result.exit_code(at_least)
    if result.wholly_toothless:
        assert code == 1
        return
    counted, left = asked(marks, found), result.open
    ends = set()
    for more in itertools.product([True, False], repeat=left):
        every = [*counted, *more]
        enough = bool(every) and Fraction(sum(every), len(every)) >= Fraction(at_least or 0)
        ends.add(enough)
    if not any(counted):
        assert code == (1 if ends == {False} and [*counted, *range(left)] and at_least else 3)
    else:
        assert code == {(True,): 0, (False,): 1}.get(tuple(ends), 3)


@pytest.mark.parametrize(
    ("itself", "stopped", "code"),
    [
        (HOLDS, "", 0),
        (None, "", 0),  # only limits were asked
        (FAILS, "", 1),  # whatever the score
        (OPEN, "time", 3),
        (HOLDS, "interrupted", 130),
        (FAILS, "interrupted", 130),
    ],
)
def test_a_kernel_that_has_to_pass_decides_before_the_score(itself, stopped, code):
    assert mutation([("killed", "limit")], ["caught"], itself, stopped).exit_code() == code


def test_the_text_counts_both_parts_and_marks_rounding():
    result = mutation([("killed", "limit")] * 299 + [("survived", "limit")], ["caught"])
    assert render(result).endswith(
        "mutation score 300 of 301 (99.7 %): limits 299 of 300, faults 1 of 1"
    )

    result = mutation([("killed", "limit")] * 12 + [("survived", "limit")] * 2, ["missed"] * 6)
    assert render(result).endswith(
        "mutation score 12 of 20 (60.0 %): limits 12 of 14, faults 0 of 6"
    )


def test_json_has_the_summary_and_every_part():
    result = mutation([("killed", "limit"), ("survived", "clause")], ["caught", "open"])

    data = json.loads(json.dumps(result.to_dict(0.5)))

    assert data["score"] == pytest.approx(2 / 3)
    assert (data["noticed"], data["counted"], data["exit_code"]) == (2, 3, 0)
    assert [limit["mark"] for limit in data["limits"]] == ["killed", "survived"]
    assert [fault["fate"] for fault in data["faults"]] == ["caught", "open"]
    assert data["itself"]["outcome"] == "holds"
    assert (data["unsatisfiable"], data["toothless"], data["own"]) == (False, [], None)
