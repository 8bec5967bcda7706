# The cause of a gap: named where a signature fits, with evidence and a command that exists.

import shlex
from dataclasses import replace

import numpy as np
import pytest

from servanda.judgement.causes.catalogue import CAUSES, UNEXPLAINED
from servanda.judgement.causes.gap_cause import ORDER, Case, explain, explained
from servanda.judgement.causes.slice_search import FoundSlice
from tests import transcripts
from tests.judgement.causes.gaps import table

LIMIT = 0.025
REPLICA = {"replica": lambda s: f"r{s % 4}"}


def _third(row, *_):
    return row % 4 == 3


# how a gap is drawn, its cause, and the beginning of the evidence
KNOWN = {
    "noise alike everywhere": ({"noise": 0.3}, "numerics", "all sequences, positions and steps"),
    "noise from nothing": (
        {"noise": lambda step: 0.01 + 0.06 * (step - 1)},
        "stale_weights",
        "drift that grows, x",
    ),
    "noise that grows from the first step on": (
        {"noise": lambda step: 0.15 + 0.04 * step},
        "precision_drift",
        "drift that grows, x",
    ),
    "one replica": ({"labels": REPLICA, "wrong": _third}, "one_engine", "100 % of the excess"),
    "one environment": (
        {"labels": {"env": lambda s: f"e{s % 4}"}, "wrong": _third},
        "one_kind",
        "100 % of the excess",
    ),
    "a place in the batch": ({"wrong": _third}, "batch", "100 % of the excess"),
    "the first tokens": (
        {"wrong": lambda _, __, position, *___: position < 2},
        "template",
        "the first tokens of all responses",
    ),
    "no token before a length": (
        {"noise": 0.01, "wrong": lambda _, length, at, *__: length + at >= 300},
        "attention_window",
        "from about 300 tokens on",
    ),
    "few tokens anywhere": (
        {"noise": 0.02, "wrong": lambda *of: of[-1].random(of[3].shape) < 0.02},
        "routing",
        "",
    ),
    "noise that ends": ({"noise": lambda step: 0.3 - 0.04 * step}, UNEXPLAINED, ""),
    "some steps alone": ({"noise": lambda step: 0.1 + 0.2 * (step % 2)}, UNEXPLAINED, ""),
}


@pytest.mark.parametrize("name", [*KNOWN])
def test_a_cause_is_named_with_what_was_measured(name):
    how, cause, evidence = KNOWN[name]

    found = explain(table(3, **how), LIMIT, place="my dump")

    assert (found.cause, found.named) == (cause, cause != UNEXPLAINED)
    assert found.evidence.startswith(evidence)
    assert any(map(str.isdigit, found.evidence))
    assert found.text.endswith(found.evidence) and "{" not in found.text + found.command


def test_a_label_is_named_in_the_cause():
    found = explain(table(3, labels=REPLICA, wrong=_third), LIMIT)
    assert found.text.startswith("replica r3: its weights, its build, its hardware; 100 %")


def test_failed_checks_come_before_everything_else():
    found = explain(table(3, wrong=_third), LIMIT, {"line_up": "shifted by +1"})
    assert (found.cause, found.evidence) == ("shift", "shifted by +1")
    for check in ("replay", "routes"):
        found = explain(table(3, wrong=_third), LIMIT, {check: "row t is that of token t-1"})
        assert (found.cause, found.evidence) == ("replay", "row t is that of token t-1")


def test_sides_that_agree_have_no_cause():
    drawn = table(3, noise=0.0)
    assert explain(drawn, LIMIT).cause in (UNEXPLAINED, "numerics")
    assert np.isfinite(list(filter(None, vars(explain(drawn).case.signatures).values()))).all()


@pytest.mark.parametrize("name", [*CAUSES])
def test_every_cause_has_a_rival_and_a_command_that_exists(name):
    cause = CAUSES[name]
    assert cause.rival in CAUSES and cause.rival != name
    command = cause.command.replace("{dir}", "DIR").replace("{step}", "3")
    transcripts.parsed(shlex.split(command))
    assert name in (*ORDER, UNEXPLAINED)


def _case(slices=(), problems=None, **numbers):
    """A case of noise alone, with some of its signatures changed."""
    signatures = replace(explain(table(3), LIMIT).case.signatures, **numbers)
    return explained(Case(signatures, slices, None, LIMIT, problems or {}))


def _slice(match, tokens, inside, outside=0.01):
    return FoundSlice(match, inside, outside, 1.0, tokens, 40, 20.0, 2 * outside)


def test_a_slice_with_little_of_the_gap_is_no_place():
    """It has all that is uneven; nearly all of the gap is even."""
    ids = {"outcome.token_id": {"in": [30]}}
    few = _case((_slice(ids, 0.004, 0.8),), gap=0.2)
    most = _case((_slice(ids, 0.2, 0.8),), gap=0.2)
    assert (few.cause, most.cause) == ("numerics", "vocabulary")


def test_a_cut_that_leaves_one_token_is_told_from_logprobs_that_were_written_as_0():
    zeros = {"zeros": "13 trained tokens have a logprob of exactly 0"}
    cut = {"cut": 0.14, "cut_share": 0.99}
    assert _case(problems=zeros, zeros=0.05, **cut).cause == "top_p"
    assert _case(problems=zeros, zeros=0.95, **cut).cause == "missing_data"
    assert _case(problems={**zeros, "coverage": "30 % missing"}, **cut).cause == "missing_data"


def test_the_tails_that_a_cut_leaves_out_are_no_part_of_the_vocabulary():
    ids = {"outcome.token_id": {"gte": 32}}
    cut = {"cut": 0.14, "cut_share": 0.99, "gap": 0.1}
    assert _case((_slice(ids, 0.67, 0.12),), **cut).cause == "top_p"
    assert _case((_slice(ids, 0.3, 0.12),), **cut).cause == "vocabulary"


def test_a_window_begins_at_a_length_and_what_grows_does_not():
    long = {"context.length": {"gte": 58}}
    grown = {"length": 4.0, "length_z": 9.0, "gap": 0.04}
    assert _case((_slice(long, 0.4, 0.06, 0.015),), **grown).cause == "attention_window"
    assert _case((_slice(long, 0.4, 0.06, 0.03),), **grown).cause == "positions"


def test_the_first_tokens_of_short_prompts_are_a_beginning_and_not_padding():
    short = {"request.prompt_tokens": {"lt": 28}}
    both = {**short, "context.position": {"lt": 14}}
    assert _case((_slice(short, 0.2, 0.1),), gap=0.03).cause == "padding"
    assert _case((_slice(both, 0.2, 0.1),), gap=0.03, concentration=0.5).cause == "template"
