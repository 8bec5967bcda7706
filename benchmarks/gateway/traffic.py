# Users: mixed requests at a steady rate, and what became of each.

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import aiohttp

from benchmarks.gateway.answers import WORDS
from benchmarks.gateway.deployment import user_key
from benchmarks.gateway.stub import DOMAINS

Fate = Literal["answered", "refused", "broken", "told", "short", "nobody", "hung"]
PATIENCE_S = 60.0  # of a user; every request is to end before it


class Spell(NamedTuple):
    """When one request was under way, by a steady clock, and what became of it."""

    began: float
    ended: float
    fate: Fate


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
    longest_s: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)
    spells: list[Spell] = field(default_factory=list)

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            self.sent + other.sent,
            self.answered + other.answered,
            self.refused + other.refused,
            self.broken + other.broken,
            self.told + other.told,
            self.short + other.short,
            self.nobody + other.nobody,
            self.hung + other.hung,
            max(self.longest_s, other.longest_s),
            self.statuses + other.statuses,
            [*self.texts, *other.texts],
            [*self.spells, *other.spells],
        )

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
    user: int = 0,
    headers: dict[str, str] | None = None,
    seen: Outcome | None = None,
) -> Outcome:
    """One request, to its end."""
    found = seen if seen is not None else Outcome()
    found.sent += 1
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    sent = {"authorization": f"Bearer {user_key(user)}", **(headers or {})}
    began = time.monotonic()
    try:
        async with session.post(url + path, json=body, headers=sent) as reply:
            text = (await reply.read()).decode("utf-8", "replace")
        found.statuses[reply.status] += 1
        fate = read(text, bool(body.get("stream"))) if reply.status == 200 else "refused"
        if fate != "answered":
            found.texts.append(text[-300:])
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
    found.spells.append(Spell(began, ended, fate))
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
) -> Outcome:
    """Requests at a steady rate, whatever becomes of those before."""
    total, tasks = Outcome(), set[asyncio.Task[Outcome]]()
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        began = time.monotonic()
        for number in range(round(seconds * rate)):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            one = ask(session, url, make(number), user=number * 7, seen=total)
            tasks.add(task := asyncio.create_task(one))
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
    return total
