# Clients that stall or leave, signals, and addresses: what a server meets when it runs for long.

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal
import socket

import pytest
import uvicorn

from servanda.engines.server import parse, process
from servanda.engines.server.app import EventStream, Limits
from servanda.engines.server.process import serve
from servanda.engines.server.scheduler import Scheduler
from servanda.engines.server.sockets import address, bound
from servanda.errors import MeasurementError
from tests.clock import HOUR_S, Skipping, eventually
from tests.engines.serving import WAIT_S, Gated, live, table_engine
from tests.engines.test_server_fails import BODY, URL, until

ENDLESS = {"": [1, 0, 0, 0, 0]}
MANY = {"prompt": [0] * 2000, "max_tokens": 200, "n": 64, "return_token_ids": True, "stream": True}


def sent(port, head, data=b"", room=None):
    """A request on a socket of its own; with little room for what it does not read."""
    call = socket.socket()
    if room:
        call.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    call.settimeout(WAIT_S)
    call.connect(("127.0.0.1", port))
    call.sendall(f"POST {URL} HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n".encode() + data)
    return call


def posted(port, body, **more):
    data = json.dumps(body).encode()
    return sent(port, f"content-length: {len(data)}", data, **more)


def read(call):
    with call.makefile("rb") as file:
        return file.read()


def test_a_reply_waits_for_no_acknowledgement_of_its_head():
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        with socket.create_connection(taken.getsockname()):
            accepted, _ = taken.accept()
            with accepted:  # asyncio sets TCP_NODELAY by this
                assert accepted.proto == socket.IPPROTO_TCP


@pytest.mark.slow
def test_a_client_that_stops_reading_loses_its_place(tmp_path):
    engine, clock = table_engine(tmp_path, ENDLESS), Skipping()
    with (
        live(engine, clock=clock, idle_s=HOUR_S) as (client, server),
        posted(client.base_url.port, MANY, room=4096),
    ):

        def stalled():
            return any(each.flow.write_paused for each in clock.connections)

        def gone():  # it may be stalled before its time runs: then the clock goes forward again
            clock.skip(HOUR_S, lambda: stalled() or not server._in_flight)
            return not server._in_flight

        eventually(gone)
        until(lambda: server.scheduler.waiting == 0)
        assert client.post(URL, json=BODY).status_code == 200


def test_a_client_that_stops_sending_is_told_so_and_loses_its_place(tmp_path):
    clock = Skipping()
    with live(table_engine(tmp_path), clock=clock, idle_s=HOUR_S) as (client, server):
        with sent(client.base_url.port, "connection: close\r\ncontent-length: 50", b"{") as call:
            clock.skip(HOUR_S, lambda: server._in_flight == 1)
            reply = read(call)
        assert reply.startswith(b"HTTP/1.1 408") and b"did not come within 3600 s" in reply
        until(lambda: server._in_flight == 0)


def streamed(receive):
    """What an EventStream does that never has to wait, neither for events nor to send."""
    done = []

    async def events():
        for _ in range(1000):
            yield b"data: 1\n\n"

    async def send(message):
        done.append(message.get("more_body", "head"))

    stream = EventStream(events(), lambda: done.append("ended"), 60.0)
    asyncio.run(stream({}, receive, send))
    return done


def test_a_stream_with_much_to_say_notices_that_its_client_has_left():
    async def receive():
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    done = streamed(receive)
    assert len(done) < 10 and done.count("ended") == 1


def test_who_has_read_a_whole_stream_finds_its_place_free():
    async def receive():
        await asyncio.Event().wait()

    done = streamed(receive)
    assert done == ["head", *[True] * 1000, "ended", False]


@contextlib.contextmanager
def ending(monkeypatch, engine, clients):
    """A server that this process serves, and that a SIGTERM ends while its clients wait."""
    monkeypatch.setattr(process, "_GRACE_S", 0)
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with (
        bound("127.0.0.1", 0) as taken,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        port, found = taken.getsockname()[1], []
        ready = lambda: found.append(pool.submit(clients, port))  # noqa: E731
        serve(engine, "toy", taken, Limits(wait_s=0.0), test_mode=False, ready=ready)
        yield found[0].result(timeout=WAIT_S)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_stream_is_told_that_the_server_ends_and_nothing_is_traced(tmp_path, monkeypatch, capfd):
    engine = table_engine(tmp_path, ENDLESS, cls=Gated)

    def clients(port):
        with posted(port, {**BODY, "max_tokens": 4000, "stream": True}) as call:
            assert engine.reached.acquire(timeout=WAIT_S)
            os.kill(os.getpid(), signal.SIGTERM)
            return read(call)

    def end(scheduler):
        theirs(scheduler)
        engine.open()

    theirs = Scheduler.end
    monkeypatch.setattr(Scheduler, "end", end)
    with ending(monkeypatch, engine, clients) as reply:
        assert b"the server is ending" in reply and b"data: [DONE]" in reply
    assert capfd.readouterr().err == ""


def test_a_client_that_sends_nothing_more_delays_no_end_for_long(tmp_path, monkeypatch, capfd):
    def clients(port):
        with sent(port, "content-length: 50", b"{") as call:
            return read(call)

    def received(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return theirs(*arguments)

    theirs = parse.received
    monkeypatch.setattr(parse, "received", received)
    with ending(monkeypatch, table_engine(tmp_path), clients) as reply:
        assert reply.startswith(b"HTTP/1.1 500")
        assert "Traceback" not in capfd.readouterr().err


def test_a_signal_that_comes_before_the_server_listens_to_signals_is_not_lost(
    tmp_path, monkeypatch
):
    theirs = uvicorn.Server.capture_signals

    def late(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return theirs(self)

    monkeypatch.setattr(uvicorn.Server, "capture_signals", late)
    with bound("127.0.0.1", 0) as taken:
        engine = table_engine(tmp_path)
        serve(engine, "toy", taken, Limits(), test_mode=False, ready=lambda: None)


def test_two_servers_that_start_together_at_one_port_are_one_and_an_error(tmp_path):
    with bound("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bound("127.0.0.1", port) as second:  # neither listens yet: the system lets it
            first.listen()
            with pytest.raises(MeasurementError, match=f"127.0.0.1:{port}: Address already in use"):
                serve(
                    *(table_engine(tmp_path), "toy", second, Limits()),
                    test_mode=False,
                    ready=lambda: None,
                )


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_an_address_of_six_words_is_written_in_brackets():
    assert address("::1", 80) == "[::1]:80"
    with bound("::1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MeasurementError, match=rf"at \[::1\]:{port}: Address already in use"):
            bound("::1", port)
