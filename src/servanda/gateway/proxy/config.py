# The configuration of a gateway: its upstreams, timeouts and limits.

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from servanda.contract.model import base_of
from servanda.engines.http_policy import server_url
from servanda.errors import ContractError
from servanda.gateway.http.api_keys import Keys
from servanda.gateway.proxy.allowed_paths import AllowedPaths
from servanda.gateway.routing.model import Pool

Dialect = Literal["vllm", "plain", "sglang", "llamacpp"]


def dialect_of(name: str) -> Dialect:
    """How the gateway speaks to a kind of server; one that it has no form for is plain.

    >>> dialect_of("sglang"), dialect_of("lmdeploy")
    ('sglang', 'plain')
    """
    known: tuple[Dialect, ...] = get_args(Dialect)
    for kind in known:
        if kind == name:
            return kind
    return "plain"


RequestForm = Literal["completions", "chats", "streamed chats"]


@dataclass(frozen=True)
class Upstream:
    """A pool of servers, behind one address.

    Args:
        url: http://HOST:PORT, without the /v1.
        key: sent as `Authorization: Bearer KEY`; "": the client's own header is forwarded, unless
            the gateway has its own keys.
        dialect: the form of requests for token ids and logprobs.
        served: the server's name of the kernel's model: a request for another model (such as an
            adapter) is no evidence for this kernel; "": any name is the kernel's.
        defaults: the server's defaults of sampling parameters: temperature, top_p, top_k, min_p and
            penalties, at least those that are not neutral; None: unknown, and only requests that
            give all of them are evidence.
        context: most tokens of prompt and response together; None: unknown.
        limit: default limit of new tokens; None: the rest of the context.
        mute: requests whose responses it returns without token ids, so that they are no evidence.
        masks: whether it restricts tokens by a grammar if a chat may call tools.
        build: further facts that it reports about itself: its version, its weights, and settings
            that may change a number.
        best: most top-k logprobs that a sampled request asks for.
        connect_s, first_byte_s, idle_s: timeouts for a connection, for the first byte of a reply
            (for the whole reply if it is not streamed), and between two of its parts; total_s: for
            the whole request.
        verify: TLS context for https; None: that of `servanda.engines.tls.trusted`.
        probe: asks the server for its description and returns the upstream with it; None: known
            already; raises MeasurementError if it does not respond.
        keep_s: how long an idle connection is kept; shorter than the server's own limit.
    """

    url: str
    key: str = field(default="", repr=False)
    dialect: Dialect = "vllm"
    served: str = ""
    defaults: Mapping[str, float] | None = None
    context: int | None = None
    limit: int | None = None
    mute: frozenset[RequestForm] = frozenset()
    masks: bool = False
    build: Mapping[str, str] = field(default_factory=dict)
    best: int = 8
    connect_s: float = 5.0
    first_byte_s: float = 300.0
    idle_s: float = 60.0
    total_s: float = 600.0
    keep_s: float = 4.0
    verify: ssl.SSLContext | None = field(default=None, repr=False, compare=False)
    probe: Callable[[], Upstream] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = server_url(self.url)
        if parts is None or parts.username:
            raise ContractError(
                f"an upstream's url is {self.url!r}",
                hint="write http://HOST:PORT or https://HOST:PORT; give the key separately",
            )

    @property
    def base(self) -> str:
        return base_of(self.url)


@dataclass(frozen=True)
class Replica:
    """One of several servers of a pool.

    Args:
        upstream: as last described; its `probe` is None if it was described.
        weight: its share of the pool's requests, relative to those of the others.
        describe: as `Upstream.probe`.
    """

    upstream: Upstream
    weight: float
    describe: Callable[[], Upstream] = field(repr=False, compare=False)


Replicas = Mapping[Pool, tuple[Replica, ...]]


@dataclass(frozen=True)
class Limits:
    """The limits of a gateway; beyond them a request is refused with the reason.

    Args:
        body_bytes, header_bytes: of a request; reply_bytes: of a sampled reply, which is buffered
            if it is not streamed; line_bytes: of one event of a sampled stream, the first of which
            may contain all ids of a prompt.  A longer reply is forwarded and counts as a lost
            sample.
        in_flight: most concurrent requests; in_flight_per_key: most of one client.
        body_s: time for a body to arrive; stall_s: time for which a client may read nothing.
        rows, row_bytes: samples queued for the controller; beyond them a row is sent as lost, and
            beyond `4 * rows` no request is sampled.
        row_s: time after which a sample without a response counts as lost, so that it delays no
            other.
        mirror_in_flight, mirror_per_s: limits of mirrored requests.
        count_s: timeout for counting the tokens of a prompt.
        read_bytes: size of a body above which its prompt is not counted, and it is neither sampled
            nor mirrored: parsing it would delay all others.
        sessions, session_s: how many sessions are kept, and for how long after their last request.
        drain_s: grace period for requests in flight at shutdown.
        check_s: mean time between two checks of a replica; check_wait_s: timeout of one.
    """

    body_bytes: int = 32 << 20
    header_bytes: int = 32 << 10
    reply_bytes: int = 64 << 20
    line_bytes: int = 8 << 20
    in_flight: int = 2048
    in_flight_per_key: int = 1024
    body_s: float = 60.0
    stall_s: float = 60.0
    rows: int = 4096
    row_bytes: int = 64 << 20
    row_s: float = 660.0
    mirror_in_flight: int = 32
    mirror_per_s: float = 20.0
    count_s: float = 0.5
    read_bytes: int = 2 << 20
    sessions: int = 65_536
    session_s: float = 7200.0
    drain_s: float = 20.0
    check_s: float = 5.0
    check_wait_s: float = 5.0


@dataclass(frozen=True)
class LogFiles:
    """The files of a log of sampled requests.

    Args:
        folder: used by one gateway only.
        file_bytes, file_s: approximate size and age of a file; the next row begins a new one.
        keep_s: a file is deleted this long after its last write; None: never.
        tokens: whether rows contain the token ids of prompts and responses; without them a row only
            records the dispatch, and cannot be judged again.
    """

    folder: Path
    file_bytes: int = 64 << 20
    file_s: float = 86_400.0
    keep_s: float | None = None
    tokens: bool = True


@dataclass(frozen=True)
class Config:
    """The configuration of a gateway at its start; everything else comes with snapshots.

    Args:
        infer: the pool under test; stable: the other pool, or None.
        replicas: the servers of pools that have several; such a pool's own upstream only describes
            the kernel that all of them run.
        controller: the source of snapshots, with URL and key of role `gateway`; None: no
            controller.  standbys: further ones, of which one may lead when that one does not.
        name: name of this gateway, unique per controller.
        without: the pool before the first snapshot, and for requests that are no completions.
        log: log of sampled requests; None: not written.
        keys: its API keys; clients need a key if there is one of role `client`.
        labels: name -> api_key, route or request.metadata.KEY, until the first snapshot.
        shows: whether replies contain the id of their decision and their pool.
        allow: paths forwarded to stable in addition to `allowed_paths.OPEN`.
    """

    infer: Upstream
    stable: Upstream | None = None
    replicas: Replicas = field(default_factory=dict)
    controller: Upstream | None = None
    standbys: tuple[Upstream, ...] = ()
    name: str = "gateway"
    limits: Limits = field(default_factory=Limits)
    without: Pool = "stable"
    log: LogFiles | None = None
    keys: Keys | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    shows: bool = False
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        AllowedPaths(*self.allow)  # checked before anything is opened
        if self.without == "stable" and self.stable is None:
            raise ContractError(
                "stable serves while no route is known, and there is no stable pool",
                hint="name one, or let infer serve then: routing: {without_snapshot: infer}",
            )
        if shared := self._bases("infer") & self._bases("stable"):
            raise ContractError(
                f"infer and stable are both {min(shared)}",
                hint="the two kernels are distinguished by their URLs: give two",
            )

    def _bases(self, pool: Pool) -> set[str]:
        """The addresses of the servers of a pool."""
        own = self.pools.get(pool)
        declared = {replica.upstream.base for replica in self.replicas.get(pool, ())}
        return declared or ({own.base} if own is not None else set())

    @property
    def pools(self) -> Mapping[Pool, Upstream]:
        known: dict[Pool, Upstream] = {"infer": self.infer}
        if self.stable is not None:
            known["stable"] = self.stable
        return known
