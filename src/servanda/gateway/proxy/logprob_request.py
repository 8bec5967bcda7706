# Which requests can be evidence, and the request for token ids and logprobs.
#
# Only the user's request is examined, before dispatch (law 5).  An unknown field may change the
# sampling: such a request is served but not sampled, and counted by its reason.

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

BAD_REQUEST = (400, 422)  # statuses that may be caused by added fields
_ALLOWED = re.compile(rb"max allowed: ([0-9]{1,6})")  # vLLM's error for too many logprobs
# fields with side effects, removed from mirrored requests
_NOT_TWICE = ("tools", "tool_choice", "functions", "function_call", "store", "user", "metadata")
_STREAMED = ("stream", "stream_options")
# reasons other than sampling parameters
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
    """A request modified so that its response is evidence.

    Args:
        body: the body sent instead of the client's.
        sampling: parameters in the form of the traffic log.
        best: number of top-k logprobs requested; 0: none with ids.
        ids, logprobs: whether the client requested them.
        kind: kind of the target server.
        stop_ids: the client's stop tokens.
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
    """Build the request for token ids and logprobs.

    Args:
        best: most top-k logprobs that the pool returns.
        mirrored: not streamed, and without side effects.

    Raises:
        NoEvidence: the request is no evidence.
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
        raise NoEvidence(UNREADABLE) from None  # the pool will return the error
    if pool.served and values.get("model") not in (None, "", pool.served):
        raise NoEvidence(MODEL)
    if mirrored and values.get("tools"):
        raise NoEvidence("tools")  # added logprobs have no names
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
    """Whether the client requested logprobs."""
    shown = values.get("logprobs")
    return shown is True if chat else shown is not None


def _logprobs(
    request: CompletionRequest, values: Mapping[str, Any], kind: ServerKind, best: int, top_k: Any
) -> tuple[dict[str, Any], int]:
    """The fields that request logprobs in addition, and the number of usable top-k logprobs."""
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
    """The request to mirror to infer; None if it cannot be parsed."""
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
    """Whether the client's choice is unambiguous: servers also read "yes" and 1 as true."""
    shown = values.get("logprobs")
    if chat:
        clear = isinstance(shown, bool | None)
        clear &= shown is True or values.get("top_logprobs") is None
    else:
        clear = shown is None or type(shown) is int
    return clear and all(isinstance(values.get(name), bool | None) for name in _SWITCHES)


def allowed_best(text: bytes, best: int) -> int:
    """The most top-k logprobs that a pool returns, parsed from its refusal.

    The text may quote the client: it is trusted once a request for this number succeeds.
    """
    match = _ALLOWED.search(text)
    return min(best, int(match[1])) if match else best
