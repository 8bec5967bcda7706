# Which requests can be evidence, and the request for token ids and logprobs.
#
# Only the user's request is examined, before dispatch (law 5).  An unknown field may change the
# sampling: such a request is served but not sampled, and counted by its reason.

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from servanda.engines.neutral_fields import DECIDING, NEUTRAL
from servanda.gateway.proxy.config import RequestForm, Upstream
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
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_objects = msgspec.json.Decoder(dict[str, Raw]).decode
_MOST = 2**63 - 1  # largest integer that other readers can parse
_WHOLE = Annotated[int, Meta(ge=-_MOST, le=_MOST)]
_NUMBER = _WHOLE | Annotated[float, Meta(ge=-_MOST, le=_MOST)]
_SAMPLING: Mapping[str, Any] = {
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _WHOLE,
    "min_p": _NUMBER,
    "seed": _WHOLE,
}
# without effect on sampling, or reported in the reply
_HARMLESS = frozenset(
    (
        *("model", "stream", "stream_options", "user", "metadata", "store", "service_tier"),
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "cache_salt"),
        *("request_id", "priority", "verbosity", "include_stop_str_in_output"),
        *("skip_special_tokens", "spaces_between_special_tokens"),
        *("logprobs", "top_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
        *("prompt", "messages", "max_tokens", "max_completion_tokens", *_SAMPLING),
        *("add_special_tokens", "add_generation_prompt", "continue_final_message"),
        *("chat_template_kwargs", "documents"),
    )
)
# checked individually
_LOOKED_AT = ("n", "stop", "stop_token_ids", "tools", "tool_choice", "parallel_tool_calls")
# field -> neutral values
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {**NEUTRAL, "echo": (False,)}
# fields that restrict tokens by a grammar, under the names of various servers: the logprobs do not
# show which tokens, so such a response is no evidence
_MASKS = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "regex", "ebnf", "grammar", "structural_tag"),
)
# further reasons why a request is no evidence
UNKNOWN = "unknown field"
PROMPTS = "several prompts"
CONTENT = "content besides text"
MAX_TOKENS = "no max_tokens"
VALUE = "odd sampling value"
DEFAULTS = "sampling left to the server"
STRICT = "strict tools"
MASKED = "tools that infer holds to a grammar"
FILTERS = "filters that its logprobs do not show"
_OTHERS = (UNKNOWN, PROMPTS, CONTENT, MAX_TOKENS, VALUE, DEFAULTS, STRICT, MASKED, FILTERS)
REASONS: tuple[str, ...] = (
    *dict.fromkeys((*_NEUTRAL, *_LOOKED_AT, *_MASKS, *_OTHERS)),
    *(UNMET, MUTE, UNREADABLE, MODEL, SHOWN, LENGTH, ROOM),
)


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


# Sampling parameters of a request, or the reason why its response is no evidence for the kernel.
#
# Only the user's request is examined, before dispatch (law 5).  An unknown field may change the
# sampling.


class _Text(msgspec.Struct, tag_field="type", tag="text"):
    """A text part of a message; other parts are images."""


class _Message(msgspec.Struct):
    content: str | list[_Text] | None = None


_messages = msgspec.json.Decoder(list[_Message]).decode


class NoEvidence(Exception):  # noqa: N818 - what a request is
    """A request is no evidence; `why` is one of REASONS."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def sampling_of(
    request: CompletionRequest, fields: Mapping[str, Raw], values: Mapping[str, Any], pool: Upstream
) -> dict[str, Any]:
    """The sampling parameters for a row; missing ones are the server's defaults.

    Raises:
        NoEvidence: the request is no evidence.
    """
    own = {name: value for name, value in values.items() if value is not None}
    if pool.defaults is None and not own.keys() >= {*DECIDING}:
        raise NoEvidence(DEFAULTS)
    effective = {**(pool.defaults or {}), **own}
    for name, value in effective.items():
        if name in _HARMLESS or name in _LOOKED_AT:
            continue
        if name in _MASKS:
            raise NoEvidence(name)
        if name not in _NEUTRAL:
            raise NoEvidence(UNKNOWN if name in own else DEFAULTS)
        # True is 1, and no number
        same = (
            isinstance(value, bool) == isinstance(v, bool) for v in _NEUTRAL[name] if v == value
        )
        if not any(same):
            raise NoEvidence(name)
    kind = KINDS[pool.dialect]
    n = own.get("n", 1)
    if type(n) is not int or n < 1:  # of several choices, the one with index 0 is a valid sample
        raise NoEvidence("n")
    # a stop sequence does not change the distribution, if all tokens are returned
    stops = [name for name in ("stop", "stop_token_ids") if own.get(name) and not kind.stops]
    if why := next(iter(stops), "") or _tools(own, kind, pool.masks):
        raise NoEvidence(why)
    if request.chat and not _texts_only(fields.get("messages")):
        raise NoEvidence(CONTENT)
    one_prompt = request.prompt.startswith(b'"') or request.known_tokens is not None
    if not (request.chat or one_prompt):
        raise NoEvidence(PROMPTS)
    sampling = {"max_new_tokens": _most(request, own, pool), **_numbers(effective)}
    if not kind.filters and _filtered(sampling):
        raise NoEvidence(FILTERS)
    return sampling


def _tools(fields: Mapping[str, Any], kind: ServerKind, masks: bool) -> str:
    """The reason why a chat that may call tools is no evidence; a forced call uses a grammar."""
    tools = fields.get("tools") or []
    choice = fields.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        return "tool_choice"
    if not tools:
        return ""
    if not kind.tools or not isinstance(tools, list):
        return "tools"
    if masks:
        return MASKED
    if any(_is_strict(tool) for tool in tools):
        return STRICT
    # vLLM's grammar ends after the first call
    return "parallel_tool_calls" if fields.get("parallel_tool_calls") is False else ""


def _is_strict(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and bool(function.get("strict"))


def _most(request: CompletionRequest, fields: Mapping[str, Any], pool: Upstream) -> int:
    """Most new tokens: the request's limit, or the server's."""
    kind = KINDS[pool.dialect]
    most = fields.get("max_tokens")
    if request.chat or kind.either:
        most = fields.get("max_completion_tokens", most)
    if most is None and not request.chat:
        most = kind.completion
    if most is None:
        most = min((n for n in (pool.limit, pool.context) if n is not None), default=None)
    if type(most) is not int or not 1 <= most <= _MOST:
        raise NoEvidence(MAX_TOKENS)
    return most


def _numbers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Temperature, filters and seed."""
    given = {name: fields[name] for name in _SAMPLING if fields.get(name) is not None}
    try:
        return {name: msgspec.convert(value, _SAMPLING[name]) for name, value in given.items()}
    except msgspec.ValidationError:
        raise NoEvidence(VALUE) from None


def _filtered(sampling: Mapping[str, Any]) -> bool:
    """Whether a filter restricts the tokens that can be sampled."""
    top_k, top_p, min_p = (sampling.get(name) for name in ("top_k", "top_p", "min_p"))
    return bool((top_k or 0) > 0 or (top_p is not None and top_p < 1) or (min_p or 0) > 0)


def _texts_only(messages: Raw | None) -> bool:
    """Whether a chat contains only text: token ids do not represent images."""
    try:
        return messages is not None and bool(_messages(messages))
    except msgspec.ValidationError:
        return False
