# The users, and the proxy before them: who asks, who answers, and what is logged of it.
#
# What a proxy of your own has to do is in here: read the route before every request, split by a
# keyed hash, decide what is sampled before anything is sent, and log every sampled request to
# infer in launch order, whatever became of it.

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import httpx2

BEST = 5  # likeliest tokens of each step: by them the sampler is held to its word
SAMPLING = {"temperature": 1.0, "max_new_tokens": 16}  # of the contract's workload
Answer = dict[str, Any]  # a line of the log, or the part of it that the answer fills


@dataclass(frozen=True)
class Route:
    """Who serves, as set_route.py wrote it; before that, stable serves everybody."""

    run: str = ""
    leg: str = ""
    share: float = 0.0
    mirror: float = 0.0
    sample: float = 0.0

    @classmethod
    def read(cls, file: Path) -> Route:
        found = json.loads(file.read_text()) if file.exists() else {}
        return cls(**{name: found[name] for name in cls.__dataclass_fields__ if name in found})


@dataclass(frozen=True)
class Choice:
    """What becomes of a request: decided by its id and the route, and by no answer."""

    by_infer: bool  # infer answers the user
    mirrored: bool  # stable answers, and infer is asked as well
    sampled: bool  # what infer is asked is logged


def choose(key: str, request: str, route: Route) -> Choice:
    """By a keyed hash: whoever infer serves at a tenth of the traffic, it serves at a half too."""
    by_infer = place(key, request, "share") < route.share
    mirrored = not by_infer and place(key, request, "mirror") < route.mirror
    sampled = (by_infer or mirrored) and place(key, request, "sample") < route.sample
    return Choice(by_infer, mirrored, sampled)


def place(key: str, *parts: str) -> float:
    """Uniform in [0, 1), the same for the same key and parts."""
    digest = blake2b("\0".join(parts).encode(), key=key.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


class Log:
    """Requests to infer, line by line in launch order, however their answers come back."""

    def __init__(self, file: Path) -> None:
        self._open: deque[Answer] = deque()
        self.sent, self.logged = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for line in file.read_text().splitlines() if file.exists() else ():
            row = json.loads(line)  # a proxy that starts anew goes on counting
            if "pool" in row:
                continue
            leg = row["run"], row["leg"]
            self.sent[leg], self.logged[leg] = row["served"], row["index"] + 1
        self._file = file.open("a")

    def launch(self, route: Route, sampled: bool, **asked: Any) -> Answer | None:
        """Count a request, and open its line where it is sampled."""
        leg = route.run, route.leg
        self.sent[leg] += 1
        if not sampled:
            return None
        row = {"index": self.logged[leg], "run": route.run, "leg": route.leg, "at": time.time()}
        row |= {"served": self.sent[leg], **asked}
        self.logged[leg] += 1
        self._open.append(row)
        return row

    def assign(self, line: Mapping[str, Any]) -> None:
        """Write which pool serves a user; `sample_ratio` is judged by these lines."""
        self._file.write(json.dumps(line) + "\n")

    def close(self, row: Answer, answer: Answer) -> None:
        """Fill a line, and write those that no earlier request holds up."""
        row |= answer
        while self._open and self._open[0].keys() & {"token_ids", "lost"}:
            self._file.write(json.dumps(self._open.popleft()) + "\n")
        self._file.flush()

    def end(self) -> None:
        """What has no answer yet is lost: a launched request may not vanish."""
        for row in [row for row in self._open if "token_ids" not in row]:
            self.close(row, {"lost": "the proxy ended"})
        self._file.close()


@dataclass
class Proxy:
    """Asks stable, infer or both, and answers the user."""

    stable: httpx2.AsyncClient
    infer: httpx2.AsyncClient
    route: Path
    log: Log
    key: str = "a key that only the proxy knows"
    _ids: dict[str, list[int]] = field(default_factory=dict)

    async def serve(self, request: str, prompt: str, labels: Mapping[str, str]) -> Answer:
        ids = await self._tokens(prompt)
        seed = int(place(self.key, request, "seed") * 2**53)  # fresh noise for every request
        route = Route.read(self.route)
        choice = choose(self.key, request, route)
        line = {"run": route.run, "leg": route.leg, "at": time.time(), "labels": labels}
        # here every request is a user of its own; yours has the key that you split by
        line |= {"key": str(place(self.key, request, "user"))}
        line |= {"pool": "infer" if choice.by_infer else "stable"}
        if route.share:
            self.log.assign(line)
        if not (choice.by_infer or choice.mirrored):
            return await answered(self.stable, ids, seed)
        asked = {"prompt_token_ids": ids, "labels": labels, "sampling": {**SAMPLING, "seed": seed}}
        row = self.log.launch(route, choice.sampled, **asked)
        if choice.mirrored:  # whatever infer says is logged and not shown
            by_stable = answered(self.stable, ids, seed)
            return (await asyncio.gather(by_stable, self._by_infer(row, ids, seed)))[0]
        answer = await self._by_infer(row, ids, seed)
        if "lost" not in answer:
            return answer
        self.log.assign({**line, "pool": "stable", "because": "failover"})
        return await answered(self.stable, ids, seed)

    async def _by_infer(self, row: Answer | None, ids: list[int], seed: int) -> Answer:
        answer = await answered(self.infer, ids, seed)
        if row is not None:
            self.log.close(row, answer)
        return answer

    async def _tokens(self, prompt: str) -> list[int]:
        if prompt not in self._ids:
            reply = await self.stable.post("/tokenize", json={"prompt": prompt})
            self._ids[prompt] = reply.raise_for_status().json()["tokens"]
        return self._ids[prompt]


async def answered(server: httpx2.AsyncClient, ids: list[int], seed: int) -> Answer:
    """What a server answers, as the log has it; {"lost": why} where nothing came."""
    body = {"prompt": ids, "seed": seed, "max_tokens": SAMPLING["max_new_tokens"]}
    body |= {"temperature": SAMPLING["temperature"], "logprobs": BEST}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    try:
        reply = (await server.post("/v1/completions", json=body)).raise_for_status().json()
        choice = reply["choices"][0]
        return {
            "token_ids": choice["token_ids"],
            "logprobs": choice["logprobs"]["token_logprobs"],
            "best": [likeliest(step) for step in choice["logprobs"]["top_logprobs"]],
            "finish": choice["finish_reason"],
            "fingerprint": reply.get("system_fingerprint") or "",
        }
    except (httpx2.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        return {"lost": f"{type(error).__name__}: {error}"[:200]}  # ReadTimeout and others


def likeliest(step: Mapping[str, float]) -> list[list[Any]]:
    """[token id, logprob] of the likeliest; the server adds the drawn token where it is none."""
    pairs = [[int(name.removeprefix("token_id:")), logp] for name, logp in step.items()]
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:BEST]


def asked(prompts: Path, seed: str) -> Iterator[tuple[str, str, Mapping[str, str]]]:
    """(id, prompt, labels) of users' requests, in seeded random order and without an end."""
    known, drawn = list(map(json.loads, prompts.read_text().splitlines())), random.Random(seed)
    while True:
        one = drawn.choice(known)
        yield f"{drawn.getrandbits(64):016x}", one["prompt"], one.get("labels", {})


async def main() -> None:
    parser = argparse.ArgumentParser(description="Users' requests, and the proxy before them.")
    for name in ("stable", "infer", "prompts", "route", "log"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--users", type=int, default=16, help="who wait for an answer at a time")
    given = parser.parse_args()
    log = Log(Path(given.log))
    requests = asked(Path(given.prompts), f"after {log.logged.total()}")
    stable, infer = (
        httpx2.AsyncClient(base_url=u, timeout=60) for u in (given.stable, given.infer)
    )
    proxy = Proxy(stable, infer, Path(given.route), log)

    async def user() -> None:
        for request in requests:
            try:
                await proxy.serve(*request)
            except httpx2.HTTPError:  # stable is away, and there is nobody else to ask
                await asyncio.sleep(1)

    users = asyncio.gather(*(user() for _ in range(given.users)))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, users.cancel)
    try:
        await users
    except asyncio.CancelledError:
        log.end()


if __name__ == "__main__":
    asyncio.run(main())
