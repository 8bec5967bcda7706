# Evidence: which requests can be it, and how they are asked for token ids and logprobs.
#
# What is looked at is what a user asked for, before anything is sent (law 5).  A field that
# nobody here knows may change the draw: such a request is served and not sampled, and it is
# counted by the reason.

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw

from servanda.gateway.proxy import draws
from servanda.gateway.proxy.config import RequestForm, Upstream
from servanda.gateway.proxy.draws import NoEvidence, sampling_of
from servanda.gateway.proxy.raw_fields import listed
from servanda.gateway.proxy.request import CompletionRequest
from servanda.gateway.proxy.server_kinds import KINDS, ServerKind

BAD_REQUEST = (400, 422)  # perhaps what was added to a request
_ALLOWED = re.compile(rb"max allowed: ([0-9]{1,6})")  # vLLM's words for too many logprobs
# what a request that nobody waits for must not do again
_NOT_TWICE = ("tools", "tool_choice", "functions", "function_call", "store", "user", "metadata")
_STREAMED = ("stream", "stream_options")
# why a request is no evidence, besides what it asks of the draw
UNMET = "infer has not said what it is"
MUTE = "answered without token ids"
UNREADABLE = "unreadable"
MODEL = "another model"
SHOWN = "logprobs asked for in an odd way"
LENGTH = "long body"
ROOM = "no room"
REASONS: tuple[str, ...] = (*draws.REASONS, UNMET, MUTE, UNREADABLE, MODEL, SHOWN, LENGTH, ROOM)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_objects = msgspec.json.Decoder(dict[str, Raw]).decode


@dataclass(frozen=True)
class LogprobRequest:
    """How a request is asked, so that its answer is evidence.

    Args:
        body: what is sent instead of the client's.
        sampling: as the log of served requests has it.
        best: likeliest tokens that were asked for; 0: none that can be told apart.
        ids, logprobs: whether the client asked for them itself.
        kind: of the server that it is for.
        stop_ids: tokens that the client asked to stop at.
    """

    body: bytes
    sampling: Mapping[str, Any] = field(default_factory=dict)
    best: int = 0
    ids: bool = False
    logprobs: bool = False
    chat: bool = False
    kind: ServerKind = KINDS["plain"]
    stop_ids: frozenset[int] = frozenset()


def logprob_request_of(
    request: CompletionRequest, pool: Upstream, best: int, *, mirrored: bool = False
) -> LogprobRequest:
    """How a request is asked for evidence.

    Args:
        best: likeliest tokens that the pool gives at most.
        mirrored: no one waits for it: it is not streamed, and has no effect beside its answer.

    Raises:
        NoEvidence: it can be none.
    """
    if pool.probe is not None:
        raise NoEvidence(UNMET)
    streams = request.stream and not mirrored
    form: RequestForm = "completions"
    if request.chat:
        form = "streamed chats" if streams else "chats"
    if form in pool.mute:
        raise NoEvidence(MUTE)
    try:
        fields = _objects(request.body)
        values = {
            name: msgspec.json.decode(raw) for name, raw in fields.items() if name not in _TEXTS
        }
        sampling = sampling_of(request, fields, values, pool)
    except _UNREADABLE:
        raise NoEvidence(UNREADABLE) from None  # the pool will say so
    if pool.served and values.get("model") not in (None, "", pool.served):
        raise NoEvidence(MODEL)
    if mirrored and values.get("tools"):
        raise NoEvidence("tools")  # what is asked for nobody names none
    if not _plainly_shown(values, request.chat):
        raise NoEvidence(SHOWN)
    kind = KINDS[pool.dialect]
    more, k = _logprobs(request, values, kind, best, sampling.get("top_k"))
    ids = kind.ids if kind.streamed is None or not (request.chat and streams) else kind.streamed
    own = _once(fields) if mirrored else fields
    stop_ids = values.get("stop_token_ids")
    return LogprobRequest(
        msgspec.json.encode({**own, **ids, **more}),
        sampling,
        k,
        ids=values.get("return_token_ids") is True,
        logprobs=_shows(values, request.chat),
        chat=request.chat,
        kind=kind,
        stop_ids=frozenset(i for i in listed(stop_ids) if type(i) is int),
    )


def _shows(values: Mapping[str, Any], chat: bool) -> bool:
    """Whether the client asked for logprobs itself."""
    shown = values.get("logprobs")
    return shown is True if chat else shown is not None


def _logprobs(
    request: CompletionRequest, values: Mapping[str, Any], kind: ServerKind, best: int, top_k: Any
) -> tuple[dict[str, Any], int]:
    """What asks for logprobs beside the client's own, and how many likeliest tokens can be read."""
    if not _shows(values, request.chat):
        k = min(best, top_k) if isinstance(top_k, int) and top_k > 0 else best
        k = k if kind.best else 0
        most = max(k, kind.least)
        shown = {"logprobs": True, "top_logprobs": most} if request.chat else {"logprobs": most}
        return {**shown, **kind.named}, k
    most_asked = values.get("top_logprobs" if request.chat else "logprobs")
    if isinstance(most_asked, int) and most_asked < kind.least:
        raise NoEvidence(SHOWN)
    named = kind.by_step or values.get("return_tokens_as_token_ids") is True
    return {}, most_asked if named and kind.best and isinstance(most_asked, int) else 0


def mirrored(request: CompletionRequest) -> bytes | None:
    """A request that infer is asked as well, for no one; None where it cannot be read."""
    try:
        return msgspec.json.encode(_once(_objects(request.body)))
    except _UNREADABLE:
        return None


def _once(fields: Mapping[str, Raw]) -> dict[str, Raw]:
    left_out = (*_NOT_TWICE, *_STREAMED)
    return {name: raw for name, raw in fields.items() if name not in left_out}


_TEXTS = ("prompt", "messages", "documents", "metadata")
_SWITCHES = ("stream", "return_token_ids", "return_tokens_as_token_ids")


def _plainly_shown(values: Mapping[str, Any], chat: bool) -> bool:
    """Whether it is clear what the client wants to see: servers read "yes" as true, and 1."""
    shown = values.get("logprobs")
    if chat:
        clear = isinstance(shown, bool | None)
        clear &= shown is True or values.get("top_logprobs") is None
    else:
        clear = shown is None or type(shown) is int
    return clear and all(isinstance(values.get(name), bool | None) for name in _SWITCHES)


def allowed_best(text: bytes, best: int) -> int:
    """How many likeliest tokens a pool gives, by what it says where it refuses.

    A client's own words may stand in there: it is true once a request for so many has an answer.
    """
    match = _ALLOWED.search(text)
    return min(best, int(match[1])) if match else best
