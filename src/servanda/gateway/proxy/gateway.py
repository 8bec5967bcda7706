# The gateway: the state that all requests share, and the routing of each.
#
# It computes no statistics.  It follows a snapshot until that expires, and decides on its own only
# if a pool does not respond or returns invalid logprobs.

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any

import msgspec

from servanda.errors import MeasurementError
from servanda.gateway.http.clock import SteadyClock
from servanda.gateway.http.error_replies import ErrorReply
from servanda.gateway.http.tasks import end
from servanda.gateway.proxy.config import Config, Limits, Replicas
from servanda.gateway.proxy.counters import FAILED, Counts, Guard, Observers, add
from servanda.gateway.proxy.exchange import Exchange
from servanda.gateway.proxy.logprob_capture import WITHOUT_PROMPT, Answer, LogprobCapture
from servanda.gateway.proxy.logprob_request import (
    LENGTH,
    ROOM,
    UNMET,
    LogprobRequest,
    NoEvidence,
    logprob_request_of,
)
from servanda.gateway.proxy.pools.server_pool import ENDED, PoolServer, ReplicaChecks, ServerPool
from servanda.gateway.proxy.pools.upstreams import Breaker, Server, UpstreamError
from servanda.gateway.proxy.request import CompletionRequest, RoutedRequest
from servanda.gateway.proxy.request_log import LaunchLog, OpenRow, RequestLog
from servanda.gateway.proxy.server_kinds import KINDS
from servanda.gateway.routing.model import Pool, RequestFacts, Snapshot
from servanda.gateway.routing.router import Router, Sessions, pseudonym
from servanda.traces.request_log import FAILOVER, OTHER_PROMPT

_MEET_S = 5.0  # between two requests for infer's description
_ODD_IN_A_ROW = 3  # invalid sampled responses that open infer's circuit breaker
_ODD_REST_S, _ODD_WINDOW_S = 30.0, 600.0  # long, because few requests are sampled
_USERS = 200_000  # of a step that are remembered, and have a line
_PART = 2_000  # most lines of a message to the leader
_SENT = (
    "run",
    "leg",
    "at",
    "key",
    "pool",
    "because",
    "apart",
)  # to the leader: nothing of a request
_REMEMBERED = 8192
_MOST = 64 << 20  # bytes of a response


class Gateway:
    """One gateway process.

    Args:
        now: returns unix seconds without jumps; clock: monotonic seconds.
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
        self.observers = Observers(self.counts)
        self.router = Router(None, config.without)
        self.pools: dict[str, ServerPool] = {
            name: ServerPool(name, upstream, config.replicas.get(name, ()), clock)
            for name, upstream in config.pools.items()
        }
        self.answer_breaker = Breaker(clock, _ODD_IN_A_ROW, _ODD_REST_S, None, _ODD_WINDOW_S)
        limits = config.limits
        self.sessions = Sessions(limits.sessions, limits.session_s, clock)
        self.tokens = PromptTokens(limits, self.counter)
        log = RequestLog(config.log) if config.log is not None else None
        self.log = log
        self.launches = LaunchLog(limits, self.counts, log, clock=clock, now=self.now)
        self.assignments = AssignmentLog(log, now=self.now)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._checks: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._prefix, self._last = secrets.token_hex(6), 0

    @property
    def snapshot(self) -> Snapshot | None:
        return self.router.snapshot

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        for pool in self.pools.values():
            await pool.open()
            if pool.checked:
                self._check(pool, pool.servers)

    def _check(self, pool: ServerPool, servers: Sequence[PoolServer]) -> None:
        """Check servers from now on."""
        checks = ReplicaChecks(pool, self.config.limits)
        for server in servers:
            task = asyncio.get_running_loop().create_task(checks.run(server))
            self._checks.add(task)
            task.add_done_callback(self._checks.discard)

    def follow_replicas(self, replicas: Replicas) -> None:
        """Use other servers for the pools that have replicas; from any thread."""

        async def follow() -> None:
            for name, servers in replicas.items():
                pool = self.pools[name]
                if not pool.checked and len(servers) == 1:
                    continue  # a URL alone is that of the start
                self._check(pool, await pool.follow(servers))

        if self._loop is not None and not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(follow(), self._loop)

    async def wait_for_infer(self) -> None:
        """Request infer's description until it responds: it may still be loading its model.

        Replicas are checked instead.
        """
        if self.pools["infer"].checked:
            return
        (infer,) = self.pools["infer"].servers
        while infer.about.probe is not None:
            await asyncio.sleep(_MEET_S)
            with contextlib.suppress(MeasurementError):
                infer.about = await asyncio.to_thread(infer.about.probe)

    async def settle(self) -> None:
        """End background work; rows without a response count as lost."""
        while tasks := self._tasks | self._checks:  # ending tasks may request the ids of a prompt
            await end(tasks)
        with self.observers.log:
            self.launches.end()

    async def close(self) -> None:
        with self.observers.log:
            if self.log is not None:
                self.log.close()
        for pool in self.pools.values():
            await pool.close()

    def take(self, snapshot: Snapshot) -> bool:
        """Use a snapshot; False if a later one is in use."""
        if self.snapshot is not None and snapshot.version <= self.snapshot.version:
            return False
        self.router = Router(snapshot, self.config.without)
        return True

    def run_in_background(self, guard: Guard, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that no client waits for."""

        async def guarded() -> None:
            with guard:
                await work

        task = asyncio.get_running_loop().create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def route(
        self, request: CompletionRequest, exchange: Exchange, path: str
    ) -> RoutedRequest:
        """Route a request by the facts known before its dispatch."""
        router, holder, session = self.router, exchange.holder, exchange.head.session
        self._last += 1
        # a unique id; the client's own could repeat
        name = f"{self._prefix}-{self._last:x}"
        if router.counts_tokens:
            exchange.pause()
            tokens = await self.tokens.count(request)
            exchange.resume()
        else:
            tokens = request.known_tokens
        sources = router.snapshot.labels if router.snapshot is not None else self.config.labels
        # session names are per client: no session is shared between keys
        if session:
            sticky = f"session {holder} {session}"
        elif request.user:
            sticky = f"user {holder} {request.user}"
        else:
            words = request.conversation()
            sticky = f"chat {holder} {words}" if words else f"key {holder}" if holder else name
        facts = RequestFacts(
            request=name,
            sticky=sticky,
            labels=request.labels(sources, holder, path) if sources else {},
            prompt_tokens=tokens,
            session=self.sessions.pool(sticky) if session else None,
        )
        decision = self.router.decide(facts, now=self.now())
        user = ""
        with self.observers.counters:
            self.counts.decided(decision)
            if decision.sampled:  # a keyed hash, because evidence must come from several users
                user = exchange.head.session or request.user or exchange.address
                who = f"key {exchange.holder}" if exchange.holder else f"user {user}"
                salt = bytes.fromhex(self.snapshot.salt) if self.snapshot is not None else b""
                user = pseudonym(salt, who)
        return RoutedRequest(request, path, facts, decision, user, exchange.client)

    def enter(self, name: Pool, client: str, session: str = "") -> PoolServer:
        """The server of a request: one of the decided pool, or of stable if infer has none.

        Args:
            client: identity of the client; session: its explicit session, "" without one.

        Raises:
            ErrorReply: no pool is available.
        """
        pool = self.pools.get(name)
        if pool is None:
            raise ErrorReply(
                503,
                f"the route sends this request to {name}, and this gateway has no such pool; "
                "name one, or let infer serve without",
                "no_pool",
                retry_s=5,
            )
        if self.has_fallback(name) and not self.answer_breaker.enter(client):
            return self.enter("stable", client, session)
        server = pool.enter(client, session)
        if server is not None:
            return server
        if self.has_fallback(name):
            return self.enter("stable", client, session)
        raise ErrorReply(503, f"{name} does not answer; try again", "pool_down", pool.wait_s)

    def has_fallback(self, pool: str) -> bool:
        """Whether another pool can be tried if this one fails."""
        return pool == "infer" and "stable" in self.pools

    def record_failure(self, server: PoolServer, why: str, client: str) -> None:
        """Record a failure of a server; of the last one only refused connections count.

        Args:
            why: reason as in `UpstreamError`, or "5xx"; client: its identity.
        """
        pool = self.pools[server.name]
        if why == "connect":
            server.breaker.unreachable()
        elif self.has_fallback(server.name) or len(pool.servers) > 1:
            server.breaker.failed(client)
        else:
            server.breaker.abandoned()
        if why in ENDED:
            pool.suspect(server, why)

    def count_reply(self, server: PoolServer, status: str) -> None:
        """Count a reply of a server, or an attempt without one."""
        with self.observers.counters:
            self.counts.answered(server.name, status)
            if self.pools[server.name].checked:
                add(self.counts.replicas, f"{server.name}\t{server.url}\t{status}")

    def counter(self) -> Server | None:
        """The server to ask for tokens: an available one, of stable first."""
        pools = [self.pools[name] for name in ("stable", "infer") if name in self.pools]
        return next((server for pool in pools if (server := pool.one())), None)

    def resolve(
        self, row: OpenRow, routed: RoutedRequest, capture: LogprobCapture | None, lost: str
    ) -> None:
        """Close a row once its prompt is known and matches the response.

        Args:
            capture: the reply; None: no reply, with the reason in `lost`.
        """
        answer, prompt, tokens = {"lost": lost if capture is None else FAILED}, None, None
        if capture is not None:
            with self.observers.capture:
                prompt, tokens, odd = capture.prompt, capture.prompt_tokens, capture.odd
                if odd:
                    add(self.counts.reflexes, odd)
                    self.answer_breaker.failed(routed.client)
                else:
                    self.answer_breaker.succeeded(routed.client)
                answer = capture.answer()
        if prompt is not None and "lost" in answer:
            self.launches.resolve(row, answer, prompt)
            return
        work = self._resolve(row, routed.request, answer, prompt, tokens)
        self.run_in_background(self.observers.log, work)

    async def _resolve(
        self,
        row: OpenRow,
        request: CompletionRequest,
        answer: Answer,
        prompt: list[int] | None,
        tokens: int | None,
    ) -> None:
        try:
            if prompt is None and "lost" in answer:
                prompt = await self.tokens.ids(request)
                return
            if prompt is None:
                infer = self.pools["infer"]
                prompt = await self.tokens.ids(request, infer.one() or infer.servers[0])
                if prompt is None:
                    answer = {"lost": WITHOUT_PROMPT}
                    return
            own = await self._prompt(request)
            if tokens not in (None, len(prompt)):
                own = own or prompt  # its length differs from infer's count
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

    async def _prompt(self, request: CompletionRequest) -> list[int] | None:
        """The prompt tokens of a request according to stable; None if unknown."""
        stable = self.pools["stable"].one() if "stable" in self.pools else None
        if request.known_tokens is None and stable is None:
            return None
        return await self.tokens.ids(request, stable) if request.alone else None

    def logprob_request(
        self, request: CompletionRequest, infer: PoolServer, *, mirrored: bool = False
    ) -> LogprobRequest | None:
        """The request for infer with logprobs, if sampled; None if it is no evidence.

        Decided before the response is known, and independent of it.
        """
        try:
            if self.pools["infer"].checked and not infer.met:
                raise NoEvidence(UNMET)
            if len(request.body) > self.config.limits.read_bytes:
                raise NoEvidence(LENGTH)
            if not self.launches.room:
                raise NoEvidence(ROOM)
            return logprob_request_of(request, infer.about, infer.best, mirrored=mirrored)
        except NoEvidence as no:
            add(self.counts.unsampled, no.why)
            return None

    def report(self) -> dict[str, Any]:
        """The counts for the controller."""
        self.counts.pools = {
            name: "closed" if pool.state == "closed" else "open"
            for name, pool in self.pools.items()
        }
        self.counts.servers = {name: pool.report() for name, pool in self.pools.items()}
        self.counts.slice_in_flight = self.launches.in_flight.means()
        if self.config.keys is not None:
            self.counts.refused_keys = {"gateway": self.config.keys.refused}
        self.counts.log = self.log.problem if self.log is not None else ""
        return self.counts.report()


# The assignments of a promotion's step: a line for the first request of each user, for the log and
# for the leader.
#
# The users that were seen are kept in memory, so a gateway that starts anew writes them once more:
# the first line of a user counts, and a repeated one adds no evidence.


class AssignmentLog:
    """Writes who was served by which pool.

    Args:
        log: None: nothing is written.
        leads: whether a leader takes the lines.
        now: unix seconds.
    """

    def __init__(
        self, log: RequestLog | None, *, leads: bool = False, now: Callable[[], float]
    ) -> None:
        self._log, self.leads, self._now = log, leads, now
        self._leg: tuple[str, str] = ("", "")
        self._seen: set[str] = set()
        self._waiting: deque[dict[str, Any]] = deque()

    def assign(
        self, routed: RoutedRequest, snapshot: Snapshot | None, pool: Pool, because: str
    ) -> dict[str, Any] | None:
        """Write the pool of a request when it is dispatched; returns its line, if it has one.

        Args:
            because: why `pool` is not the decided one; "" if it is.
        """
        if not (self._log is not None or self.leads) or snapshot is None or not snapshot.leg:
            return None
        leg = (snapshot.run, snapshot.leg)
        if leg != self._leg:
            self._leg, self._seen = leg, set()
            self._waiting.clear()
        key = pseudonym(bytes.fromhex(snapshot.salt), f"split {routed.facts.sticky}")
        if key in self._seen or len(self._seen) >= _USERS:
            return None
        self._seen.add(key)
        facts, apart = routed.facts, routed.decision.apart
        line: dict[str, Any] = {
            "run": leg[0],
            "leg": leg[1],
            "at": self._now(),
            "key": key,
            "pool": pool,
            "labels": facts.labels,
            **({"prompt_tokens": facts.prompt_tokens} if facts.prompt_tokens is not None else {}),
            **({"because": because} if because else {}),
            **({"apart": apart} if apart else {}),
        }
        self._write(line)
        return line

    def failed_over(self, line: dict[str, Any] | None) -> None:
        """Correct a line: infer gave no reply, and stable is asked."""
        if line is not None:
            self._write({**line, "pool": "stable", "because": FAILOVER})

    def _write(self, line: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.assign(line)
        if self.leads and (line["run"], line["leg"]) == self._leg:
            self._waiting.append({name: line[name] for name in _SENT if name in line})

    def waiting(self) -> list[dict[str, Any]]:
        """The next lines for the leader, oldest first."""
        return [*islice(self._waiting, _PART)]

    def taken(self, lines: list[dict[str, Any]]) -> None:
        """Forget lines that the leader has."""
        while lines and self._waiting and self._waiting[0] is lines[0]:
            self._waiting.popleft()
            lines = lines[1:]


# Token counts and ids of prompts, from a pool that has the tokenizer.  The prompt tokens that infer
# reports are compared with stable's for the same request.


class _Tokens(msgspec.Struct):
    count: int | None = None
    tokens: list[int] | None = None


class _Text(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw(b"")


_read = msgspec.json.Decoder(_Tokens).decode
_rendered = msgspec.json.Decoder(_Text).decode


class PromptTokens:
    """Requests the tokens of prompts, with a cache; stores no text.

    Args:
        server: the pool to ask; None if none is available.
    """

    def __init__(self, limits: Limits, server: Callable[[], Server | None]) -> None:
        self._limits, self._server = limits, server
        self._known: OrderedDict[bytes, int] = OrderedDict()

    async def count(self, request: CompletionRequest) -> int | None:
        """Token count of a prompt; None on a timeout."""
        if request.known_tokens is not None:
            return request.known_tokens
        if not request.prompt or len(request.body) > self._limits.read_bytes:
            return None
        body = msgspec.json.encode(request.about)
        digest = blake2b(body, digest_size=16).digest()
        known = self._known.get(digest)
        if known is not None:
            self._known.move_to_end(digest)
            return known
        answer = await self._ask(request)
        if answer is None:
            return None
        count = len(answer.tokens or ()) if answer.count is None else answer.count
        if not count:
            return None
        self._known[digest] = count
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return count

    async def ids(
        self, request: CompletionRequest, server: Server | None = None
    ) -> list[int] | None:
        """Token ids of a prompt; None on a timeout.

        Args:
            server: the pool to ask; None: stable, or infer while stable is down.
        """
        if request.known_tokens is not None:
            try:
                return msgspec.json.decode(request.prompt, type=list[int])
            except msgspec.DecodeError:
                return None
        answer = await self._ask(request, server)
        return answer.tokens or None if answer is not None else None

    async def _ask(
        self, request: CompletionRequest, server: Server | None = None
    ) -> _Tokens | None:
        server = server or self._server()
        if server is None:
            return None
        template = KINDS[server.about.dialect].template
        body = msgspec.json.encode(request.about)
        try:
            if template:
                text = request.prompt
                if request.chat:
                    text = bytes(_rendered(await self._post(server, template, body)).prompt)
                if not text.startswith(b'"'):
                    return None
                # tokenized like the text of a request
                body = b'{"add_special":true,"parse_special":true,"content":' + text + b"}"
            return _read(await self._post(server, "/tokenize", body))
        except (UpstreamError, msgspec.DecodeError):
            return None

    async def _post(self, server: Server, path: str, body: bytes) -> bytes:
        status, text = await server.ask(path, body, self._limits.count_s, _MOST)
        if status != 200:
            raise UpstreamError("broken")
        return text
