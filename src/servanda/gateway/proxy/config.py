# The configuration of a gateway: its upstreams, timeouts, limits and allowed paths.
#
# Allowed are the requests under /v1, other than completions, that are forwarded to stable.  They
# are sent with the operator's key, and servers have more than inference under /v1: vLLM loads and
# unloads adapters there, others list files and jobs of all users.  So a path that is not listed is
# refused.

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from servanda.contract.model import base_of
from servanda.engines.http_policy import server_url
from servanda.errors import ContractError
from servanda.gateway.http.api_keys import Keys
from servanda.gateway.http.error_replies import ErrorReply
from servanda.gateway.routing.model import Pool

# stateless inference and read-only paths.  Not included, though OpenAI has them: files, batches,
# fine-tuning and stored chats, which belong to the upstream's key and so to all clients; and paths
# that delete or cancel.
OPEN = (
    "GET /v1/models",
    "GET /v1/models/*",
    "POST /v1/responses",
    "GET /v1/responses/*",  # a response by its id, which cannot be guessed
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/embeddings",
    "POST /v1/rerank",
    "POST /v1/reranking",
    "POST /v1/score",
    "POST /v1/classify",
    "POST /v1/moderations",
    "POST /v1/tokenize",
    "POST /v1/detokenize",
    "POST /v1/audio/transcriptions",
    "POST /v1/audio/translations",
    "POST /v1/audio/speech",
    "POST /v1/images/generations",
    "POST /v1/images/edits",
)
# of the controller, which has a separate listener
_LEADERS = re.compile(r"/v1/(follow|status|route|admin)(/|$)")
# a path that some servers normalise to another one
_ODD_RAW = re.compile(r"[^\x21-\x7e]|[\\?#;]|%(?![0-9a-fA-F]{2})")
_ODD_PATH = re.compile(r"//|/\.{1,2}(/|$)|[\x00-\x1f\x7f\\%?#;\ufffd]")
_RULE = re.compile(r"(?:([A-Z]+) )?(/v1(?=/)(?:/[\w.\-~:@]+)*(?:/\*)?)", re.ASCII)
_SHOWN = 200  # characters of a path in a message


class AllowedPaths:
    """The paths that clients may use.

    Args:
        more: in addition to `OPEN`: `[METHOD ]PATH`, every method where none is named; a `/*` at
            the end stands for all that lies below.

    Raises:
        ContractError: one of them is not a path.
    """

    def __init__(self, *more: str) -> None:
        self._exact: dict[str, set[str]] = {}
        self._below: list[tuple[str, str]] = []  # (beginning of a path, method)
        for rule in (*OPEN, *more):
            match = _RULE.fullmatch(rule)
            if match is None or _ODD_PATH.search(match[2]) or _LEADERS.match(match[2]):
                raise ContractError(
                    f"--allow is {rule!r}",
                    hint="write a path of users' own, such as /v1/files, /v1/files/* for all that "
                    "lies below, or 'GET /v1/files' for one method",
                )
            method, path = match[1] or "*", match[2]
            if path.endswith("*"):
                self._below.append((path[:-1], method))
            else:
                self._exact.setdefault(path, set()).add(method)

    def methods(self, path: str) -> set[str]:
        """The methods allowed on a path, `*` for all; empty if the path is closed.

        Args:
            path: decoded.
        """
        below = {
            method
            for start, method in self._below
            if path.startswith(start) and len(path) > len(start) and not path.endswith("/")
        }
        return below | self._exact.get(path, set())

    def check(self, method: str, path: str, raw_path: bytes) -> None:
        """Check that a request may be forwarded.

        Args:
            path: decoded once, as the upstream does; raw_path: as received, without its query.

        Raises:
            ErrorReply: no such path, or it is closed.
        """
        odd = _ODD_PATH.search(path) or _ODD_RAW.search(raw_path.decode("latin-1"))
        if odd or not path.startswith("/v1/") or _LEADERS.match(path):
            raise ErrorReply(404, "there is no such path: ask under /v1", "not_found")
        known = self.methods(path)
        if not known:
            shown = path[:_SHOWN]
            raise ErrorReply(
                403,
                f"{shown} is not open to clients of this gateway; if it should be, its operator "
                f"starts it with --allow {shown}",
                "path_not_allowed",
            )
        if not {"*", "GET" if method == "HEAD" else method} & known:
            raise ErrorReply(405, f"{path[:_SHOWN]} takes {' or '.join(sorted(known))}", "method")


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
        allow: paths forwarded to stable in addition to `OPEN`.
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
