# Users: each with a key of their own, who ask for completions and chats, streamed and whole.
#
# What every one of them met is written down as a line of JSON, once the answer is over.

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

SHARES = {"prose": 0.3, "json": 0.25, "arith": 0.25, "code": 0.2}  # of the requests
NEW_TOKENS = 16  # of the contract's workload


@dataclass(frozen=True)
class Ask:
    """One request of one user."""

    user: int
    domain: str
    prompt: str
    chat: bool
    stream: bool

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def body(self) -> dict[str, Any]:
        # the domain is all that the gateway knows of what is asked: it reads no prompt
        body: dict[str, Any] = {"metadata": {"domain": self.domain}, "stream": self.stream}
        body |= {"max_tokens": NEW_TOKENS, "temperature": 1.0}
        said = {"messages": [{"role": "user", "content": self.prompt}]}
        return body | (said if self.chat else {"prompt": self.prompt})


def asks(prompts: Path, users: int, seed: int, chats: float) -> Iterator[Ask]:
    """Requests without an end, the same for the same seed; chats: their share."""
    known, drawn = defaultdict(list), random.Random(seed)
    for line in prompts.read_text().splitlines():
        one = json.loads(line)
        known[one["labels"]["domain"]].append(one["prompt"])
    while True:
        domain = drawn.choices([*SHARES], [*SHARES.values()])[0]
        prompt = drawn.choice(known[domain])
        yield Ask(
            drawn.randrange(users), domain, prompt, drawn.random() < chats, drawn.random() < 0.5
        )


async def asked(gateway: httpx2.AsyncClient, ask: Ask, key: str) -> dict[str, Any]:
    """What a user met: the status, who answered, and seconds to the first and the last byte."""
    began, first, size, pool = time.time(), None, 0, ""
    try:
        headers = {"authorization": f"Bearer {key}"}
        async with gateway.stream("POST", ask.path, json=ask.body, headers=headers) as reply:
            status = reply.status_code
            pool = reply.headers.get("x-servanda-pool", "")
            async for part in reply.aiter_raw():
                first = time.time() - began if first is None else first
                size += len(part)
    except httpx2.HTTPError as error:
        status = f"{type(error).__name__}"
    met = {"at": began, "user": ask.user, "domain": ask.domain, "chat": ask.chat}
    met |= {"stream": ask.stream, "status": status, "pool": pool, "bytes": size}
    return met | {"first_s": first, "seconds": time.time() - began}


async def main() -> None:
    parser = argparse.ArgumentParser(description="Users of a gateway.")
    for name in ("gateway", "prompts", "keys", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second")
    parser.add_argument("--at-a-time", type=int, default=16, help="who wait for an answer")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--completions", action="store_true", help="send no chats")
    given = parser.parse_args()
    keys = json.loads(Path(given.keys).read_text())
    pauses, places = random.Random(given.seed), asyncio.Semaphore(given.at_a_time)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=given.at_a_time)
    tasks: set[asyncio.Task[None]] = set()
    ending = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    async with httpx2.AsyncClient(base_url=given.gateway, timeout=60, limits=limits) as gateway:
        with open(given.out, "a", buffering=1) as out:

            async def one(ask: Ask) -> None:
                try:
                    met = await asked(gateway, ask, keys[ask.user])
                    out.write(json.dumps(met) + "\n")
                finally:
                    places.release()

            chats = 0.0 if given.completions else 0.5
            for ask in asks(Path(given.prompts), len(keys), given.seed, chats):
                await places.acquire()
                task = asyncio.create_task(one(ask))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                try:  # arrivals of a Poisson process
                    await asyncio.wait_for(ending.wait(), pauses.expovariate(given.rate))
                    break
                except asyncio.TimeoutError:
                    pass
            await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(main())
