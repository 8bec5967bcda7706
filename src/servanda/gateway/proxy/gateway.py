# The gateway: what all requests share, and what one of them is decided by.
#
# It does no statistics.  It follows a snapshot until that expires, and acts by itself only
# where a pool does not answer, or answers with what is no number.

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

from servanda.errors import MeasurementError
from servanda.gateway.http.clock import SteadyClock
from servanda.gateway.http.error_replies import Refused
from servanda.gateway.proxy.breaker import Breaker
from servanda.gateway.proxy.config import Config
from servanda.gateway.proxy.counters import Counts, add
from servanda.gateway.proxy.launch_log import Launches, Row
from servanda.gateway.proxy.logprob_capture import WITHOUT_PROMPT, Answer
from servanda.gateway.proxy.logprob_request import LENGTH, ROOM, NoEvidence, Wish, wish_of
from servanda.gateway.proxy.prompt_tokens import Tokens
from servanda.gateway.proxy.request import Asked
from servanda.gateway.proxy.request_log import Log
from servanda.gateway.proxy.sessions import Sessions
from servanda.gateway.proxy.upstreams import Server, servers
from servanda.gateway.routing.hash_split import pseudonym
from servanda.gateway.routing.model import Decision, Known, Pool, Snapshot
from servanda.gateway.routing.router import Router
from servanda.traces.request_log import OTHER_PROMPT

_MEET_S = 5.0  # between two questions what infer is
_ODD_IN_A_ROW = 3  # sampled answers without sense, after which infer rests
_ODD_REST_S, _ODD_WINDOW_S = 30.0, 600.0  # few requests are sampled


class Gateway:
    """One gateway of one process.

    Args:
        now: unix seconds, which go on evenly; clock: steady ones.
    """

    def __init__(
        self,
        config: Config,
        *,
        now: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.now, self.clock = config, now or SteadyClock(), clock
        self.started = self.now()
        self.counts = Counts()
        self.router = Router(None, config.without)
        self.servers: dict[str, Server] = servers(config.pools, clock)
        self.senses = Breaker(clock, _ODD_IN_A_ROW, _ODD_REST_S, None, _ODD_WINDOW_S)
        limits = config.limits
        self.sessions = Sessions(limits.sessions, limits.session_s, clock)
        self.tokens = Tokens(limits, self.counter)
        log = Log(config.log) if config.log is not None else None
        self.log = log
        self.launches = Launches(config.name, limits, self.counts, log, clock=clock, now=self.now)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._prefix, self._last = secrets.token_hex(6), 0

    @property
    def snapshot(self) -> Snapshot | None:
        return self.router.snapshot

    async def open(self) -> None:
        for server in self.servers.values():
            await server.open()

    async def meet(self) -> None:
        """Ask infer what it is until it says so: a server that loads its model is busy."""
        infer = self.servers["infer"]
        while infer.about.met is not None:
            await asyncio.sleep(_MEET_S)
            with contextlib.suppress(MeasurementError):
                infer.about = await asyncio.to_thread(infer.about.met)

    async def settle(self) -> None:
        """End what is under way for nobody; rows without an answer are lost."""
        while self._tasks:  # what ends may ask for its prompt's ids
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self.launches.end()

    async def close(self) -> None:
        if self.log is not None:
            self.log.close()
        for server in self.servers.values():
            await server.close()

    def take(self, snapshot: Snapshot) -> bool:
        """Follow a snapshot; False where a later one is followed already."""
        if self.snapshot is not None and snapshot.version <= self.snapshot.version:
            return False
        self.router = Router(snapshot, self.config.without)
        return True

    def beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that no client waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def busy(self) -> bool:
        """Whether anything is being done that no client waits for."""
        return bool(self._tasks)

    def number(self) -> str:
        """An id that no request had before; it is not the client's, who could send one twice."""
        self._last += 1
        return f"{self._prefix}-{self._last:x}"

    async def known(
        self, asked: Asked, request: str, holder: str, session: str, route: str
    ) -> Known:
        """What is known of a request before it is sent anywhere.

        Args:
            holder: whose key it came with; "" where users need none.
            session: what the client calls its session; "" where it names none.
        """
        router = self.router
        tokens = await self.tokens.count(asked) if router.counts_tokens else asked.known_tokens
        sources = router.snapshot.labels if router.snapshot is not None else self.config.labels
        # what a client names is its own: nobody shares a session with another's key
        if session:
            sticky = f"session {holder} {session}"
        elif asked.user:
            sticky = f"user {holder} {asked.user}"
        else:
            words = asked.conversation()
            sticky = f"chat {holder} {words}" if words else f"key {holder}" if holder else request
        return Known(
            request=request,
            sticky=sticky,
            labels=asked.labels(sources, holder, route) if sources else {},
            prompt_tokens=tokens,
            session=self.sessions.pool(sticky) if session else None,
        )

    def whose(self, asked: Asked, holder: str, session: str, address: str) -> str:
        """A keyed hash of who asked: evidence of one user is not that of many."""
        who = f"key {holder}" if holder else f"user {session or asked.user or address}"
        snapshot = self.snapshot
        salt = bytes.fromhex(snapshot.salt) if snapshot is not None else b""
        return pseudonym(salt, who)

    def enter(self, pool: Pool, client: str) -> Pool:
        """The pool that answers: the one that was decided, or stable where infer is broken.

        Args:
            client: who asks.

        Raises:
            Refused: there is none.
        """
        server = self.servers.get(pool)
        if server is None:
            raise Refused(
                503,
                f"the route sends this request to {pool}, and this gateway has no such pool; "
                "name one, or let infer serve without",
                "no_pool",
                retry_s=5,
            )
        if self.has_another(pool):
            if not (self.senses.enter(client) and server.breaker.enter(client)):
                return self.enter("stable", client)
            return pool
        if server.breaker.enter(client):
            return pool
        raise Refused(503, f"{pool} does not answer; try again", "pool_down", server.breaker.wait_s)

    def has_another(self, pool: str) -> bool:
        """Whether another pool is asked where this one gives no answer."""
        return pool == "infer" and "stable" in self.servers

    def blame(self, server: Server, why: str, client: str) -> None:
        """Count a failure against a pool: where it is the last one, no more than its connections.

        Args:
            why: as `Failed` has it, or "5xx"; client: whose request failed.
        """
        if why == "connect":
            server.breaker.unreachable()
        elif self.has_another(server.name):
            server.breaker.failed(client)
        else:
            server.breaker.left()

    def counter(self) -> Server | None:
        """Whom to ask for tokens: a pool that is well, stable first."""
        for name in ("stable", "infer"):
            server = self.servers.get(name)
            if server is not None and server.breaker.state == "closed":
                return server
        return None

    def sensed(self, odd: str, client: str) -> None:
        """What a sampled answer of infer looked like; "" for an answer that has sense."""
        if odd:
            add(self.counts.reflexes, odd)
            self.senses.failed(client)
        else:
            self.senses.well(client)

    def resolve(
        self,
        row: Row,
        asked: Asked,
        answer: Answer,
        prompt: list[int] | None = None,
        tokens: int | None = None,
    ) -> None:
        """Close a row, once it is known which prompt was asked, and that it is the one answered.

        Args:
            prompt: as infer says that it ran it; None where it did not.
            tokens: that it says the prompt had; None where it did not.
        """
        if prompt is not None and "lost" in answer:
            self.launches.resolve(row, answer, prompt)
        else:
            self.beside(self._resolve(row, asked, answer, prompt, tokens))

    async def _resolve(
        self,
        row: Row,
        asked: Asked,
        answer: Answer,
        prompt: list[int] | None,
        tokens: int | None,
    ) -> None:
        try:
            if prompt is None and "lost" in answer:
                prompt = await self.tokens.ids(asked)
                return
            if prompt is None:
                prompt = await self.tokens.ids(asked, self.servers["infer"])
                if prompt is None:
                    answer = {"lost": WITHOUT_PROMPT}
                    return
            own = await self._prompt(asked)
            if tokens not in (None, len(prompt)):
                own = own or prompt  # of another length than infer ran
                prompt = None
            if own is None:
                add(self.counts.prompts, "unknown")
            elif own == prompt:
                add(self.counts.prompts, "equal")
            else:
                add(self.counts.prompts, "other")
                answer, prompt = {"lost": OTHER_PROMPT}, own
        finally:
            self.launches.resolve(row, answer, prompt)

    async def _prompt(self, asked: Asked) -> list[int] | None:
        """The prompt of a request as stable reads it; None where it does not say."""
        stable = self.servers.get("stable")
        if asked.known_tokens is None and (stable is None or stable.breaker.state != "closed"):
            return None
        return await self.tokens.ids(asked, stable) if asked.alone else None

    def wish(self, asked: Asked, *, mirrored: bool = False) -> Wish | None:
        """How infer is asked what was drawn for the sample; None where it is no evidence.

        Decided before anything of the answer is known, and whatever that will be.
        """
        infer = self.servers["infer"]
        try:
            if len(asked.body) > self.config.limits.read_bytes:
                raise NoEvidence(LENGTH)
            if not self.launches.room:
                raise NoEvidence(ROOM)
            return wish_of(asked, infer.about, infer.best, mirrored=mirrored)
        except NoEvidence as no:
            add(self.counts.unsampled, no.why)
            return None

    def launch(self, decision: Decision, known: Known, key: str, wish: Wish | None) -> Row | None:
        sampling, best = (wish.sampling, wish.best) if wish is not None else (None, 0)
        return self.launches.launch(decision, self.snapshot, sampling, known.labels, key, best)

    def report(self) -> dict[str, Any]:
        """The counts, as the leader is told."""
        self.counts.pools = {
            name: "closed" if server.breaker.state == "closed" else "open"
            for name, server in self.servers.items()
        }
        self.counts.slice_in_flight = self.launches.present()
        self.counts.log = self.log.problem if self.log is not None else ""
        return self.counts.report()
