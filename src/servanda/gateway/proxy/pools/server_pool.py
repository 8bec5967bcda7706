# A pool: the servers that run one kernel, and which of them a request is sent to.
#
# A pool that declares replicas checks them.  One that does not respond, or that runs another kernel
# than the pool, gets no requests until a check finds it right again: evidence is about the pool, so
# identity comes before any comparison.
#
# Replicas take turns by weight, and the requests of a session stay on one of them, whose prefix
# cache has the session.  Neither depends on responses or on load: a replica that fails fast would
# otherwise attract requests, and the choice would depend on the responses that are evidence.

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import msgspec

from servanda.errors import MeasurementError
from servanda.gateway.proxy.config import Limits, Replica, Upstream
from servanda.gateway.proxy.pools.upstreams import Server, State, UpstreamError, read_body
from servanda.gateway.routing.model import Pool

_ROUNDING = 1e-9


class WeightedTurns:
    """Weighted round-robin: each replica gets its share within less than one request.

    While the weights stay the same, after any number of requests each replica has had its share of
    them, to within 1 - 1 / (2 n - 2) requests for n replicas; so over any window, to within less
    than 2.  Smooth weighted round-robin has no such bound: its deviation exceeds 1.

    Source:
        R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32, 1980.

    >>> turns = WeightedTurns()
    >>> [turns.take({"a": 3.0, "b": 1.0}) for _ in range(8)]
    ['a', 'a', 'b', 'a', 'a', 'a', 'b', 'a']
    """

    def __init__(self) -> None:
        self._weights: Mapping[str, float] = {}
        self._due: dict[str, float] = {}  # requests that a replica is short of its share

    def take(self, weights: Mapping[str, float]) -> str:
        """The replica whose turn it is.

        Args:
            weights: replica -> weight > 0, of those that may be chosen; not empty.
        """
        if weights != self._weights:
            self._weights = dict(weights)
            kept = [self._due.get(name, 0.0) for name in weights]
            excess = math.fsum(kept) / len(kept)  # what is due to all of them adds up to 0
            self._due = {n: due - excess for n, due in zip(weights, kept, strict=True)}
        total = math.fsum(weights.values())
        due = {name: self._due[name] + weight / total for name, weight in weights.items()}
        spare = 1 / (2 * len(weights) - 2) if len(weights) > 1 else 0.0

        def turns_left(name: str) -> tuple[float, float]:
            """Turns after which the replica would be short of its share by the bound."""
            left = (1 - spare - due[name]) * total / weights[name]
            return math.ceil(left - _ROUNDING), -due[name]

        candidates = [name for name in due if due[name] >= spare - _ROUNDING]
        chosen = min(candidates or due, key=turns_left)
        due[chosen] -= 1
        self._due = due
        return chosen


def by_session(session: str, weights: Mapping[str, float]) -> list[str]:
    """The replicas in the order in which a session prefers them: weighted rendezvous hashing.

    Each replica is the first of its share of all sessions.  A replica that joins or leaves moves
    only the sessions that it gets or had.  All gateways have the same order.

    Source:
        J. Schindelhauer and G. Schomaker, Weighted distributed hash tables, SPAA 2005.

    >>> by_session("s", {"a": 1.0, "b": 1.0}) == by_session("s", {"b": 1.0, "a": 1.0})
    True
    """

    def distance(name: str) -> float:
        digest = blake2b(f"{len(name)} {name} {session}".encode(), digest_size=8).digest()
        uniform = (int.from_bytes(digest, "big") + 0.5) / 2**64
        return -math.log(uniform) / weights[name]

    return sorted(weights, key=lambda name: (distance(name), name))


ENDED = ("connect", "broken")  # failures of a request after which its server may have ended
UNCHECKED = "it has not been checked yet"
# parts of a description that all replicas share, and their names in messages
_SAME = {
    "served": "model",
    "dialect": "kind of server",
    "defaults": "sampling defaults",
    "context": "context length",
    "limit": "default limit of new tokens",
    "mute": "requests without token ids",
    "masks": "grammars for tools",
}
_LONGEST = 60  # characters of a value in a message
_MOST = 4 << 20  # bytes of a list of models
_JITTER = 0.2  # of the time between two checks, so that gateways do not check at the same time
_FAILURES = 2  # in a row after which a replica is down
_LEAST = 0.1  # of that time between two checks, even if requests fail
_MODEL_FIELDS = (
    "id",
    "root",
    "parent",
    "max_model_len",
    "meta",
)  # the others change with every request
_WHY = {
    "connect": "it refuses connections",
    "timeout": "it does not respond in time",
    "broken": "it breaks off its replies",
}


class PoolServer(Server):
    """A server of a pool.

    Attributes:
        pool: name of its pool.
        met: whether its last check found the pool's kernel; problem: the reason if not; slow:
            whether that is only that it does not respond in time.
        models: the list of models at its last description, None if it has to be described again.
        due: set to check it now.
    """

    def __init__(self, name: Pool, replica: Replica, clock: Callable[[], float]) -> None:
        super().__init__(name, replica.upstream, clock)
        self.pool: Pool = name
        self.weight, self.describe = replica.weight, replica.describe
        self.met, self.slow, self.problem = False, False, UNCHECKED
        self.models: Any = None
        self.due = asyncio.Event()

    @property
    def url(self) -> str:
        return self.about.base


class ServerPool:
    """The servers of a pool.

    Args:
        about: description of the pool's kernel, as far as known.
        replicas: empty: one server, that of `about`, which is not checked.
        clock: monotonic seconds.

    Attributes:
        checked: whether its servers are checked.
        servers: those in the contract; retired: removed ones that still have requests in flight.
        identity: description that every server must match; None until one was described.
    """

    def __init__(
        self,
        name: Pool,
        about: Upstream,
        replicas: Sequence[Replica],
        clock: Callable[[], float],
    ) -> None:
        self.name: Pool = name
        self.checked, self._clock = bool(replicas), clock
        self._turns = WeightedTurns()
        self.retired: list[PoolServer] = []
        self.identity = about if about.probe is None else None
        given = replicas or (Replica(about, 1.0, about.probe or (lambda: about)),)
        self.servers = [PoolServer(name, replica, clock) for replica in given]
        for server in self.servers:
            if self.checked and server.about.probe is None:
                self.identify(server, server.about)

    @property
    def usable(self) -> list[PoolServer]:
        """The servers that run the pool's kernel; all, as long as that is not known.

        If there is no other, those that are only slow: a pool that is overloaded is not down.
        """
        if not self.checked or self.identity is None:
            return self.servers
        met = [server for server in self.servers if server.met]
        return met or [server for server in self.servers if server.slow]

    @property
    def state(self) -> State:
        """The best state of a circuit breaker of a usable server."""
        states = {server.breaker.state for server in self.usable}
        if "closed" in states:
            return "closed"
        return "half-open" if "half-open" in states else "open"

    @property
    def wait_s(self) -> int:
        """Whole seconds until a server may be tried again."""
        return min((server.breaker.wait_s for server in self.usable), default=1)

    def enter(
        self, client: str, session: str = "", besides: Collection[Server] = ()
    ) -> PoolServer | None:
        """The server for a request; None if there is none.

        Args:
            client: identity of the client; session: its explicit session, "" without one.
            besides: servers that were tried already.
        """
        left = {server.url: server for server in self.usable if server not in besides}
        if len(left) > 1:  # a single one is asked all the same, for the record of its clients
            left = {url: s for url, s in left.items() if s.breaker.state != "open"}
        while left:
            weights = {url: server.weight for url, server in left.items()}
            url = by_session(session, weights)[0] if session else self._turns.take(weights)
            server = left.pop(url)
            if server.breaker.enter(client):
                return server
        return None

    def has_another(self, besides: Collection[Server]) -> bool:
        """Whether there is a server that was not tried yet, and might be."""
        left = [server for server in self.usable if server not in besides]
        return any(server.breaker.state != "open" for server in left)

    def one(self) -> PoolServer | None:
        """Any server whose circuit breaker is closed, for the gateway's own requests."""
        closed = [server for server in self.usable if server.breaker.state == "closed"]
        return random.choice(closed) if closed else None

    def identify(self, server: PoolServer, found: Upstream) -> None:
        """Compare the description of a server with the pool's, or make it the pool's."""
        self.identity = self.identity or found
        server.problem = difference(self.identity, found)
        server.met, server.slow, server.about = not server.problem, False, found

    def lost(self, server: PoolServer, why: str, *, slow: bool = False) -> None:
        """Take a server out of use until a check finds it right again."""
        server.slow = slow and (server.met or server.slow)
        server.met, server.problem, server.models = False, why, None

    def suspect(self, server: PoolServer, why: str) -> None:
        """Check a server now, because of a failed request.

        A server that refuses connections has ended, and gets no requests meanwhile; any other
        failure may be the fault of the request.
        """
        if self.checked:
            server.models = None  # it may have restarted with another kernel
            if why == "connect":
                self.lost(server, "it refuses connections")
            server.due.set()

    async def open(self) -> None:
        for server in self.servers:
            await server.open()

    async def close(self) -> None:
        for server in (*self.servers, *self.retired):
            await server.close()

    async def follow(self, replicas: Iterable[Replica]) -> list[PoolServer]:
        """Use other servers from now on; returns those that are new.

        Requests in flight at a removed one are completed.  A pool none of whose servers runs its
        kernel takes the kernel of the first one that is described then.
        """
        known = {server.url: server for server in self.servers}
        if not self.checked:
            self.checked = True
            for server in self.servers:
                if server.about.probe is None:
                    self.identify(server, server.about)
        servers: list[PoolServer] = []
        new: list[PoolServer] = []
        for replica in replicas:
            server = known.pop(replica.upstream.base, None)
            if server is None:
                server = PoolServer(self.name, replica, self._clock)
                await server.open()
                new.append(server)
            server.weight = replica.weight
            servers.append(server)
        self.servers, self.retired = servers, [*self.retired, *known.values()]
        if not any(server.met for server in servers):
            self.identity = None
        for server in (*servers, *known.values()):
            server.due.set()
        return new

    async def sweep(self) -> None:
        """Close removed servers without requests in flight."""
        ended = [server for server in self.retired if not server.in_flight]
        self.retired = [server for server in self.retired if server.in_flight]
        for server in ended:
            await server.close()

    def report(self) -> dict[str, dict[str, Any]]:
        """url -> its state, for the controller; empty if the pool declares no replicas."""
        if not self.checked:
            return {}
        usable = self.usable
        return {
            server.url: {
                "up": server in usable and server.breaker.state != "open",
                "why": problem_of(server),
                "weight": server.weight,
                "in_flight": server.in_flight,
            }
            for server in self.servers
        }


def problem_of(server: PoolServer) -> str:
    """Why a server of a checked pool is not used, "" if it is."""
    if server.problem:
        return server.problem
    return "its circuit breaker is open after failures" if server.breaker.state == "open" else ""


@contextmanager
def in_flight(server: Server) -> Iterator[None]:
    """Count a request at a server, so that it is not closed meanwhile."""
    server.in_flight += 1
    try:
        yield
    finally:
        server.in_flight -= 1


def difference(pool: Upstream, found: Upstream) -> str:
    """Why a server does not run the kernel of its pool; "" if it does, as far as they report.

    >>> difference(Upstream("http://a", served="m"), Upstream("http://b", served="n"))
    "another kernel: model 'n', not 'm'"
    """
    for name, noun in _SAME.items():
        was, now = getattr(pool, name), getattr(found, name)
        if was != now:
            return _other(noun, was, now)
    for name in sorted({*pool.build, *found.build}):
        was, now = pool.build.get(name), found.build.get(name)
        if was != now:
            return _other(name, was, now)
    return ""


def _other(noun: str, was: Any, now: Any) -> str:
    def text(value: Any) -> str:
        if isinstance(value, frozenset):
            value = sorted(map(str, value))  # pyright: ignore[reportUnknownArgumentType]
        elif value is not None and not isinstance(value, str | int | float):
            value = dict(value)
        return repr(value)[:_LONGEST] if value is not None else "unknown"

    return f"another kernel: {noun} {text(now)}, not {text(was)}"


# Checks of replicas: whether they respond, and whether they run the kernel of their pool.
#
# A check requests /v1/models, which every kind of server has and which costs it nothing.  The
# complete description, for which some servers run a few tokens, is requested at first, after a
# failure, and when the models have changed.


class ReplicaChecks:
    """The checks of a pool; runs in the event loop of the gateway.

    Args:
        limits: with the times of checks.
    """

    def __init__(self, pool: ServerPool, limits: Limits) -> None:
        self._pool, self._every_s, self._wait_s = pool, limits.check_s, limits.check_wait_s

    async def run(self, server: PoolServer) -> None:
        """Check a server until it is removed from the pool."""
        failures = 0
        while server in self._pool.servers:
            server.due.clear()
            failures = await self._check(server, failures)
            await self._pool.sweep()
            await asyncio.sleep(_LEAST * self._every_s)
            spread = random.uniform(1 - _JITTER, 1 + _JITTER)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(server.due.wait(), self._every_s * spread)
        while server.in_flight:
            await asyncio.sleep(_LEAST * self._every_s)
        await self._pool.sweep()

    async def _check(self, server: PoolServer, failures: int) -> int:
        """One check; returns the number of failed ones in a row."""
        try:
            models = await asyncio.wait_for(self._models(server), self._wait_s)
        except (UpstreamError, asyncio.TimeoutError) as error:
            failures += 1
            if failures >= _FAILURES or not server.met:
                why = error.why if isinstance(error, UpstreamError) else "timeout"
                self._pool.lost(server, _WHY.get(why, why), slow=why == "timeout")
            return failures
        if not server.met or models != server.models:
            server.models = models  # before the description: a failure meanwhile is not forgotten
            try:
                found = await asyncio.to_thread(server.describe)
            except MeasurementError as error:
                self._pool.lost(server, str(error.args[0]))
                return failures + 1
            self._pool.identify(server, found)
        return 0

    async def _models(self, server: PoolServer) -> Any:
        """The facts about the models of a server that do not change with every request.

        Raises:
            UpstreamError: no list of models.
        """
        response = await server.send("GET", "/v1/models", server.own_headers(), None)
        with contextlib.closing(response):
            body = await read_body(response, _MOST)
        if response.status != 200:
            raise UpstreamError(f"status {response.status} at /v1/models")
        try:
            listed = msgspec.json.decode(body)["data"]
            return [{name: model.get(name) for name in _MODEL_FIELDS} for model in listed]
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
            raise UpstreamError("no list of models at /v1/models") from None
