# The configuration of a gateway: whom it may ask, how long it waits, how much it takes on.

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from servanda.contract.model import base_of
from servanda.engines.http_policy import server_url
from servanda.errors import ContractError
from servanda.gateway.http.api_keys import Keys
from servanda.gateway.proxy.allowed_paths import AllowedPaths
from servanda.gateway.routing.model import Pool

Dialect = Literal["vllm", "plain", "sglang", "llamacpp"]
RequestForm = Literal["completions", "chats", "streamed chats"]


@dataclass(frozen=True)
class Upstream:
    """A pool of servers, behind one address.

    Args:
        url: http://HOST:PORT, without the /v1.
        key: sent as `Authorization: Bearer KEY`; "": the client's own header is passed on,
            unless the gateway has keys itself.
        dialect: how token ids and logprobs are asked for.
        served: what the server calls the kernel's model: a request that names another one (an
            adapter, say) is no evidence of this kernel; "": every name is the kernel's.
        defaults: of what a request may leave unsaid about its sampling, what the server takes:
            temperature, top_p, top_k, min_p and penalties, those that are not neutral at least;
            None: no one knows, and only requests that say all of it are evidence.
        context: tokens that it runs at most, prompt and answer together; None: no one knows.
        limit: new tokens that a request gets at most which names no number; None: what there is
            room for.
        mute: requests whose answers it gives without token ids, so that they are no evidence.
        masks: whether it is known to make tokens impossible where a chat may call tools.
        best: likeliest tokens that a sampled request asks for, at most.
        connect_s, first_byte_s, idle_s: longest wait for a connection, for the first byte of
            a reply (of one that is not streamed: for all of it), and between two of its parts;
            total_s: for everything.
        verify: what https is verified against; None: what `servanda.engines.tls.trusted` trusts.
        probe: asks the server what it is, and gives the same with its answer, where that is not
            known yet; raises MeasurementError where it does not answer.
        keep_s: how long an unused connection is kept; shorter than the server keeps it.
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
                hint="write http://HOST:PORT or https://HOST:PORT; a key is given beside it",
            )

    @property
    def base(self) -> str:
        return base_of(self.url)


@dataclass(frozen=True)
class Limits:
    """How much a gateway takes on; beyond it a client is refused with the reason.

    Args:
        body_bytes, header_bytes: of a request; reply_bytes: of a reply that was sampled: one
            that is not streamed has to be read whole; line_bytes: of one event of a sampled
            stream, the first of which may have all ids of a prompt.  What is longer passes on,
            and is a lost sample.
        in_flight: requests that are being answered; in_flight_per_key: of them, of one client.
        body_s: how long a body may take to arrive; stall_s: how long a client may read nothing
            of what waits for it.
        rows, row_bytes: samples that wait for the controller; beyond them a row is sent as lost,
            and beyond `4 * rows` no request is sampled.
        row_s: after which a sample without an answer is lost, so that it holds up no other.
        mirror_in_flight, mirror_per_s: of requests that infer is mirrored.
        count_s: how long a prompt may take to be counted.
        read_bytes: of a body, beyond which its prompt is not counted, and it is neither sampled
            nor mirrored: taking it apart would keep everybody else waiting.
        sessions, session_s: how many are remembered, and how long after their last request.
        drain_s: what requests under way have left, once the gateway is told to end.
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


@dataclass(frozen=True)
class LogFiles:
    """The files of a log of sampled requests.

    Args:
        folder: of one gateway alone.
        file_bytes, file_s: of a file, about; the next row begins another one.
        keep_s: a file is deleted once no one wrote to it for so long; None: never.
        tokens: whether rows have token ids of prompts and answers; else they say that a request
            was sent, and when, and no one can judge them again.
    """

    folder: Path
    file_bytes: int = 64 << 20
    file_s: float = 86_400.0
    keep_s: float | None = None
    tokens: bool = True


@dataclass(frozen=True)
class Config:
    """What a gateway is told at its start; everything else comes with snapshots.

    Args:
        infer: the pool under test; stable: the other one, None where there is none.
        controller: who makes the snapshots, url and key of role `gateway`; None: no one.
        name: of this gateway, among those of one controller.
        without: who serves before the first snapshot, and whatever is no completion.
        log: of sampled requests; None: none is written.
        keys: whom it knows; users need a key where it has one of role `client`.
        labels: name -> api_key, route or request.metadata.KEY, until a snapshot says.
        shows: whether replies say their decision's id and their pool.
        allow: paths that clients may reach at stable, beside `allowed_paths.OPEN`.
    """

    infer: Upstream
    stable: Upstream | None = None
    controller: Upstream | None = None
    name: str = "gateway"
    limits: Limits = field(default_factory=Limits)
    without: Pool = "stable"
    log: LogFiles | None = None
    keys: Keys | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    shows: bool = False
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        AllowedPaths(*self.allow)  # refused before anything is opened
        if self.without == "stable" and self.stable is None:
            raise ContractError(
                "stable serves while no route is known, and there is no stable pool",
                hint="name one, or let infer serve then: routing: {without_snapshot: infer}",
            )
        if self.stable is not None and self.stable.base == self.infer.base:
            raise ContractError(
                f"infer and stable are both {self.infer.base}",
                hint="the two kernels are distinguished by their URLs: give two",
            )

    @property
    def pools(self) -> Mapping[Pool, Upstream]:
        known: dict[Pool, Upstream] = {"infer": self.infer}
        if self.stable is not None:
            known["stable"] = self.stable
        return known
