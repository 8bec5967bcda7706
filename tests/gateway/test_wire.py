# What goes over the wire: bytes of headers, bodies that are sent once, connections that end.

import asyncio
import contextlib
import json
import socket
import threading

import pytest

from servanda.gateway.http.listener import HEAD_S, KEEP_ALIVE_S
from servanda.gateway.proxy.config import Limits
from servanda.gateway.proxy.exchange import Timeouts
from tests.clock import HOUR_S, NEVER_S
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
    waits_for,
)

ASK = {"model": "m", "prompt": [1, 2], "max_tokens": 4}
EVENT = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
DONE = b"data: [DONE]\n\n"
PATH = "/v1/completions"


@contextlib.contextmanager
def connected(running):
    with socket.create_connection(("127.0.0.1", running.port), timeout=WAIT_S) as client:
        yield client


def request(*lines, body=b"", path=PATH):
    body = body or json.dumps(ASK).encode()
    head = [f"POST {path} HTTP/1.1".encode(), b"host: x", b"content-length: %d" % len(body)]
    return b"\r\n".join([*head, *lines, b"", body])


def all_of(client):
    """Everything until the other side closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def until(client, mark):
    found = b""
    while mark not in found:
        part = client.recv(65_536)
        assert part, found
        found += part
    return found


@pytest.mark.parametrize("sample", [0.0, 1.0])
def test_the_first_part_of_a_stream_has_as_long_as_a_first_byte(pools, sample):
    """A server that queues sends its head at once, and its first token once it is its turn."""

    its_turn = threading.Event()

    async def queued():
        while not its_turn.is_set():
            await asyncio.sleep(0.001)

    pools[0].script = stream(queued, EVENT, DONE)
    waits = {"idle_s": HOUR_S, "first_byte_s": NEVER_S, "total_s": NEVER_S}
    with Running(config(*pools, waits=waits), skips=True) as running, connected(running) as client:
        running.gateway.take(snapshot(whole=everything(sample=sample)))
        client.sendall(request(body=json.dumps({**ASK, "stream": True}).encode()))
        running.clock.skip(HOUR_S + 1, waits_for("part"))
        its_turn.set()

        told = until(client, b"0\r\n\r\n")
        assert EVENT in told and DONE in told and b"timeout" not in told


@pytest.mark.parametrize("value", ["café".encode(), "café".encode("latin-1")])
def test_a_header_in_utf8_comes_upstream_as_the_bytes_that_it_was(pools, running, value):
    heard = []

    async def script(request, writer):
        heard.append(request.headers["x-title"].encode("latin-1"))
        await reply({})(request, writer)

    pools[0].script = script
    with connected(running) as client:
        client.sendall(request(b"x-title: " + value, b"connection: close"))
        all_of(client)

    assert heard == ["café".encode()]  # other bytes have no form there but this one


def test_an_offer_of_http_2_goes_no_further_and_its_body_does(pools, running):
    offer = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMA")
    with connected(running) as client:
        client.sendall(request(*offer))
        assert b"200 OK" in until(client, b"\r\n\r\n")

    assert pools[0].last.json["prompt"] == ASK["prompt"]
    assert not {"upgrade", "http2-settings"} & {*pools[0].last.headers}


def test_headers_that_two_connections_name_stay_here(pools, running):
    with connected(running) as client:
        named = (b"connection: x-secret", b"x-secret: 1", b"connection: close")
        client.sendall(request(*named))
        all_of(client)

    assert "x-secret" not in pools[0].last.headers


def test_a_connection_that_names_authorization_leaves_the_upstreams_key(pools):
    with Running(config(pools[0], waits={"key": "theirs"})) as running:
        running.client.post(PATH, json=ASK, headers={"connection": "authorization"})

    assert pools[0].last.headers["authorization"] == "Bearer theirs"


def test_headers_that_two_connections_upstream_name_stay_there(pools, running):
    async def script(request, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-hop: 1\r\n")
        writer.write(b"connection: x-hop\r\nconnection: keep-alive\r\n\r\n{}")

    pools[0].script = script

    assert "x-hop" not in running.client.post(PATH, json=ASK).headers


def choice(**more):
    one = {"index": 0, "text": "a", "finish_reason": "stop", "token_ids": [3]}
    one |= {"prompt_token_ids": [1, 2], "logprobs": {"token_logprobs": [-0.5]}}
    return {**one, **more}


ODD = [
    {"logprobs": {"content": [{"logprob": -1.0, "token": "a", "top_logprobs": ["a"]}]}},
    {"logprobs": {"content": [{"logprob": -1.0, "top_logprobs": [{"token": []}]}]}},
    {"logprobs": {"token_logprobs": [10**400]}},
    {"logprobs": {"token_logprobs": [-1.0], "top_logprobs": [{"token_id:" + "9" * 30: -1.0}]}},
    {"logprobs": {"token_logprobs": [-1.0], "top_logprobs": [{"token_id:" + "9" * 5000: -1.0}]}},
    {"finish_reason": "\ud800"},
    {"finish_reason": ["stop"]},
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_whatever_a_sampled_reply_holds_it_reaches_its_client(path, streams, odd):
    data = json.dumps({"choices": [choice(**odd)]}).encode()
    script = stream(b"data: " + data + b"\n\n", DONE) if streams else reply(data)
    ask = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    ask = ask if "chat" in path else ASK
    waits = {"best": 1}
    with (
        Fake(script) as infer,
        Running(config(infer, controller=NOBODY, waits=waits)) as running,
    ):
        running.gateway.take(snapshot(whole=everything(sample=1.0)))

        answer = running.client.post(path, json={**ask, "stream": streams})

        assert answer.status_code == 200
        text = answer.content.split(b"\n\n")[0].removeprefix(b"data: ")
        (told,) = json.loads(text)["choices"]
        assert (told["text"], told["finish_reason"]) == ("a", odd.get("finish_reason", "stop"))
        (row,) = rows(running)  # and no later one waits for it
        assert row["index"] == 0


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
@pytest.mark.parametrize("streams", [False, True])
def test_a_server_that_gives_no_logprobs_is_not_one_that_says_nothing(pools, path, streams):
    words = {"text": "so many"}
    ask = ASK
    if "chat" in path:
        words = {"delta" if streams else "message": {"role": "assistant", "content": "so many"}}
        ask = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    data = json.dumps({"choices": [{"index": 0, "finish_reason": "length", **words}]}).encode()
    pools[0].script = stream(b"data: " + data + b"\n\n", DONE) if streams else reply(data)
    with Running(config(*pools, controller=NOBODY)) as running:
        running.gateway.take(snapshot(whole=everything(sample=1.0)))
        for _ in range(4):
            running.client.post(path, json={**ask, "stream": streams}).raise_for_status()

        assert len(pools[0].requests) == 4
        assert {row["lost"] for row in rows(running)} == {"without ids and logprobs"}


def test_a_mirrored_reply_that_is_packed_is_lost_and_nothing_odd(pools, running):
    pools[0].script = reply(b"\x1f\x8b", content_encoding="gzip")
    away = everything(share=0.0, mirror=1.0, sample=1.0, acts=True)
    running.gateway.take(snapshot(whole=away, version=2))

    running.client.post(PATH, json=ASK).raise_for_status()

    assert [row["lost"] for row in rows(running)] == ["packed"]
    assert "malformed" not in running.gateway.counts.reflexes


def test_a_large_sampled_reply_that_nobody_reads_is_given_up(pools):
    body = json.dumps({"choices": [choice(text="x" * (24 << 20))]}).encode()
    pools[0].script = reply(body)
    limits, waits = Limits(stall_s=HOUR_S), {"total_s": NEVER_S}
    given = config(*pools, limits=limits, waits=waits, controller=NOBODY)
    with Running(given, skips=True) as running:
        running.gateway.take(snapshot(whole=everything(sample=1.0)))
        with connected(running) as client:
            client.sendall(request())
            running.clock.skip(HOUR_S, waits_for("client"))
            running.idle()

            assert len(all_of(client)) < 24 << 20


def test_a_client_that_asked_for_more_and_hangs_up_ends_what_it_asked_first(pools, running):
    pools[0].script = stream(EVENT, hang)
    with connected(running) as client:
        client.sendall(request())
        until(client, EVENT)
        client.sendall(request())

    assert pools[0].requests[0].closed.wait(WAIT_S)
    assert running.idle().counts.statuses == {"infer\tgone": 1}


def test_a_second_head_has_as_much_time_as_the_first(pools):
    keeps = {"timeout_keep_alive": KEEP_ALIVE_S}
    with Running(config(*pools), skips=True, **keeps) as running, connected(running) as client:
        client.sendall(request())
        until(client, b'{"by": "stable"}')
        late = request()
        client.sendall(late[:9])
        running.clock.skip(
            HEAD_S - 1, lambda: any(each._late for each in running.clock.connections)
        )
        client.sendall(late[9:])
        until(client, b'{"by": "stable"}')
        client.sendall(late[:9])
        running.clock.skip(HEAD_S, lambda: any(each._late for each in running.clock.connections))

        assert all_of(client) == b""


@pytest.mark.parametrize("more", [b"\r\n", b"x"])
def test_a_connection_that_says_less_than_a_request_is_not_kept(pools, more):
    """Of a body that no one waits for any longer, or behind one."""
    keeps = {"timeout_keep_alive": KEEP_ALIVE_S}
    with Running(config(*pools), skips=True, **keeps) as running, connected(running) as client:
        if more == b"x":
            client.sendall(b"POST /none HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n")
        else:
            client.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert until(client, b"\r\n\r\n")
        client.sendall(more)
        running.clock.skip(HEAD_S, lambda: any(each._late for each in running.clock.connections))

        all_of(client)


def test_what_another_path_fails_at_does_not_make_a_pool_well(pools):
    infer, stable = pools
    infer.script = reply({}, status=503)
    with Running(config(infer, stable, without="infer")) as running:
        running.gateway.take(snapshot())
        for _ in range(6):
            running.client.post(PATH, json=ASK)
            running.client.get("/v1/responses")

        assert running.idle().report()["pools"] == {"infer": "open", "stable": "closed"}


def test_a_comment_between_events_of_a_sampled_stream_is_not_held_back(pools, running):
    gate = asyncio.Event()
    pools[0].script = stream(EVENT, b": still there\n", gate.wait, b"\n", DONE)
    with connected(running) as client:
        client.sendall(request())
        until(client, b": still there\n")
        pools[0]._loop.loop.call_soon_threadsafe(gate.set)

        until(client, DONE)


def test_a_sampled_reply_that_is_too_long_to_be_read_whole_passes_as_it_is(pools):
    data = json.dumps({"choices": [choice(text="x" * 300_000)]}).encode()
    pools[0].script = reply(data)
    with Running(config(*pools, limits=Limits(reply_bytes=1000), controller=NOBODY)) as running:
        running.gateway.take(snapshot(whole=everything(sample=1.0)))

        told = running.client.post(PATH, json=ASK)

        assert told.content == data and not pools[1].requests
        assert [row["lost"] for row in rows(running)] == ["overlong"]
        assert running.gateway.counts.statuses == {"infer\t2xx": 1}


def test_a_digest_of_the_body_that_came_is_not_said_of_another_one(pools, running):
    said = {"content-digest": "sha-256=:x:", "repr-digest": "sha-256=:x:"}
    named = {name.replace("-", "_"): value for name, value in said.items()}
    pools[0].script = reply({"choices": [choice()]}, **named)

    answer = running.client.post(PATH, json=ASK, headers={**said, "content-md5": "x"})

    assert not said.keys() & {*answer.headers}
    assert not {*said, "content-md5"} & {*pools[0].last.headers}


@pytest.mark.parametrize("path", [PATH, "/v1/embeddings"])
def test_a_status_that_is_none_is_a_reply_that_broke(pools, running, path):
    pools[0].script = pools[1].script = reply({}, status=699)

    answer = running.client.post(path, json=ASK)

    assert answer.status_code == 502 and answer.json()["error"]["type"] == "upstream_error"
    assert running.idle().counts.statuses["stable\tbroken"] == 1


@pytest.mark.parametrize("path", [PATH, "/v1/embeddings"])
def test_a_reply_of_nothing_has_no_length(pools, running, path):
    async def odd(request, writer):
        writer.write(b"HTTP/1.1 204 X\r\ncontent-length: 5\r\n\r\n")

    pools[0].script = pools[1].script = odd

    answer = running.client.post(path, json=ASK)

    assert (answer.status_code, answer.content) == (204, b"")
    assert "content-length" not in answer.headers
    assert sum(running.idle().counts.statuses.values()) == 1


def test_a_row_that_was_led_elsewhere_says_so(pools, running):
    pools[0].script = reply({}, status=302, location="http://127.0.0.1:9/")

    assert running.client.post(PATH, json=ASK).status_code == 502
    assert [row["lost"] for row in rows(running)] == ["status 302"]


def test_a_cancellation_that_somebody_swallowed_comes_with_the_next_wait():
    """As `asyncio.wait_for` does before Python 3.12, where its work ends in the same turn."""

    async def asks():
        patience = Timeouts(WAIT_S, asyncio.get_running_loop())
        patience.wait_for("body", 0.0)
        with contextlib.suppress(asyncio.CancelledError):
            await hang()
        with pytest.raises(asyncio.CancelledError):
            patience.wait_for("reply", WAIT_S)
        patience.again()
        patience.wait_for("reply", WAIT_S)
        patience.done()
        return patience.why

    assert asyncio.run(asks()) == ""
