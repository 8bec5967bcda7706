# Mirrored requests: infer is asked as well, and no user knows.

import pytest

from servanda.gateway.proxy.config import Limits
from tests.gateway.serving import (
    NOBODY,
    WAIT_S,
    Fake,
    Running,
    config,
    everything,
    hang,
    reply,
    rows,
    snapshot,
    stream,
)
from tests.gateway.test_follow import ASK, PATH, answered

AWAY = {"share": 0.0, "acts": True, "mirror": 1.0, "sample": 1.0, "status": "quarantined"}
EVENTS = (b'data: {"choices":[]}\n\n', b"data: [DONE]\n\n")


@pytest.fixture
def pools():
    with Fake(answered()) as infer, Fake(reply({"by": "stable"})) as stable:
        yield infer, stable


@pytest.fixture
def running(pools):
    with Running(config(*pools, controller=NOBODY)) as running:
        running.gateway.take(snapshot(whole=everything(**AWAY)))
        yield running


def test_infer_is_asked_as_well_and_stable_answers(pools, running):
    infer, stable = pools
    body = {**ASK, "user": "u", "metadata": {"a": "b"}, "store": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    stable.script = stream(*EVENTS)
    given = {"authorization": "Bearer mine", "x-session-id": "s", "cookie": "c=1"}

    told = running.client.post(PATH, json=body, headers=given)

    assert told.content == b"".join(EVENTS)
    (row,) = rows(running)
    assert row["x-mirrored"] and row["token_ids"] == [3]
    assert infer.last.json == {
        **ASK,
        "logprobs": 8,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    assert infer.last.headers["x-servanda-mirror"] == "1"
    assert {"authorization", "x-session-id", "cookie"}.isdisjoint(infer.last.headers)
    counts = running.gateway.counts
    assert counts.mirrored == 1 and counts.statuses == {"stable\t2xx": 1}
    assert counts.peak["infer"] == 0  # it is no user's


def test_tools_are_not_called_twice(pools, running):
    infer, _ = pools
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    body |= {"tools": [{"type": "function"}], "tool_choice": "auto"}

    running.client.post("/v1/chat/completions", json=body)

    assert rows(running) == []  # with tools it would have been another answer
    assert {"tools", "tool_choice", "logprobs"}.isdisjoint(infer.last.json)


@pytest.mark.parametrize("script", [hang, reply({}, status=500), reply(b"{")])
def test_whatever_becomes_of_a_mirrored_request_no_user_notices(pools, running, script):
    infer, _ = pools
    infer.script = script

    assert running.client.post(PATH, json=ASK).json() == {"by": "stable"}

    if script is not hang:
        (row,) = rows(running)
        assert row["lost"] in ("status 500", "malformed")


def test_beyond_its_budget_no_request_is_mirrored_and_none_is_missing_for_it(pools):
    infer, stable = pools
    infer.script = hang
    limits = Limits(mirror_in_flight=1)
    with Running(config(infer, stable, limits=limits, controller=NOBODY)) as running:
        running.gateway.take(snapshot(whole=everything(**AWAY)))
        for _ in range(3):
            assert running.client.post(PATH, json=ASK).json() == {"by": "stable"}
        assert infer.arrived.acquire(timeout=WAIT_S)

        counts = running.gateway.counts
        assert (counts.mirrored, counts.mirror_dropped, counts.dropped) == (1, 2, 0)
        assert (counts.sampled, counts.launched) == (1, {"all": 1})
        assert len(infer.requests) == 1


def test_so_many_are_mirrored_a_second(pools):
    limits = Limits(mirror_per_s=1e-9)
    with Running(config(*pools, limits=limits)) as running:
        running.gateway.take(snapshot(whole=everything(**AWAY)))
        for _ in range(3):
            running.client.post(PATH, json=ASK)

        assert running.idle().counts.mirrored == 1
        assert running.gateway.counts.mirror_dropped == 2


def test_who_gives_fewer_likeliest_tokens_is_asked_for_so_many(pools, running):
    infer, _ = pools
    infer.scripts.append(reply({"error": "too many logprobs, max allowed: 3"}, status=400))

    running.client.post(PATH, json=ASK)
    running.idle()
    running.client.post(PATH, json=ASK)

    assert [row["token_ids"] for row in rows(running)] == [[3], [3]]
    assert [request.json["logprobs"] for request in infer.requests] == [8, 3, 3]


def test_what_a_mirrored_request_makes_infer_say_changes_nothing(pools, running):
    infer, _ = pools
    infer.script = reply({"error": "role 'max allowed: 0' is unknown"}, status=400)

    running.client.post(PATH, json=ASK)

    assert [row["lost"] for row in rows(running)] == ["status 400"]
    assert running.gateway.pools["infer"].servers[0].best == 8
