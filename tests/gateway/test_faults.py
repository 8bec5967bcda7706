# What happens to a user when something breaks: a pool, a client, the gateway itself.

import asyncio
import json
import socket
import struct
import threading
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.gateway.http.api_keys import Keys
from servanda.gateway.proxy.config import Limits
from servanda.gateway.proxy.logprob_capture import LogprobCapture
from servanda.gateway.proxy.pools.upstreams import Breaker
from servanda.gateway.routing.router import Sessions
from tests.clock import HOUR_S, NEVER_S
from tests.gateway.serving import (
    NOBODY,
    WAIT_S,
    Running,
    config,
    drop,
    eventually,
    everything,
    hang,
    reply,
    rows,
    snapshot,
    stream,
    waits_for,
)

ASK = {"model": "m", "prompt": [1, 2], "max_tokens": 4}
EVENT = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
PATH = "/v1/completions"


@pytest.fixture(autouse=True)
def no_client_stays():
    yield
    while Client.known:
        Client.known.pop().socket.close()


def post(running, **more):
    return running.client.post(PATH, json={**ASK, **more})


class Client:
    """A user on a bare socket."""

    known: ClassVar[list] = []

    def __init__(self, running, path=PATH, **more):
        self.socket = socket.create_connection(("127.0.0.1", running.port), timeout=WAIT_S)
        self.known.append(self)
        body = json.dumps({**ASK, **more}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        self.socket.sendall(head.encode() + body)

    def reset(self):
        """Hang up without a word (RST)."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def read_until(self, mark):
        found = b""
        while mark not in found:
            part = self.socket.recv(65_536)
            assert part, found
            found += part
        return found


@pytest.mark.parametrize("path", [PATH, "/v1/responses"])
def test_a_client_that_hangs_up_in_a_stream_ends_it_upstream_at_once(pools, running, path):
    infer, stable = pools
    infer.script = stable.script = stream(EVENT, hang)
    client = Client(running, path, stream=True)
    client.read_until(EVENT)

    client.reset()

    (request,) = infer.requests + stable.requests
    assert request.closed.wait(WAIT_S)
    assert running.idle().counts.in_flight == {"infer": 0, "stable": 0}


def test_a_client_that_hangs_up_before_its_answer_ends_it_upstream_at_once(pools, running):
    pools[0].script = hang
    client = Client(running)
    assert pools[0].arrived.acquire(timeout=WAIT_S)

    client.reset()

    assert pools[0].last.closed.wait(WAIT_S)
    assert not pools[1].requests
    (row,) = rows(running)
    assert row["lost"] == "gone"
    assert running.gateway.counts.statuses == {"infer\tgone": 1}


def test_a_client_that_hangs_up_within_the_first_moment_ends_it_upstream_too(pools, running):
    pools[0].script = pools[1].script = hang
    for path in (PATH, "/v1/responses"):
        for way in (Client.reset, lambda client: client.socket.shutdown(socket.SHUT_RDWR)):
            way(Client(running, path))

    eventually(lambda: not running.app.in_flight)
    for request in [*pools[0].requests, *pools[1].requests]:
        assert request.closed.wait(WAIT_S)
    assert set(running.gateway.counts.in_flight.values()) == {0}


def test_a_client_that_hangs_up_in_the_middle_of_its_body_costs_nothing(pools, running):
    for path in (PATH, "/v1/responses"):
        client = Client(running, path)
        client.socket.sendall(b"POST " + path.encode() + b" HTTP/1.1\r\ncontent-length: 9\r\n\r\n{")
        client.reset()

    eventually(lambda: not running.app.in_flight)
    assert running.gateway.report()["pools"] == {"infer": "closed", "stable": "closed"}


DONE = b"data: [DONE]\n\n"


def test_who_leaves_once_the_answer_is_whole_leaves_evidence(pools, running):
    choice = {"index": 0, "text": "a", "finish_reason": "stop", "token_ids": [3]}
    choice |= {"prompt_token_ids": [1, 2], "logprobs": {"token_logprobs": [-0.5]}}
    event = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    pools[0].script = stream(event, DONE, hang)
    client = Client(running, stream=True)
    client.read_until(DONE)

    client.reset()

    assert pools[0].last.closed.wait(WAIT_S)
    (row,) = rows(running)
    assert row["token_ids"] == [3]
    assert running.gateway.counts.statuses == {"infer\t2xx": 1}


def test_a_pool_is_not_blamed_for_clients_that_read_nothing_at_the_end(pools):
    infer, _ = pools
    infer.script = stream(b"data: " + b"x" * (8 << 20) + b"\n\n")
    waits = {"idle_s": HOUR_S, "total_s": NEVER_S}
    limits = Limits(stall_s=HOUR_S + 1)
    with Running(config(*pools, limits=limits, waits=waits), skips=True) as running:
        running.gateway.take(snapshot())
        for _ in range(6):
            Client(running, stream=True)
            running.clock.skip(HOUR_S + 2, waits_for("client"))
            eventually(lambda: not running.app.in_flight)

        assert running.gateway.report()["pools"]["infer"] == "closed"
        assert running.gateway.counts.statuses == {"infer\tgone": 6}


def test_a_pool_is_not_blamed_for_streams_that_are_long(pools):
    infer, _ = pools
    infer.script = stream(EVENT, hang)
    waits = {"total_s": HOUR_S, "idle_s": NEVER_S}
    with Running(config(*pools, waits=waits), skips=True) as running:
        running.gateway.take(snapshot())
        for _ in range(6):
            client = Client(running, stream=True)
            client.read_until(EVENT)
            running.clock.skip(HOUR_S, waits_for("part"))
            client.read_until(b"timeout")

        assert running.idle().report()["pools"]["infer"] == "closed"
        assert running.gateway.counts.statuses == {"infer\ttimeout": 6}


def test_what_a_client_makes_infer_say_does_not_change_what_others_are_asked(pools, running):
    infer, _ = pools
    infer.script = reply({"error": "role 'max allowed: 0' is unknown"}, status=400)

    assert post(running).status_code == 400
    assert running.idle().pools["infer"].servers[0].best == 8


def test_a_packed_stream_that_breaks_is_cut_and_not_written_into(pools, running):
    running.gateway.take(snapshot(version=2))

    async def packed(request, writer):
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\n"
            b"transfer-encoding: chunked\r\n\r\n2\r\n\x1f\x8b\r\n"
        )
        await writer.drain()
        await drop(request, writer)

    pools[0].script = packed
    client = Client(running, stream=True)
    found = b""
    try:
        while part := client.socket.recv(65_536):
            found += part
    except ConnectionResetError:
        pass

    assert b"error" not in found and not found.endswith(b"0\r\n\r\n")


def test_a_packed_reply_to_a_sampled_request_is_asked_for_again_as_the_client_did(pools, running):
    infer, _ = pools
    infer.scripts.append(reply(b"\x1f\x8b", content_encoding="gzip"))
    infer.script = reply(b"\x1f\x8b plain", content_encoding="gzip")
    body = json.dumps(ASK).encode()
    client = Client(running)

    assert b"plain" in client.read_until(b"plain")
    assert infer.last.body == body
    assert [row["lost"] for row in rows(running)] == ["packed"]
    assert running.gateway.counts.reflexes["refused sample"] == 1


@pytest.mark.parametrize("sample", [0.0, 1.0])
def test_an_upstream_that_dies_in_mid_stream_ends_it_with_an_error(pools, running, sample):
    infer, stable = pools
    running.gateway.take(snapshot(whole=everything(sample=sample), version=2))
    infer.script = stream(EVENT, EVENT[:20], end=False)

    told = post(running, stream=True).content

    events = [json.loads(one[6:]) for one in told.split(b"\n\n") if one.endswith(b"}")]
    assert events[0] == json.loads(EVENT[6:])
    assert events[-1] == {
        "error": {
            "message": "infer broke its reply off; try again",
            "type": "upstream_error",
            "param": None,
            "code": "broken",
        }
    }
    assert not stable.requests  # nobody goes on with another kernel's words
    assert running.idle().counts.statuses == {"infer\tbroken": 1}


def test_a_long_reply_that_breaks_off_is_not_a_whole_one(pools, running):
    async def half(request, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 200000\r\n\r\n" + b"x" * 100_000)
        await drop(request, writer)

    pools[1].script = half
    client = Client(running, "/v1/responses")
    found = b""
    try:
        while part := client.socket.recv(65_536):
            found += part
    except ConnectionResetError:
        pass

    assert len(found) < 200_000


@pytest.mark.parametrize("script", [drop, reply({}, status=500), reply({}, status=503)])
@pytest.mark.parametrize("sample", [0.0, 1.0])
def test_where_infer_fails_before_the_first_byte_stable_answers(pools, running, script, sample):
    infer, stable = pools
    running.gateway.take(snapshot(whole=everything(sample=sample), version=2))
    infer.script = script
    body = json.dumps(ASK).encode()

    answer = running.client.post(PATH, content=body)

    assert answer.json() == {"by": "stable"}
    assert stable.last.body == body
    lost = [row["lost"] for row in rows(running)]
    assert lost == ([] if not sample else ["broken" if script is drop else "5xx"])


def test_where_nobody_listens_stable_answers(pools):
    with Running(config(NOBODY.url, pools[1])) as running:
        running.gateway.take(snapshot())

        assert post(running).json() == {"by": "stable"}
        assert running.idle().counts.statuses == {"infer\tconnect": 1, "stable\t2xx": 1}


def test_where_infer_says_nothing_in_time_stable_answers(pools):
    infer, stable = pools
    infer.script = hang
    waits = {"first_byte_s": HOUR_S, "total_s": NEVER_S}
    with Running(config(infer, stable, waits=waits), skips=True) as running:
        running.gateway.take(snapshot())
        client = Client(running)
        assert infer.arrived.acquire(timeout=WAIT_S)
        running.clock.skip(HOUR_S, waits_for("reply"))

        client.read_until(b'{"by": "stable"}')
        assert infer.last.closed.wait(WAIT_S)


def test_a_request_is_tried_twice_at_most(pools, running):
    infer, stable = pools
    infer.script = stable.script = drop

    answer = post(running)

    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "broken")
    assert answer.headers["retry-after"] == "1"
    assert (len(infer.requests), len(stable.requests)) == (1, 1)


def test_what_stable_fails_at_infer_is_not_asked(pools, running):
    infer, stable = pools
    running.gateway.take(snapshot(whole=everything(share=0.0, acts=True), version=2))
    stable.script = reply({"error": "no"}, status=503)

    answer = post(running)

    assert (answer.status_code, answer.json()) == (503, {"error": "no"})
    assert not infer.requests


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429])
def test_what_a_pool_refuses_is_the_users_to_know(pools, running, status):
    running.gateway.take(snapshot(version=2))
    pools[0].script = reply({"error": "no"}, status=status)

    answer = post(running)

    assert (answer.status_code, answer.json()) == (status, {"error": "no"})
    assert not pools[1].requests


def test_no_request_outlives_its_time(pools):
    infer, stable = pools
    infer.script = stable.script = hang
    waits = {"total_s": HOUR_S, "first_byte_s": NEVER_S}
    with Running(config(infer, stable, waits=waits), skips=True) as running:
        running.gateway.take(snapshot())
        client = Client(running)
        assert infer.arrived.acquire(timeout=WAIT_S)
        running.clock.skip(HOUR_S, waits_for("reply"))

        answer = client.read_until(b"}}")
        assert answer.startswith(b"HTTP/1.1 504 ") and b'"code":"timeout"' in answer
        assert infer.last.closed.wait(WAIT_S)


@pytest.mark.parametrize(("ends", "never"), [("total_s", "idle_s"), ("idle_s", "total_s")])
def test_no_stream_outlives_its_time(pools, ends, never):
    infer, stable = pools
    infer.script = stream(EVENT, hang)
    waits = {ends: HOUR_S, never: NEVER_S}
    with Running(config(infer, stable, waits=waits), skips=True) as running:
        running.gateway.take(snapshot())
        client = Client(running, stream=True)
        client.read_until(EVENT)
        running.clock.skip(HOUR_S, waits_for("part"))

        assert b'"code":"timeout"' in client.read_until(b"0\r\n\r\n")
        assert infer.last.closed.wait(WAIT_S)


def test_a_client_that_reads_nothing_is_given_up(pools):
    infer, _ = pools
    sent = []

    async def endless(request, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        while True:
            writer.write(b"data: " + b"x" * 65_536 + b"\n\n")
            sent.append(1)
            await writer.drain()

    infer.script = endless
    waits = {"idle_s": NEVER_S, "total_s": NEVER_S}
    limits = Limits(stall_s=HOUR_S)
    with Running(config(*pools, limits=limits, waits=waits), skips=True) as running:
        running.gateway.take(snapshot())
        Client(running, stream=True)
        running.clock.skip(HOUR_S, waits_for("client"))

        assert infer.arrived.acquire(timeout=WAIT_S)
        assert infer.last.closed.wait(WAIT_S)
        assert len(sent) < 500  # what nobody reads is not read from upstream either


def test_no_more_requests_are_taken_than_there_is_room_for(pools):
    infer, _ = pools
    infer.script = hang
    with Running(config(*pools, limits=Limits(in_flight=2))) as running:
        running.gateway.take(snapshot())
        clients = [Client(running) for _ in range(2)]
        for _ in clients:
            assert infer.arrived.acquire(timeout=WAIT_S)

        answer = post(running)

        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["message"] == (
            "2 requests are being answered, and no more are taken: try again"
        )
        for client in clients:
            client.reset()
        running.idle()
        infer.script = reply({"by": "infer"})
        assert post(running).is_success


def test_a_pool_that_fails_again_and_again_is_left_alone(pools, running):
    infer, stable = pools
    running.gateway.take(snapshot(version=2))
    infer.script = drop
    for _ in range(9):
        assert post(running).json() == {"by": "stable"}

    assert len(infer.requests) == 5
    counts = running.idle().report()
    assert counts["pools"] == {"infer": "open", "stable": "closed"}
    assert counts["failovers"] == {"broken": 5, "breaker": 4}
    assert counts["answers"] == {"all\tstable": 9}
    stable.script = drop
    for _ in range(9):  # nobody else is left to ask: it is asked each time
        assert post(running).json()["error"]["code"] == "broken"


def test_a_last_pool_that_cannot_be_connected_to_is_refused_at_once(pools):
    with Running(config(NOBODY.url)) as running:
        running.gateway.take(snapshot())
        codes = [post(running).json()["error"]["code"] for _ in range(6)]

        assert codes == ["no_upstream"] * 5 + ["pool_down"]
        assert int(post(running).headers["retry-after"]) >= 1


BAD = {"prompt": [6, 6, 6]}  # what no server of this model can run


async def poisoned(request, writer):
    """A server that answers 500 to one kind of request, and well to any other."""
    bad = request.json["prompt"] == BAD["prompt"]
    await reply({"error": "$ref"} if bad else {"ok": True}, 500 if bad else 200)(request, writer)


@pytest.mark.parametrize("pool", ["infer", "stable"])
def test_what_both_pools_fail_at_is_the_fault_of_the_request(pools, running, pool):
    """One client sends nothing else; others are answered by the pool that was decided."""
    infer, stable = pools
    whole = everything(share=float(pool == "infer"), acts=True, sample=0.0)
    running.gateway.take(snapshot(whole=whole, version=2))
    infer.script = stable.script = poisoned
    for _ in range(20):
        assert post(running, **BAD).status_code == 500
        assert post(running).status_code == 200

    counts = running.idle().report()
    assert counts["pools"] == {"infer": "closed", "stable": "closed"}
    assert counts["statuses"][f"{pool}\t2xx"] == 20
    assert counts["failovers"] == ({"5xx": 20} if pool == "infer" else {})


def test_infer_that_cannot_be_reached_is_left_alone_while_stable_is_still_answering(pools):
    stable = pools[1]
    stable.script = stream(EVENT, hang)
    with Running(config(NOBODY.url, stable)) as running:
        running.gateway.take(snapshot())
        for _ in range(6):
            Client(running, stream=True).read_until(EVENT)

        assert running.gateway.pools["infer"].servers[0].breaker.state == "open"
        assert running.gateway.counts.failovers == {"connect": 5, "breaker": 1}


def test_infer_is_compared_with_stable_as_soon_as_that_answers(pools, running):
    infer, stable = pools
    running.gateway.take(snapshot(version=2))
    infer.script, stable.script = reply({}, status=500), stream(EVENT, hang)
    for _ in range(5):
        Client(running, stream=True).read_until(EVENT)

    assert running.gateway.pools["infer"].servers[0].breaker.state == "open"


def test_a_reply_of_which_the_client_got_nothing_is_nobodys_answer(pools, running):
    async def half(request, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\n{")
        await drop(request, writer)

    pools[0].script = pools[1].script = half

    assert post(running).status_code == 502
    assert running.idle().counts.answers == {"all\tnone": 1}


def test_one_client_opens_no_breaker_that_others_need(pools):
    """Infer alone fails what one key sends, again and again; the other key's requests go on."""
    infer, _ = pools
    infer.script = poisoned
    keys = Keys(*((name, "client", f"key of {name}") for name in ("bad", "good")))
    with Running(config(*pools, keys=keys)) as running:
        running.gateway.take(snapshot())
        for _ in range(30):
            for name, more in (("good", {}), ("bad", BAD), ("bad", BAD)):
                headers = {"authorization": f"Bearer key of {name}"}
                answer = running.client.post(PATH, json={**ASK, **more}, headers=headers)
                assert answer.is_success, answer.text
        counts = running.idle().report()
    assert counts["pools"]["infer"] == "closed"
    assert counts["answers"] == {"all\tinfer": 30, "all\tstable": 60}
    assert counts["failovers"] == {"5xx": 60}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_breaker_opens_rests_tries_once_and_closes():
    clock = Clock()
    breaker = Breaker(clock, failures=3, rest_s=5.0)
    for _ in range(2):
        breaker.failed("a")
    breaker.succeeded("a")
    for _ in range(3):
        assert breaker.enter("a")
        breaker.failed("a")
    assert (breaker.state, breaker.enter("a"), breaker.wait_s) == ("open", False, 5)
    clock.now = 5.0
    assert breaker.state == "half-open"
    assert [breaker.enter("a"), breaker.enter("a")] == [True, False]
    breaker.abandoned()
    assert breaker.enter("a")
    breaker.failed("a")
    clock.now = 14.0
    assert breaker.state == "open"  # twice as long
    clock.now = 15.0
    assert breaker.enter("a")
    breaker.succeeded("a")
    assert breaker.state == "closed" and breaker.enter("a") and breaker.enter("a")


def test_a_trial_that_does_not_end_keeps_nobody_from_trying_for_ever():
    clock = Clock()
    breaker = Breaker(clock, failures=1, rest_s=5.0)
    breaker.failed("a")
    clock.now = 5.0

    assert [breaker.enter("a"), breaker.enter("a")] == [True, False]
    clock.now = 10.0
    assert breaker.enter("a")


def test_a_breaker_rests_no_longer_than_a_minute():
    clock = Clock()
    breaker = Breaker(clock, failures=1, rest_s=5.0)
    breaker.failed("a")
    for _ in range(10):
        clock.now += 60.0
        assert breaker.enter("a")
        breaker.failed("a")
    clock.now += 60.0
    assert breaker.state == "half-open"


def test_connections_that_cannot_be_made_are_nobodys_fault():
    clock = Clock()
    breaker = Breaker(clock, failures=3)
    for client in "abc":
        breaker.succeeded(client)
        breaker.unreachable()
    assert breaker.state == "closed"  # not in a row
    breaker.unreachable()
    breaker.unreachable()
    assert breaker.state == "open"


def test_most_clients_have_to_fail_lately():
    clock = Clock()
    breaker = Breaker(clock, failures=3, window_s=30.0)
    for client in "abcd":
        breaker.succeeded(client)
    for _ in range(50):
        breaker.failed("a")
        breaker.failed("b")
    assert breaker.state == "closed"  # two of four
    clock.now = 31.0
    breaker.failed("a")
    breaker.failed("b")
    assert breaker.state == "open"  # what the others met is long ago


def test_a_client_whose_trials_fail_keeps_no_other_from_trying():
    clock = Clock()
    breaker = Breaker(clock, failures=2, rest_s=5.0)
    for client in "ab":
        assert breaker.enter(client)
        breaker.failed(client)
    assert breaker.state == "open"
    clock.now = 5.0
    assert breaker.enter("a")
    breaker.failed("a")
    assert breaker.state == "half-open" and not breaker.enter("a")
    assert breaker.enter("b")
    breaker.succeeded("b")
    assert breaker.state == "closed"


def test_a_pool_that_fails_two_clients_in_its_trials_rests_for_longer():
    clock = Clock()
    breaker = Breaker(clock, failures=2, rest_s=5.0)
    for now in (0.0, 5.0):
        clock.now = now
        for client in "ab":
            assert breaker.enter(client)
            breaker.failed(client)
    clock.now = 14.0
    assert breaker.state == "open"


@given(st.lists(st.floats(0, 2), max_size=100))
def test_whatever_one_client_sends_two_others_are_never_kept_out(pauses):
    clock = Clock()
    breaker = Breaker(clock)
    for seconds in pauses:
        clock.now += seconds
        for good in ("good 1", "good 2"):
            assert breaker.enter(good)
            breaker.succeeded(good)
        assert breaker.enter("bad")
        breaker.failed("bad")


def test_sessions_are_few_and_do_not_last_for_ever():
    clock = Clock()
    sessions = Sessions(2, 10.0, clock)
    sessions.put("a", "infer")
    clock.now = 5.0
    sessions.put("b", "stable")
    sessions.put("a", "infer")
    sessions.put("c", "infer")

    assert [sessions.pool(s) for s in "abc"] == ["infer", None, "infer"]
    clock.now = 15.0
    assert [sessions.pool(s) for s in "ac"] == [None, None]
    assert len(sessions._known) == 0


def test_a_session_stays_on_its_pool_and_another_key_has_none_of_it(running):
    given = {"x-session-id": "s1"}
    running.client.post(PATH, json=ASK, headers=given)
    running.gateway.take(snapshot(whole=everything(share=0.0, acts=True), version=2))

    answers = [running.client.post(PATH, json=ASK, headers=h).json() for h in (given, {})]

    assert answers == [{"by": "infer"}, {"by": "stable"}]
    critical = everything(share=0.0, acts=True, critical=True)
    running.gateway.take(snapshot(whole=critical, version=3))
    assert running.client.post(PATH, json=ASK, headers=given).json() == {"by": "stable"}


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"x-session-id": "s"}, {}),
        ({"x-user-id": "s"}, {}),
        ({}, {"user": "u"}),
        ({}, {"prompt_cache_key": "u"}),
        ({}, {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}),
    ],
    ids=str,
)
def test_what_belongs_together_is_split_together(running, headers, body):
    running.gateway.take(snapshot(whole=everything(share=0.5, acts=True), base=0.5, version=2))
    path = "/v1/chat/completions" if "messages" in body else PATH
    told = set()
    for i in range(12):
        more = {**body}
        if "messages" in body:
            more["messages"] = [*body["messages"], {"role": "assistant", "content": str(i)}]
        told.add(running.client.post(path, json={**ASK, **more}, headers=headers).json()["by"])

    assert len(told) == 1


def test_what_does_not_belong_together_is_not(running):
    running.gateway.take(snapshot(whole=everything(share=0.5, acts=True), base=0.5, version=2))

    assert {post(running).json()["by"] for _ in range(40)} == {"infer", "stable"}


def test_requests_under_way_end_when_the_gateway_is_told_to(pools):
    infer, stable = pools
    gate = threading.Event()

    async def opened():
        while not gate.is_set():
            await asyncio.sleep(0.001)

    infer.script = stream(EVENT, opened, EVENT)
    running = Running(config(infer, stable), timeout_graceful_shutdown=WAIT_S).__enter__()
    running.gateway.take(snapshot())
    client = Client(running, stream=True)
    client.read_until(EVENT)
    running._running.should_exit = True
    eventually(lambda: _refused(running.port))
    gate.set()

    told = client.read_until(b"0\r\n\r\n")

    assert EVENT in told
    running.__exit__()


def test_a_stream_that_does_not_end_in_time_is_told_so(pools):
    infer, stable = pools
    infer.script = stream(EVENT, hang)
    running = Running(config(infer, stable)).__enter__()
    running.gateway.take(snapshot())
    client = Client(running, stream=True)
    client.read_until(EVENT)

    running.__exit__()

    assert b"the gateway ends; try again" in client.read_until(b"0\r\n\r\n")


def _refused(port):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_sampled_stream_without_pauses_lets_others_have_their_turn(pools, monkeypatch):
    """Many events come at once; in the loop's turns between their parts others are answered."""
    event = b'data: {"choices":[{"index":0,"text":"a","token_ids":[1],"logprobs":null}]}\n\n'
    turns, sizes, seen = [0], [], []
    feed = LogprobCapture.feed

    def tick():
        turns[0] += 1
        asyncio.get_running_loop().call_soon(tick)

    def spied(capture, part):
        if not sizes:
            tick()
        sizes.append(len(part))
        seen.append(turns[0])
        return feed(capture, part)

    monkeypatch.setattr(LogprobCapture, "feed", spied)
    infer, _ = pools
    infer.script = stream(event * 4000, b"data: [DONE]\n\n")
    with Running(config(*pools)) as running:
        running.gateway.take(snapshot(whole=everything(share=1.0, sample=1.0)))
        answer = running.client.post(PATH, json={**ASK, "stream": True})

        assert answer.status_code == 200
        assert len(sizes) > 10 and max(sizes) <= 8192
        # the last part of one read and the first of the next may share a turn
        assert max(Counter(seen).values()) <= 2
