# Several servers per pool: who is asked, who is asked next, and who is not asked any more.

import asyncio
import contextlib
import json
import threading
from collections import Counter
from dataclasses import replace

import pytest

from servanda.errors import ContractError, MeasurementError
from servanda.gateway.proxy.config import Limits, Replica, Upstream
from servanda.gateway.proxy.request_log import lost_row
from tests.clock import WAIT_S, eventually
from tests.gateway.serving import (
    NOBODY,
    Fake,
    Running,
    config,
    drop,
    everything,
    hang,
    reply,
    snapshot,
    stream,
)
from tests.gateway.test_faults import Client

CHECK_S = 0.05
ASK = {"model": "m", "prompt": "hello", "max_tokens": 4}
EVENT = b'data: {"choices": []}\n\n'


def answering(name="m", then=None, context=64):
    """A script: a server of this model, whose completions are answered by `then`."""
    models = reply({"data": [{"id": name, "max_model_len": context}]})

    async def script(request, writer):
        say = models if request.target == "/v1/models" else then or reply({"ok": True})
        await say(request, writer)

    return script


def described(url, name="m", **more):
    return Upstream(url, served=name, defaults={}, **more)


def replica(url, weight=1.0, met=True, found=None):
    """A server that says `found` of itself, at the start if it was met then."""
    found = found or described(url)

    def describe():
        if isinstance(found, Exception):
            raise found
        return found

    unmet = Upstream(url, probe=describe)
    return Replica(found if met else unmet, weight, describe)


async def slow(request, writer):
    """A script that answers no check."""
    await (hang if request.target == "/v1/models" else reply({"ok": True}))(request, writer)


@pytest.fixture
def fakes():
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Fake(answering())) for _ in range(4)]


def replicated(infer, stable=None, check_s=CHECK_S, wait_s=WAIT_S, **more):
    """A configuration with these replicas of infer, and of stable if it has any."""
    pools = {"infer": tuple(infer)} | ({"stable": tuple(stable)} if stable else {})
    first = replace(infer[0].upstream, probe=None)
    other = stable[0].upstream if stable else None
    made = config(first.url, other.url if other else None, **more)
    own = {"infer": described(first.url)} | ({"stable": described(other.url)} if other else {})
    return replace(made, **own, replicas=pools, limits=Limits(check_s=check_s, check_wait_s=wait_s))


def asked(fake):
    return sum(request.target == "/v1/completions" for request in fake.requests)


def post(running, session=None, **more):
    headers = {"x-session-id": session} if session else {}
    return running.client.post("/v1/completions", json={**ASK, **more}, headers=headers)


def states(running, pool="infer"):
    return {url: one["why"] for url, one in running.gateway.pools[pool].report().items()}


def test_requests_are_shared_by_weight(fakes):
    a, b = fakes[:2]
    with Running(replicated([replica(a.url, 3.0), replica(b.url)])) as running:
        assert {post(running).status_code for _ in range(40)} == {200}
        counts = running.gateway.counts
        assert counts.replicas == {f"infer\t{a.url}\t2xx": 30, f"infer\t{b.url}\t2xx": 10}
        assert counts.statuses == {"infer\t2xx": 40}
    assert (asked(a), asked(b)) == (30, 10)


def homes(fakes):
    """session -> addresses of the replicas that answered it, since the last call."""
    found = {}
    for fake in fakes:
        for request in fake.requests:
            if request.target == "/v1/completions":
                found.setdefault(request.json["prompt"], set()).add(fake.url)
        fake.requests.clear()
    return found


def test_a_session_stays_on_its_replica_and_moves_only_when_that_is_gone(fakes):
    three = fakes[:3]
    several = [replica(fake.url) for fake in three]
    sessions = [f"s{n}" for n in range(30)]
    with Running(replicated(several)) as running:
        for session in sessions * 3:
            post(running, session, prompt=session).raise_for_status()
        before = homes(three)
        assert {len(urls) for urls in before.values()} == {1}
        assert set.union(*before.values()) == {fake.url for fake in three}

        running.gateway.follow_replicas({"infer": tuple(several[1:])})
        eventually(lambda: len(running.gateway.pools["infer"].servers) == 2)
        for session in sessions:
            post(running, session, prompt=session).raise_for_status()
        after = homes(three)
        gone = {three[0].url}
        assert all(after[s] == before[s] for s in sessions if before[s] != gone)
        assert set.union(*after.values()) == {fake.url for fake in three[1:]}


def test_a_request_goes_to_the_next_replica_before_it_goes_to_the_other_pool(fakes):
    a, b, stable, _ = fakes
    a.script = answering(then=reply({}, status=503))
    with Running(replicated([replica(a.url), replica(b.url)], [replica(stable.url)])) as running:
        running.gateway.take(snapshot(whole=everything(sample=0.0)))
        assert {post(running).status_code for _ in range(6)} == {200}
        counts = running.idle().counts
        assert asked(stable) == 0 and counts.failovers == {}
        assert counts.answers == {"all\tinfer": 6}

        b.script = answering(then=reply({}, status=503))
        assert post(running).status_code == 200
        assert asked(stable) == 1 and running.idle().counts.failovers == {"5xx": 1}


def test_a_request_that_fails_everywhere_is_told_so_and_counts_against_no_replica(fakes):
    a, b = fakes[:2]
    a.script = b.script = answering(then=reply({"error": "you"}, status=500))
    with Running(replicated([replica(a.url), replica(b.url)])) as running:
        for _ in range(12):
            answer = post(running)
            assert (answer.status_code, answer.json()) == (500, {"error": "you"})
        assert {s.breaker.state for s in running.gateway.pools["infer"].servers} == {"closed"}


def test_a_replica_that_fails_others_requests_is_left_alone_by_its_own_breaker(fakes):
    a, b = fakes[:2]
    a.script = answering(then=reply({}, status=500))
    with Running(replicated([replica(a.url), replica(b.url)])) as running:
        for _ in range(12):
            assert post(running).status_code == 200
        assert [s.breaker.state for s in running.gateway.pools["infer"].servers] == [
            "open",
            "closed",
        ]
        assert states(running) == {a.url: "its circuit breaker is open after failures", b.url: ""}
        before = asked(a)
        assert {post(running).status_code for _ in range(6)} == {200} and asked(a) == before


def test_no_stream_that_has_begun_is_sent_to_another_replica(fakes):
    a, b = fakes[:2]
    a.script = answering(then=stream(EVENT, then=None, end=False))
    b.script = a.script
    with Running(replicated([replica(a.url), replica(b.url)])) as running:
        text = post(running, stream=True).text
        assert text.startswith(EVENT.decode()) and '"error"' in text
        assert asked(a) + asked(b) == 1


def test_a_replica_of_another_model_gets_no_request_and_the_reason_is_told(fakes):
    a, b = fakes[:2]
    other = replica(b.url, found=described(b.url, "other"))
    with Running(replicated([replica(a.url), other])) as running:
        assert {post(running).status_code for _ in range(8)} == {200}
        assert asked(b) == 0
        why = "another kernel: model 'other', not 'm'"
        assert states(running) == {a.url: "", b.url: why}
        notes = running.client.get("/readyz").json()["notes"]
        assert f"infer does not use {b.url}: {why}" in notes


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"context": 32}, "another kernel: context length 32, not unknown"),
        ({"dialect": "sglang"}, "another kernel: kind of server 'sglang', not 'vllm'"),
        ({"limit": 5}, "another kernel: default limit of new tokens 5, not unknown"),
        ({"masks": True}, "another kernel: grammars for tools True, not False"),
        ({"build": {"version": "0.33"}}, "another kernel: version '0.33', not unknown"),
        (
            {"mute": frozenset(["chats"])},
            "another kernel: requests without token ids ['chats'], not []",
        ),
    ],
)
def test_whatever_a_replica_says_differently_is_the_reason(fakes, more, why):
    a, b = fakes[:2]
    other = replica(b.url, found=described(b.url, **more))
    with Running(replicated([replica(a.url), other])) as running:
        assert states(running)[b.url] == why


def test_a_replica_that_restarts_with_another_model_is_found_out(fakes):
    a, b = fakes[:2]
    told = {"now": described(b.url)}
    second = replace(replica(b.url), describe=lambda: told["now"])
    with Running(replicated([replica(a.url), second])) as running:
        eventually(lambda: all(s.models for s in running.gateway.pools["infer"].servers))
        assert states(running) == {a.url: "", b.url: ""}

        told["now"] = described(b.url, "other")
        b.script = answering("other")
        eventually(lambda: "model 'other'" in states(running)[b.url])
        before = asked(b)
        assert {post(running).status_code for _ in range(6)} == {200} and asked(b) == before

        told["now"] = described(b.url)
        b.script = answering()
        eventually(lambda: not states(running)[b.url])
        post(running), post(running)
        assert asked(b) == before + 1


def test_a_replica_that_does_not_respond_is_left_out_and_comes_back(fakes):
    a, b = fakes[:2]
    with Running(replicated([replica(a.url), replica(b.url)])) as running:
        b.script = drop
        eventually(lambda: states(running)[b.url] == "it breaks off its replies")
        assert {post(running).status_code for _ in range(6)} == {200} and asked(b) == 0

        b.script = answering()
        eventually(lambda: not states(running)[b.url])
        assert {post(running).status_code for _ in range(2)} == {200} and asked(b) == 1


def test_replicas_that_are_only_slow_serve_if_there_is_no_other(fakes):
    """Or an overload of all would become an outage; another kernel does not serve even then."""
    a, b, c, _ = fakes
    several = [replica(a.url), replica(b.url), replica(c.url, found=described(c.url, "other"))]
    with Running(replicated(several, wait_s=CHECK_S)) as running:
        a.script = b.script = slow
        eventually(lambda: not any(s.met for s in running.gateway.pools["infer"].servers))
        assert states(running)[a.url] == "it does not respond in time"
        assert {post(running).status_code for _ in range(4)} == {200}
        assert (asked(a), asked(b), asked(c)) == (2, 2, 0)


def test_a_replica_that_refuses_connections_costs_no_request(fakes):
    a, b = fakes[:2]
    with Running(replicated([replica(a.url), replica(NOBODY.url)], check_s=60.0)) as running:
        running.gateway.pools["infer"].servers[1].met = True
        assert {post(running).status_code for _ in range(6)} == {200} and asked(a) == 6
        assert states(running) == {a.url: "", NOBODY.url: "it refuses connections"}
        assert running.gateway.counts.replicas[f"infer\t{NOBODY.url}\tconnect"] == 1
    assert asked(b) == 0


def test_a_pool_without_a_replica_that_runs_its_kernel_is_down(fakes):
    a, stable = fakes[:2]
    other = replica(a.url, found=described(a.url, "other"))
    with Running(replicated([other], [replica(stable.url)], check_s=60.0)) as running:
        running.gateway.take(snapshot(whole=everything(sample=0.0)))
        assert {post(running).status_code for _ in range(3)} == {200}
        assert asked(stable) == 3 and running.idle().counts.failovers == {"breaker": 3}
        assert running.gateway.report()["pools"] == {"infer": "open", "stable": "closed"}

        found = running.client.get("/readyz").json()
        assert found["ready"] and "no replica of infer can be used" in found["notes"]


def test_as_long_as_no_replica_has_said_what_it_is_all_of_them_serve_and_none_is_evidence(fakes):
    a, b = fakes[:2]
    busy = MeasurementError("busy")
    several = [replica(fake.url, met=False, found=busy) for fake in (a, b)]
    unknown = replicated(several, controller=NOBODY)
    unknown = replace(unknown, infer=several[0].upstream)
    with Running(unknown) as running:
        running.gateway.take(snapshot(whole=everything(sample=1.0)))
        assert {post(running).status_code for _ in range(4)} == {200}
        assert (asked(a), asked(b)) == (2, 2)
        counts = running.idle().counts
        assert counts.unsampled == {"infer has not said what it is": 4} and not counts.sampled


def test_a_removed_replica_completes_its_requests_and_gets_no_more(fakes):
    a, b = fakes[:2]
    several = [replica(a.url), replica(b.url)]
    released = asyncio.Event()
    a.script = answering(then=stream(EVENT, released.wait, EVENT))
    with Running(replicated(several)) as running:
        client = Client(running, stream=True)
        client.read_until(EVENT)
        assert (asked(a), asked(b)) == (1, 0)

        pool = running.gateway.pools["infer"]
        running.gateway.follow_replicas({"infer": (several[1],)})
        eventually(lambda: pool.retired)
        assert {post(running).status_code for _ in range(4)} == {200}
        assert (asked(a), asked(b)) == (1, 4)

        a._loop.loop.call_soon_threadsafe(released.set)
        client.read_until(b"0\r\n\r\n")
        eventually(lambda: not pool.retired)
        assert states(running) == {b.url: ""}


def test_an_added_replica_serves_once_it_has_said_what_it_is(fakes):
    a, b = fakes[:2]
    told = threading.Event()

    def describe():
        if not told.is_set():
            raise MeasurementError("it loads its model")
        return described(b.url)

    first = replica(a.url)
    added = Replica(Upstream(b.url, probe=describe), 1.0, describe)
    with Running(replicated([first])) as running:
        running.gateway.follow_replicas({"infer": (first, added)})
        eventually(lambda: states(running).get(b.url) == "it loads its model")
        assert {post(running).status_code for _ in range(4)} == {200} and asked(b) == 0

        told.set()
        eventually(lambda: not states(running)[b.url])
        assert {post(running).status_code for _ in range(4)} == {200} and asked(b) == 2


def test_a_pool_with_one_url_gets_replicas_and_keeps_serving(fakes):
    a, b = fakes[:2]
    with Running(config(a, defaults={})) as running:
        assert running.gateway.pools["infer"].report() == {}
        found = [Upstream(fake.url, defaults={}) for fake in (a, b)]
        several = [replica(each.url, met=False, found=each) for each in found]
        running.gateway.follow_replicas({"infer": tuple(several)})
        eventually(lambda: states(running) == {a.url: "", b.url: ""})
        assert {post(running).status_code for _ in range(4)} == {200}
        assert asked(a) == asked(b) == 2


def test_a_path_that_is_passed_through_goes_to_the_next_replica_too(fakes):
    a = fakes[0]
    with Running(replicated([replica(NOBODY.url), replica(a.url)], check_s=60.0)) as running:
        running.gateway.pools["infer"].servers[0].met = True
        for _ in range(4):
            answer = running.client.post("/v1/embeddings", json={"input": "x"})
            assert (answer.status_code, answer.json()) == (200, {"ok": True})
        assert running.client.get("/v1/models").json()["data"][0]["id"] == "m"


def test_every_row_of_the_log_has_the_replica_that_replied(fakes):
    a, b = fakes[:2]
    a.script = answering(then=reply({}, status=503))
    with Running(replicated([replica(a.url), replica(b.url)], controller=NOBODY)) as running:
        running.gateway.take(snapshot(whole=everything(sample=1.0)))
        for _ in range(4):
            assert post(running, temperature=1.0).status_code == 200
        rows = running.idle().launches.waiting()
        assert Counter(json.loads(row)["x-replica"] for row in rows) == {b.url: 4}
        assert json.loads(lost_row(rows[0], "dropped"))["x-replica"] == b.url


def test_mirrored_requests_are_shared_by_the_replicas_too(fakes):
    a, b, stable, _ = fakes
    with Running(replicated([replica(a.url), replica(b.url)], [replica(stable.url)])) as running:
        running.gateway.take(snapshot(whole=everything(share=0.0, mirror=1.0, acts=True)))
        for _ in range(6):
            assert post(running).status_code == 200
            running.idle()
        assert (asked(a), asked(b), asked(stable)) == (3, 3, 6)


def test_a_replica_of_one_pool_is_no_replica_of_the_other():
    with pytest.raises(ContractError, match=r"infer and stable are both http://127\.0\.0\.1:9"):
        replicated([replica(NOBODY.url)], [replica(NOBODY.url)])
