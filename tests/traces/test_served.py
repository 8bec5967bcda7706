# The log of served requests, read strictly: every line that is none is named with its place.

import json
import math
import re
from pathlib import Path

import pytest

from servanda.errors import EvidenceError
from servanda.traces.request_log import read_served

ROW = {
    "index": 0,
    "run": "r1",
    "leg": "canary-1",
    "at": 1_763_000_000.25,
    "served": 100,
    "prompt_token_ids": [5, 7],
    "token_ids": [3, 1],
    "logprobs": [-0.5, -1.25],
    "labels": {"domain": "math", "long": True, "tenant": None},
    "group": "g1",
    "key": "9f2c",
    "sampling": {"temperature": 1.0, "max_new_tokens": 8},
    "finish": "stop",
    "fingerprint": "fp_1",
}
BEST = [[[3, -0.5], [4, -2.0]], [[4, -0.75], [1, -1.25]]]


def but(**changes):
    """A row with changes; None takes a key away."""
    return {k: v for k, v in {**ROW, **changes}.items() if v is not None}


def text(*rows):
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def refusal(given):
    with pytest.raises(EvidenceError) as caught:
        read_served(given, "served.jsonl")
    return caught.value.problems


def test_a_row_is_a_request_with_all_that_it_says():
    (request,) = read_served(text(but(best=BEST)), "served.jsonl")

    assert (request.index, request.run, request.leg) == (0, "r1", "canary-1")
    assert (request.at, request.served, request.group, request.key) == (
        1_763_000_000.25,
        100,
        "g1",
        "9f2c",
    )
    assert (request.prompt, request.tokens, request.logp) == ((5, 7), (3, 1), (-0.5, -1.25))
    assert request.best == (((3, -0.5), (4, -2.0)), ((4, -0.75), (1, -1.25)))
    assert request.labels == {"domain": "math", "long": "True"}
    assert (request.finish, request.fingerprint, request.lost) == ("stop", "fp_1", "")
    assert str(request.where) == "served.jsonl:1:1"


def test_a_lost_request_has_a_reason_and_no_tokens():
    row = but(token_ids=None, logprobs=None, finish=None, fingerprint=None, lost="timeout")

    (request,) = read_served(text(row), "served.jsonl")

    assert (request.lost, request.tokens, request.logp) == ("timeout", (), ())


def test_a_line_that_is_being_written_is_left_for_the_next_look():
    whole = text(ROW, but(index=1, served=101))

    for cut in range(len(text(ROW)), len(whole) - 1):
        assert len(read_served(whole[:cut], "f")) in (1, 2)
    assert len(read_served(whole[:-1], "f")) == 2  # an object that has its end is whole
    assert len(read_served(whole[:-2], "f")) == 1


def test_a_half_line_with_another_one_after_it_is_an_error():
    (problem,) = refusal(text(ROW)[:-9] + "\n" + text(but(index=1, served=101)))

    assert problem.message.startswith("not JSON: ")
    assert str(problem.where) == "served.jsonl:1:1"
    assert "docs/how-to/traffic.md" in problem.hint


def test_best_tokens_are_sorted_and_what_nobody_knows_is_dropped():
    best = [[[4, -2.0], [3, -0.5]], [[4, None], [1, -1.25]]]

    (request,) = read_served(text(but(best=best)), "f")

    assert request.best == (((3, -0.5), (4, -2.0)), ((1, -1.25),))


@pytest.mark.parametrize("unknown", [None, -9999.0, -10000])
def test_a_logprob_that_the_server_does_not_know_is_not_a_number(unknown):
    (request,) = read_served(text(but(logprobs=[-0.5, unknown])), "f")

    assert math.isnan(request.logp[1])


def test_every_problem_is_told_at_once_with_its_line():
    problems = refusal(text(but(index=-1), ROW, but(token_ids=[True])))

    assert [str(p.where) for p in problems] == ["served.jsonl:1:1", "served.jsonl:3:1"]


def test_of_many_problems_twenty_are_printed_and_the_rest_is_counted():
    problems = refusal(text(*[but(index=-1)] * 25))

    assert len(problems) == 21
    assert problems[-1].message == "served.jsonl: 5 more lines like these"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index": None}, "'index' is missing"),
        ({"index": True}, "'index' is true, not a whole number"),
        ({"index": 1.0}, "'index' is 1.0, not a whole number"),
        ({"run": ""}, "'run' is empty"),
        ({"leg": 3}, "'leg' is 3, not a text"),
        ({"at": "now"}, "'at' is \"now\", not a number"),
        ({"at": -1}, "'at' is -1, not seconds since 1970"),
        ({"at": 10**400}, "'at' is 1000"),
        (
            {"served": 0},
            "'served' is 0 at index 0: the infer kernel received this request and the 0 before it",
        ),
        ({"prompt_token_ids": []}, "'prompt_token_ids' is empty"),
        ({"prompt_token_ids": "5 7"}, "'prompt_token_ids' is \"5 7\", not a list"),
        ({"prompt_token_ids": [5, -7]}, "prompt_token_ids[1] is -7, not a token id"),
        ({"token_ids": [3, 1.0]}, "token_ids[1] is 1.0, not a token id"),
        ({"token_ids": [3, 2**40]}, "token_ids[1] is 1099511627776, not a token id"),
        ({"token_ids": None}, "'token_ids' is missing"),
        ({"logprobs": [-0.5]}, "2 'token_ids' have 1 'logprobs'"),
        ({"logprobs": [-0.5, 0.1]}, "logprobs[1] is 0.1: a logprob is never above 0"),
        ({"logprobs": [-0.5, False]}, "logprobs[1] is false, not a number"),
        ({"best": [[[3, -0.5]]]}, "2 'token_ids' have 1 lists of 'best'"),
        ({"best": [[[3, -0.5]], [[1]]]}, "best[1][0] is [1], not [token id, logprob]"),
        ({"best": [[[3, -0.5], [3, -1]], [[1, -1]]]}, "best[0] lists the token id 3 twice"),
        (
            {"best": [[[3, -0.5]], [[4, -0.5], [1, -1.25]]]},
            "best[1] lists 2 tokens, and best[0] 1",
        ),
        (
            {"best": [[[3, -0.5]], [[1, -1.0]]]},
            "best[1] says -1 for the sampled token 1, and logprobs[1] -1.25",
        ),
        ({"labels": ["math"]}, "'labels' is [\"math\"], not an object of texts"),
        ({"labels": {"a": ["b"]}}, 'labels.a is ["b"], not a text'),
        ({"group": 1.5}, "'group' is 1.5, not a text"),
        ({"sampling": {}}, "'sampling' has no max_new_tokens"),
        (
            {"sampling": {"max_new_tokens": 0}},
            "sampling.max_new_tokens is 0: the request asks for no token",
        ),
        (
            {"sampling": {"max_new_tokens": 8, "temperature": "1"}},
            'sampling.temperature is "1", not a number',
        ),
        (
            {"sampling": {"max_new_tokens": 8, "seed": 0.5}},
            "sampling.seed is 0.5, not a whole number",
        ),
        (
            {"sampling": {"max_new_tokens": 1}},
            "2 tokens answer a request for at most 1",
        ),
        (
            {"finish": "abort"},
            "'finish' is 'abort', and a response ends by 'stop', 'length' or 'stop_string'",
        ),
        ({"lost": "timeout"}, "'lost' and 'token_ids' cannot both be there"),
        ({"tokens": [1]}, "a line has no key 'tokens'"),
    ],
)
def test_a_row_that_is_none_is_refused_by_name(changes, message):
    (problem,) = refusal(text(but(**changes)))

    assert problem.message.startswith(message)
    assert problem.hint


def test_an_unknown_key_has_its_nearest_one_beside_it():
    (problem,) = refusal(text(but(fingerprnt="x")))

    assert problem.hint == "did you mean 'fingerprint'?"


def test_keys_of_ones_own_begin_with_x():
    assert len(read_served(text(but(**{"x-trace": "abc"})), "f")) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"index": NaN}', "NaN is not a JSON number"),
        ('{"index": -Infinity}', "-Infinity is not a JSON number"),
        ('{"index": 0, "index": 1}', "the key 'index' is there twice"),
        ("[]", "a line is a JSON object"),
        ("[" * 100_000, "not a request: nested too deeply"),
        ('{"leg": "\\ud800"}', "a lone surrogate is not text"),
    ],
)
def test_json_that_means_two_things_is_refused(line, message):
    (problem,) = refusal(f"{line}\n")

    assert problem.message == message


def test_the_row_in_the_documents_is_one():
    page = Path(__file__).parents[2] / "docs" / "how-to" / "traffic.md"
    block = re.search(r"```json\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)

    (request,) = read_served(" ".join(block[1].split("\n")), "traffic.md")

    assert (request.leg, request.finish, len(request.best)) == ("canary-1", "stop", 3)
