# One request of Envoy, and the headers that route it.

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from urllib.parse import quote

from servanda.gateway.envoy.leader_routes import LeaderRoutes
from servanda.gateway.http.error_replies import ErrorReply
from servanda.gateway.http.headers import SESSIONS
from servanda.gateway.proxy.pools.upstreams import COMPLETION_PATHS
from servanda.gateway.proxy.request import CompletionRequest
from servanda.gateway.proxy.sessions import Sessions
from servanda.gateway.routing.hash_split import pseudonym
from servanda.gateway.routing.model import Decision, RequestFacts

PREFIX = "x-servanda-"
MOST = 32 << 20  # bytes of a body, as in a gateway of servanda
_SESSIONS, _SESSION_S, _NAME = 100_000, 3600.0, 256


@dataclass(frozen=True)
class Ask:
    """A request as Envoy describes it.

    Args:
        path: with its query; headers: by lower-case name, the last of repeated ones.
        body: as far as it was sent; None: it was not sent here.
        whole: whether this is all of the body.
        id: of a request that has one already; "": a new one is made.
    """

    path: str
    headers: Mapping[str, str]
    body: bytes | None = None
    whole: bool = True
    id: str = ""


class RequestRoutes:
    """The headers that route requests, decided by the leader's snapshot.

    Raises (of `headers`):
        ErrorReply: the request is refused, as a gateway of servanda refuses it.
    """

    def __init__(self, leader: LeaderRoutes) -> None:
        self._leader = leader
        self._sessions = Sessions(_SESSIONS, _SESSION_S, time.monotonic)
        self._prefix, self._count = secrets.token_hex(6), count(1)

    def new_id(self) -> str:
        """An id of a request; the client's own could repeat."""
        return f"{self._prefix}-{next(self._count):x}"

    def headers(self, ask: Ask) -> dict[str, str]:
        """Pool, id, mirror, sample and its probability, as headers for the routes of Envoy."""
        name = ask.id or self.new_id()
        path = ask.path.partition("?")[0]
        if path not in COMPLETION_PATHS:  # these are served by one pool, as in our own gateway
            return _headers(name, self._without, None, "path")
        if not ask.whole:  # its labels cannot be read: it may belong to a diverted slice
            return _headers(name, self._without, None, "partial body")
        chat = path == "/v1/chat/completions"
        request = None if ask.body is None else CompletionRequest(ask.body, chat)
        holder = pseudonym(b"envoy", ask.headers.get("authorization", ""))
        session = next((v for n in SESSIONS if (v := ask.headers.get(n.decode()))), "")[:_NAME]
        facts = self._facts(name, path, request, holder, session)
        decision = self._leader.decide(facts)
        if decision.pool is None:
            raise self._outside(facts)
        if session:
            self._sessions.put(facts.sticky, decision.pool)
        return _headers(name, decision.pool, decision, decision.reason)

    @property
    def _without(self) -> str:
        snapshot = self._leader.router.snapshot
        return "stable" if snapshot is None else snapshot.without

    def _facts(
        self, name: str, path: str, request: CompletionRequest | None, holder: str, session: str
    ) -> RequestFacts:
        snapshot = self._leader.router.snapshot
        user = request.user if request is not None else ""
        words = request.conversation() if request is not None else ""
        # session names are per client: no session is shared between keys
        kinds = (("session", session), ("user", user), ("chat", words))
        sticky = next((f"{kind} {holder} {value}" for kind, value in kinds if value), name)
        sources = snapshot.labels if snapshot is not None else {}
        labels = request.labels(sources, "", path) if request is not None else {}
        return RequestFacts(
            request=name,
            sticky=sticky,
            labels=labels,
            prompt_tokens=request.known_tokens if request is not None else None,
            session=self._sessions.pool(sticky) if session else None,
        )

    def _outside(self, facts: RequestFacts) -> ErrorReply:
        snapshot = self._leader.router.snapshot
        low, high = (snapshot.prompt_tokens if snapshot is not None else None) or (0, 0)
        return ErrorReply(
            422,
            f"the prompt has {facts.prompt_tokens} tokens, and the contract promises {low:g} to "
            f"{high:g}: send one of that length",
            "outside_envelope",
        )


def foreign(names: Iterable[str]) -> list[str]:
    """Headers that a client sent in our name, without those that are overwritten."""
    ours = _headers("", "", None, "")
    return sorted({n for n in names if n.startswith(PREFIX) and n not in ours})


def _headers(name: str, pool: str, decision: Decision | None, reason: str) -> dict[str, str]:
    """All of them, always: a client's own value of one is then overwritten."""
    mirrored = decision is not None and decision.mirrored
    sampled = decision is not None and decision.sampled
    return {
        "x-servanda-pool": pool,
        "x-servanda-decision": name,
        "x-servanda-mirrored": str(mirrored).lower(),
        "x-servanda-sampled": str(sampled).lower(),
        "x-servanda-chance": repr(decision.chance if decision is not None else 0.0),
        "x-servanda-reason": quote(reason, safe=" =<>.,"),  # the name of a slice may be any text
    }
