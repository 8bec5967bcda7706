# The routes of a leader, followed by its numbered snapshots: no request waits for the leader, and
# an expired snapshot is handled by the rules of the contract.  Of several leaders one leads: the
# one that gave the last routes is asked next, and another one if it fails.

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from email.utils import parsedate_to_datetime

import httpx2

from servanda.engines.http_policy import server_url
from servanda.engines.tls import trusted
from servanda.errors import ContractError, EvidenceError
from servanda.gateway.http.clock import SteadyClock
from servanda.gateway.routing.model import Decision, RequestFacts, snapshot_of
from servanda.gateway.routing.router import Router

_FOLLOWED = "routes are followed"
_EVERY_S, _ANSWER_S = 1.0, 5.0
_TOKENS = (
    "! the contract has slices or an envelope by request.prompt_tokens: they apply only to prompts "
    "of token ids, because no tokenizer is asked here"
)


class LeaderRoutes:
    """The latest snapshot of the leader.

    Args:
        urls: admin listeners of the leaders, of which one leads; at least one.
        key: of a holder with the role gateway.
        say: prints a line: what fails, once until it succeeds.

    Raises:
        ContractError: not an http or https URL.
    """

    def __init__(self, urls: Sequence[str], key: str, say: Callable[[str], None]) -> None:
        for url in urls:
            parts = server_url(url)
            if parts is None or "@" in parts.netloc:
                raise ContractError(
                    "--leader takes a URL of http or https, without a key",
                    hint="write http://HOST:PORT, as `servanda serve` prints for its page",
                )
        self._leaders = deque(url.rstrip("/") for url in urls)
        self._headers = {"authorization": f"Bearer {key}"}
        self._say, self._said, self._now = say, "", SteadyClock()
        self.router = Router(None)

    @property
    def ready(self) -> bool:
        """Whether a snapshot was received."""
        return self.router.snapshot is not None

    def decide(self, facts: RequestFacts) -> Decision:
        """The route of a request, by the rules of the leader's own `decide`."""
        return self.router.decide(facts, now=self._now())

    async def run(self) -> None:
        """Follow until cancelled."""
        async with httpx2.AsyncClient(
            timeout=_ANSWER_S, trust_env=False, verify=trusted(), follow_redirects=False
        ) as client:
            while True:
                self._report(await self._ask(client))
                await asyncio.sleep(_EVERY_S)

    async def _ask(self, client: httpx2.AsyncClient) -> str:
        """Ask the leaders in turn, until one has routes; returns what is wrong with each."""
        problems: list[str] = []
        for _ in range(len(self._leaders)):
            problem = await self._ask_one(client, self._leaders[0])
            if not problem:
                return ""
            problems.append(f"{self._leaders[0]} {problem}")
            self._leaders.rotate(-1)
        return "; ".join(sorted(problems))

    async def _ask_one(self, client: httpx2.AsyncClient, leader: str) -> str:
        """Ask a leader for a later snapshot; returns the problem."""
        headers, known = dict(self._headers), self.router.snapshot
        if known is not None:
            headers["if-none-match"] = f'"{known.version}"'
        asked_at = self._now()
        try:
            reply = await client.get(f"{leader}/v1/route/snapshot", headers=headers)
        except httpx2.HTTPError as error:
            return f"does not respond: {type(error).__name__}"
        if reply.status_code == 304:
            return ""
        if reply.status_code in (401, 403):
            return "refuses the key: SERVANDA_GATEWAY_KEY is that of a holder with role gateway"
        if reply.status_code == 503:
            return "does not lead now"
        try:
            snapshot = snapshot_of(reply.json())
            at = parsedate_to_datetime(reply.headers["date"]).timestamp()
        except (EvidenceError, ValueError, KeyError):
            return f"is no leader: status {reply.status_code} at /v1/route/snapshot"
        # a leader that has just lost the lead may still have older routes
        if known is not None and snapshot.version < known.version and asked_at < known.valid_until:
            return f"has older routes, number {snapshot.version} after {known.version}"
        # for the leader's duration, by our own clock, even if the two clocks differ
        left_s = snapshot.valid_until - at
        self.router = Router(replace(snapshot, valid_until=asked_at + left_s), snapshot.without)
        return ""

    def _report(self, problem: str) -> None:
        if problem and problem != self._said:
            self._say(f"! no routes, asked every second: {problem}")
        if not problem and self._said != _FOLLOWED:
            followed = self.router.snapshot.name if self.router.snapshot is not None else ""
            self._say(f"routes of {followed} are followed")
            if self.router.counts_tokens:
                self._say(_TOKENS)
        self._said = problem or _FOLLOWED
