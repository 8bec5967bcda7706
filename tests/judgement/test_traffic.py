# The traffic of a leg: what is evidence was decided when each request was launched.

import json
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.contract.identity import Description
from servanda.contract.model import Kernel
from servanda.engines.traffic_replay import TrafficReplayEngine
from servanda.errors import EvidenceError
from servanda.judgement import traffic as reasons
from servanda.judgement.traffic import traffic_of
from servanda.runner.run import load
from servanda.theory.sampling import Sampling
from servanda.traces.request_log import read_served
from servanda.traces.trace import Batch
from tests import kit


def row(index, **changes):
    answer = {"token_ids": [1], "logprobs": [-0.5], "finish": "stop"}
    data = {
        "index": index,
        "run": "r1",
        "leg": "shadow",
        "at": 10.0 + index,
        "served": index + 1,
        "prompt_token_ids": [0],
        "sampling": {"max_new_tokens": 6},
        **({} if "lost" in changes else answer),
        **changes,
    }
    return {key: value for key, value in data.items() if value is not None}


def parsed(rows):
    return read_served("".join(f"{json.dumps(r)}\n" for r in rows), "served.jsonl")


@pytest.fixture(scope="module")
def contract(tmp_path_factory):
    path, _ = kit.write(tmp_path_factory.mktemp("c"), samples=2)
    return load(path)


def read(contract, rows, **more):
    return traffic_of(parsed(rows), contract, run="r1", leg="shadow", **more)


def refusal(contract, rows, **more):
    with pytest.raises(EvidenceError) as caught:
        read(contract, rows, **more)
    return str(caught.value)


def test_rows_of_other_runs_and_legs_are_passed_over(contract):
    rows = [row(0), row(0, leg="canary-1"), row(7, run="r0", served=9), row(1)]

    found = read(contract, rows)

    assert [r.index for r in found.requests] == [0, 1]
    assert not found.outside


def test_a_gap_is_refused(contract):
    said = refusal(contract, [row(0), row(2)])

    assert "served.jsonl:2:1: request 1 of shadow is not in the log" in said
    assert "request may not vanish" in said


def test_a_log_that_begins_late_is_refused(contract):
    assert "request 0 to 4 of shadow is not in the log" in refusal(contract, [row(5)])


def test_a_repeat_is_refused(contract):
    assert "request 0 of shadow comes after request 0" in refusal(contract, [row(0), row(0)])


def test_another_order_is_refused(contract):
    assert refusal(contract, [row(0), row(2), row(1)])


def test_a_count_of_what_was_served_only_grows(contract):
    said = refusal(contract, [row(0, served=5), row(1, served=5)])

    assert "'served' is 5 at request 1 of shadow, and was 5 before it" in said


def test_an_answer_of_another_kernel_is_refused_by_both_names(contract):
    said = refusal(contract, [row(0, fingerprint="fp_b")], fingerprint="fp_a")

    assert "served.jsonl:1:1: request 0 of shadow was answered by 'fp_b', and infer is 'fp_a'" in (
        said
    )


def test_a_server_that_changes_within_a_leg_is_refused(contract):
    said = refusal(contract, [row(0, fingerprint="fp_a"), row(1, fingerprint="fp_b")])

    assert "was answered by 'fp_b', and the requests before it were answered by 'fp_a'" in said


def test_a_lost_request_is_of_no_kernel(contract):
    found = read(contract, [row(0, fingerprint="a"), row(1, lost="timeout")], fingerprint="a")

    assert [r.lost for r in found.requests] == ["", "timeout"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sampling": {"max_new_tokens": 6, "temperature": 0.7}}, reasons.SAMPLING),
        ({"sampling": {"max_new_tokens": 6, "temperature": 0}}, reasons.SAMPLING),
        ({"sampling": {"max_new_tokens": 6, "top_p": 0.9}}, reasons.SAMPLING),
        ({"sampling": {"max_new_tokens": 6, "top_k": 5}}, reasons.SAMPLING),
        ({"sampling": {"max_new_tokens": 6, "logit_bias": {"1": 5}}}, reasons.SAMPLING),
        ({"prompt_token_ids": [0] * 5}, reasons.CONTEXT),
    ],
)
def test_what_the_workload_does_not_speak_of_is_counted_outside(contract, changes, why):
    found = read(contract, [row(0), row(1, **changes), row(2)], context=10)

    assert [r.index for r in found.requests] == [0, 2]
    assert found.outside == {why: 1}
    assert len(found.launched) == 3


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_new_tokens": 3},
        {"max_new_tokens": 6, "temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": 0},
        {"max_new_tokens": 6, "top_k": 0, "stop": None, "seed": 3},
    ],
)
def test_what_asks_for_the_same_in_other_words_is_inside(contract, sampling):
    assert len(read(contract, [row(0, sampling=sampling)]).requests) == 1


def test_a_seed_that_comes_again_brings_no_fresh_noise(contract):
    rows = [row(i, sampling={"max_new_tokens": 6, "seed": seed}) for i, seed in enumerate("121")]
    for each in rows:
        each["sampling"]["seed"] = int(each["sampling"]["seed"])

    found = read(contract, rows)

    assert [r.index for r in found.requests] == [0, 1]
    assert found.outside == {reasons.SEED: 1}


def test_a_lost_request_may_be_outside_too(contract):
    warm = {"max_new_tokens": 6, "temperature": 0.5}

    found = read(contract, [row(0, lost="timeout", sampling=warm)])

    assert found.outside == {reasons.SAMPLING: 1}


END = 2


def answered(stream, most):
    """What a server answers that is allowed so many tokens, where it draws these."""
    end = stream.index(END) + 1 if END in stream else len(stream)
    tokens = stream[: min(end, most)]
    return {
        "token_ids": tokens,
        "logprobs": [-1.0 - i for i in range(len(tokens))],
        "best": [[[token, -1.0 - i]] for i, token in enumerate(tokens)],
        "finish": "stop" if tokens[-1] == END else "length",
        "sampling": {"max_new_tokens": most},
    }


def test_a_longer_answer_is_evidence_as_if_no_more_had_been_asked_for(contract):
    """So its tokens have the law of the workload's: they are the same of every draw."""
    streams = [[*drawn, END] for drawn in product((1, END), repeat=8)]

    short, long = (
        read(contract, [row(i, **answered(drawn, most)) for i, drawn in enumerate(streams)])
        for most in (6, 9)
    )

    assert len(long.requests) == len(streams)
    for one, other in zip(short.requests, long.requests, strict=True):
        assert (other.tokens, other.logp, other.best) == (one.tokens, one.logp, one.best)


@pytest.mark.parametrize(
    ("answer", "most", "lost"),
    [
        ({"finish": "length"}, 6, reasons.EARLY),
        ({"finish": "length"}, 900, reasons.EARLY),
        ({"finish": "length", "token_ids": [1] * 5, "logprobs": [-0.5] * 5}, 5, ""),
        ({"finish": "length", "token_ids": [1] * 6, "logprobs": [-0.5] * 6}, 900, ""),
        ({"finish": "stop"}, 6, ""),
    ],
)
def test_an_answer_cut_short_by_nobody_knows_what_is_lost(contract, answer, most, lost):
    """Infer's context has room for what counts of it, or it were outside."""
    (found,) = read(contract, [row(0, **answer, sampling={"max_new_tokens": most})]).requests

    assert found.lost == lost
    assert bool(found.tokens) is not bool(lost)


def test_an_end_beyond_what_is_looked_at_is_no_token_that_a_log_left_out(contract):
    """An answer of exactly as many tokens as count, ended by one that the writer did not log."""
    end = {"token_ids": [1] * 6, "logprobs": [-0.5] * 6, "finish": "stop"}
    asked = {"sampling": {"max_new_tokens": 20}}
    requests = read(contract, [row(0, **end, **asked), row(1, **asked)]).requests
    infer = Description({"engine": "x"}, {"w": "d"}, "t", 8, (END,))
    drew = TrafficReplayEngine(Kernel(engine="x"), infer, requests)

    found = drew.generate(Batch((0, 1), ((0,), (0,)), 6), Sampling(), 0)

    assert found.continuations == ((1,) * 6, (1, END))


def test_a_prompt_outside_of_the_envelope_is_no_evidence(tmp_path):
    path, _ = kit.write(tmp_path, golden="runtime: {envelope: {prompt_tokens: [1, 3]}}")

    found = read(load(path), [row(0), row(1, prompt_token_ids=[0] * 4)])

    assert found.outside == {reasons.ENVELOPE: 1}


def test_rows_in_a_row_of_one_group_are_one_prompt_group(contract):
    names = ["a", "a", None, "b", "a", "a", "a"]

    found = read(contract, [row(i, group=name) for i, name in enumerate(names)])

    assert [[r.index for r in group] for group in found.groups] == [[0, 1], [2], [3], [4, 5]]
    assert found.outside == {reasons.SAMPLES: 1}


def test_a_group_that_may_still_grow_waits(contract):
    rows = [row(0), row(1, group="a")]

    assert [r.index for r in read(contract, rows).requests] == [0]
    assert len(read(contract, [*rows, row(2, group="a")]).groups) == 2
    assert len(read(contract, [*rows, row(2, group="b")]).groups) == 2


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, "a", "b"]), st.sampled_from([6, 7]), st.sampled_from([1, 2, 9])
        ),
        max_size=12,
    )
)
def test_no_later_request_changes_what_an_earlier_one_is(contract, choices):
    """So a round that closed stays as it was, however long the log grows."""
    rows = [
        row(i, group=group, sampling={"max_new_tokens": most, "seed": seed})
        for i, (group, most, seed) in enumerate(choices)
    ]
    looks = [read(contract, rows[:n]).groups for n in range(len(rows) + 1)]

    for before, after in pairwise(looks):
        assert after[: len(before)] == before
