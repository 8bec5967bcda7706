# The benchmarks' users: what they hold to be another's reply, or that of the wrong pool.

import asyncio
import json

import pytest

pytest.importorskip("aiohttp")

import aiohttp
from benchmarks.gateway.settled import Settled
from benchmarks.gateway.traffic import MARK, POOL, Outcome, Spell, ask, request


def asked(stream, *, mark="{mark}", signed="infer", said="infer", own="{mark}"):
    """What becomes of one request, to a server that answers so."""

    async def answer(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        await reader.readexactly(int(lines["content-length"]))
        of = {"mark": lines[MARK]}
        choice = {"index": 0, "text": "a", "finish_reason": "stop"}
        reply = {"id": f"cmpl-{signed}-{own.format(**of)}", "choices": [choice]}
        body = json.dumps(reply)
        body = f"data: {body}\n\ndata: [DONE]\n\n" if stream else body
        about = f"{MARK}: {mark.format(**of)}\r\n{POOL}: {said}\r\nconnection: close"
        writer.write(f"HTTP/1.1 200 OK\r\n{about}\r\n\r\n{body}".encode())
        writer.close()

    async def main():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, aiohttp.ClientSession() as session:
            return await ask(session, f"http://127.0.0.1:{port}", request(4 if stream else 0))

    return asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_the_reply_to_a_request_is_not_misrouted(stream):
    own = asked(stream)
    assert (own.answered, own.crossed) == (1, 0)
    assert [one.pool for one in own.spells] == ["infer"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "how", [{"mark": "other"}, {"own": "other"}, {"signed": "stable"}, {"said": "stable"}]
)
def test_a_reply_of_another_request_or_of_another_pool_than_it_says_is_crossed(stream, how):
    own = asked(stream, **how)
    assert (own.answered, own.crossed) == (1, 1)


def test_a_slice_is_answered_astray_only_while_it_is_settled():
    settled = Settled()
    before = Spell(0.0, 1.0, "answered", "law", "infer")
    settled.say("domain=law", "stable")
    since = settled._words[0].since
    during = Spell(since, since + 1, "answered", "law", "infer")
    assert not settled.astray(before)
    assert settled.astray(during)
    assert not settled.astray(during._replace(pool="stable"))
    assert not settled.astray(during._replace(domain="math"))
    assert not settled.astray(during._replace(pool=""))  # it was refused
    settled.end("domain=law")
    assert not settled.astray(during)  # it ended later
    settled.say("all", "infer")
    late = Spell(since + 1e6, since + 1e6 + 1, "answered", "law", "stable")
    assert settled.astray(late)


def test_outcomes_add_up():
    both = Outcome(sent=1, crossed=1, longest_s=2.0) + Outcome(sent=2, later=1, longest_s=1.0)
    assert (both.sent, both.crossed, both.later, both.longest_s) == (3, 1, 1, 2.0)
