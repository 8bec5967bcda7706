# Users: mixed requests at a steady rate, and what became of each.

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import aiohttp

from benchmarks.gateway.answers import WORDS
from benchmarks.gateway.deployment import user_key
from benchmarks.gateway.stub import DOMAINS
from benchmarks.gateway.wire import MARK

Fate = Literal["answered", "refused", "broken", "told", "short", "nobody", "hung"]
PATIENCE_S = 60.0  # of a user; every request is to end before it
POOL = "x-servanda-pool"  # which says who answered
_ID = re.compile(r'"id": ?"cmpl-([a-z]+)-([^"]*)"')
_marks = itertools.count()


class Spell(NamedTuple):
    """When one request was under way, by a steady clock, and what became of it.

    Args:
        domain: that the request named; pool: whose reply came, "" where none did.
    """

    began: float
    ended: float
    fate: Fate
    domain: str = ""
    pool: str = ""


@dataclass
class Outcome:
    """What became of requests.

    Args:
        answered: with 200 and to the end; refused: with a status and a reason.
        broken: it began and did not end well, and its client could see that: the connection
            closed, an event said so, or what came is no JSON; told: of them, by an event.
        short: it ended early, and nothing showed that.
        nobody: nothing listened.
        hung: they outlived the patience.
        crossed: what came was not the reply to that very request, or not of the pool that it said.
        later: of the refused, those that were told when to try again.
        longest_s: of any of them.
        spells: of each, where they are kept.
    """

    sent: int = 0
    answered: int = 0
    refused: int = 0
    broken: int = 0
    told: int = 0
    short: int = 0
    nobody: int = 0
    hung: int = 0
    crossed: int = 0
    later: int = 0
    longest_s: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)
    spells: list[Spell] = field(default_factory=list)

    def __add__(self, other: Outcome) -> Outcome:
        both = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Outcome(**{**both, "longest_s": max(self.longest_s, other.longest_s)})

    def under_way(self, at: float, *fates: Fate) -> list[Spell]:
        """Requests that had begun by then and had not ended; of these fates, or of any."""
        here = (one for one in self.spells if one.began <= at < one.ended)
        return [one for one in here if not fates or one.fate in fates]


def request(number: int, **fields: Any) -> dict[str, Any]:
    """One in two is streamed, one in two is a chat; domains take turns."""
    words = " ".join(WORDS[(number + at) % (len(WORDS) - 1)] for at in range(8))
    chat = bool(number // 2 % 2)
    said = {"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}
    domain = DOMAINS[number % len(DOMAINS)]
    asked = {"model": "fake", "max_tokens": 16, "temperature": 1.0}
    asked |= {"metadata": {"domain": domain}, **said}
    return asked | ({"stream": True} if number // 4 % 2 else {}) | fields


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    key: str = "",
    headers: dict[str, str] | None = None,
    seen: Outcome | None = None,
) -> Outcome:
    """One request, to its end.

    Args:
        key: of whom; "": of the first user.
    """
    found = seen if seen is not None else Outcome()
    found.sent += 1
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    mark = f"{next(_marks):x}"
    said = {**body.get("metadata", {}), MARK: mark}
    sent = {"authorization": f"Bearer {key or user_key(0)}", MARK: mark, **(headers or {})}
    pool, crossed = "", False
    began = time.monotonic()
    try:
        async with session.post(url + path, json={**body, "metadata": said}, headers=sent) as reply:
            if reply.status == 200:
                pool = reply.headers.get(POOL, "nobody")
                crossed = reply.headers.get(MARK) != mark
            text = (await reply.read()).decode("utf-8", "replace")
        found.statuses[reply.status] += 1
        fate = read(text, bool(body.get("stream"))) if reply.status == 200 else "refused"
        if fate != "answered":
            found.texts.append(text[-300:])
        ids = _ID.findall(text)
        crossed |= any(one != (pool, mark) for one in ids) or (fate == "answered" and not ids)
        found.later += fate == "refused" and "retry-after" in reply.headers
    except TimeoutError:
        fate = "hung"
    except aiohttp.ClientConnectorError:
        fate = "nobody"
    except (aiohttp.ClientError, OSError):
        fate = "broken"
    ended = time.monotonic()
    counted = "broken" if fate == "told" else fate
    setattr(found, counted, getattr(found, counted) + 1)
    found.told += fate == "told"
    found.crossed += crossed
    found.spells.append(Spell(began, ended, fate, said.get("domain", ""), pool))
    found.longest_s = max(found.longest_s, ended - began)
    return found


def read(text: str, stream: bool) -> Fate:
    """What a client makes of an answer that came with 200 and an orderly end.

    >>> read('{"choices": [{"finish_reason": "stop"}]}', False), read('{"cho', False)
    ('answered', 'broken')
    >>> event = 'data: {"choices": [{"finish_reason": null}]}'
    >>> read(event, True), read('data: {"error": {}}', True), read("data: {nonsense", True)
    ('short', 'told', 'broken')
    """
    parts = [text]
    if stream:
        parts = [line[5:].strip() for line in text.split("\n") if line.startswith("data:")]
    ended = not stream or parts[-1:] == ["[DONE]"]
    try:
        found = [json.loads(part) for part in parts if part != "[DONE]"]
    except ValueError:
        return "broken"
    if any("error" in one for one in found):
        return "told"
    finish = found[-1]["choices"][0]["finish_reason"] if found else None
    return "answered" if ended and finish else "short"


async def traffic(
    url: str,
    seconds: float,
    rate: float = 40.0,
    make: Callable[[int], dict[str, Any]] = request,
    key: str = "",
) -> Outcome:
    """Requests at a steady rate, whatever becomes of those before.

    Args:
        key: of the one client that sends them; "": users take turns.
    """
    total, tasks = Outcome(), set[asyncio.Task[Outcome]]()
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        began = time.monotonic()
        for number in range(round(seconds * rate)):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            one = ask(session, url, make(number), key or user_key(number * 7), seen=total)
            tasks.add(task := asyncio.create_task(one))
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
    return total
