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

from servanda.gateway.asked import Asked
from servanda.gateway.config import TELLS_IDS, Upstream
from servanda.neutral import DECIDING, NEUTRAL

NOT_TO_ITS_TASTE = (400, 422)  # perhaps what was added to a request
_ALLOWED = re.compile(rb"max allowed: ([0-9]{1,6})")  # vLLM's words for too many logprobs
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
# of no consequence for what is drawn, or said in the reply itself
_HARMLESS = frozenset(
    (
        *("model", "stream", "stream_options", "user", "metadata", "store", "service_tier"),
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "cache_salt"),
        *("request_id", "priority", "parallel_tool_calls", "verbosity"),
        *("skip_special_tokens", "spaces_between_special_tokens"),
        *("logprobs", "top_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
        *("prompt", "messages", "max_tokens", "max_completion_tokens", *_SAMPLING),
        *("add_special_tokens", "add_generation_prompt", "continue_final_message"),
        *("chat_template_kwargs", "documents"),
    )
)
# field -> values that change nothing
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {**NEUTRAL, "n": (1,), "echo": (False,), "tools": ([],)}
# what a request that nobody waits for must not do again
_NOT_TWICE = ("tools", "tool_choice", "functions", "function_call", "store", "user", "metadata")
_STREAMED = ("stream", "stream_options")
# why a request is no evidence, besides the fields of _NEUTRAL
UNMET = "infer has not said what it is"
DIALECT = "infer's kind of server"
UNREADABLE = "unreadable"
MODEL = "another model"
SHOWN = "logprobs asked for in an odd way"
UNKNOWN = "unknown field"
PROMPTS = "several prompts"
CONTENT = "content besides text"
MAX_TOKENS = "no max_tokens"
VALUE = "odd sampling value"
DEFAULTS = "sampling left to the server"
LENGTH = "long body"
ROOM = "no room"
_OTHERS = (UNMET, DIALECT, UNREADABLE, MODEL, SHOWN, UNKNOWN, PROMPTS, CONTENT, MAX_TOKENS, VALUE)
REASONS: tuple[str, ...] = (*_NEUTRAL, *_OTHERS, DEFAULTS, LENGTH, ROOM)
_MOST = 2**63 - 1  # of a number that others can read too
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_objects = msgspec.json.Decoder(dict[str, Raw]).decode


class NoEvidence(Exception):  # noqa: N818 - what a request is
    """A request is none; `why` is one of REASONS."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True)
class Wish:
    """How a request is asked, so that its answer is evidence.

    Args:
        body: what is sent instead of the client's.
        sampling: as the log of served requests has it.
        best: likeliest tokens that were asked for; 0: none that can be told apart.
        ids, logprobs: whether the client asked for them itself.
        nulls: whether the pool writes null for ids that nobody asked for, as vLLM does, and sends
            no event of a stream that has nothing but them.
    """

    body: bytes
    sampling: Mapping[str, Any] = field(default_factory=dict)
    best: int = 0
    ids: bool = False
    logprobs: bool = False
    chat: bool = False
    nulls: bool = False


def wish_of(asked: Asked, pool: Upstream, best: int, *, mirrored: bool = False) -> Wish:
    """How a request is asked for evidence.

    Args:
        best: likeliest tokens that the pool gives at most.
        mirrored: nobody waits for it: it is not streamed, and has no effect beside its answer.

    Raises:
        NoEvidence: it can be none.
    """
    if pool.met is not None:
        raise NoEvidence(UNMET)
    if pool.dialect not in TELLS_IDS:
        raise NoEvidence(DIALECT)
    try:
        fields = _objects(asked.body)
        values = {name: _plain(raw) for name, raw in fields.items() if name not in _TEXTS}
        sampling = _sampling(asked, fields, values, pool.defaults)
    except _UNREADABLE:
        raise NoEvidence(UNREADABLE) from None  # the pool will say so
    if pool.served and values.get("model") not in (None, "", pool.served):
        raise NoEvidence(MODEL)
    if not _plainly_shown(values, asked.chat):
        raise NoEvidence(SHOWN)
    wanted = values.get("logprobs")
    own = wanted is True if asked.chat else wanted is not None
    ids = values.get("return_token_ids") is True
    more: dict[str, Any] = {"return_token_ids": True}
    k = 0
    if not own:
        limit = sampling.get("top_k")
        k = min(best, limit) if isinstance(limit, int) and limit > 0 else best
        more |= {"logprobs": True, "top_logprobs": k} if asked.chat else {"logprobs": k}
        more["return_tokens_as_token_ids"] = True
    elif values.get("return_tokens_as_token_ids") is True:
        found = values.get("top_logprobs") if asked.chat else wanted
        k = found if isinstance(found, int) else 0
    kept = _once(fields) if mirrored else fields
    body = msgspec.json.encode({**kept, **more})
    return Wish(body, sampling, k, ids, own, asked.chat, nulls=pool.dialect == "vllm")


def mirrored(asked: Asked) -> bytes | None:
    """A request that infer is asked as well, for nobody; None where it cannot be read."""
    try:
        return msgspec.json.encode(_once(_objects(asked.body)))
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


def _sampling(
    asked: Asked,
    fields: Mapping[str, Raw],
    values: Mapping[str, Any],
    defaults: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What is asked for, as a row has it: what the request leaves unsaid is the server's.

    Raises:
        NoEvidence: it is none.
    """
    said = {name: value for name, value in values.items() if value is not None}
    if defaults is None and not said.keys() >= {*DECIDING}:
        raise NoEvidence(DEFAULTS)
    said = {**(defaults or {}), **said}
    for name, value in said.items():
        if name in _HARMLESS:
            continue
        if name not in _NEUTRAL:
            raise NoEvidence(UNKNOWN)
        if not any(_same(value, v) for v in _NEUTRAL[name]):
            raise NoEvidence(name)
    if not (_texts_only(fields.get("messages")) if asked.chat else _one_prompt(asked)):
        raise NoEvidence(CONTENT if asked.chat else PROMPTS)
    given = said.get("max_tokens")
    most = said.get("max_completion_tokens", given) if asked.chat else given
    if type(most) is not int or not 1 <= most <= _MOST:
        raise NoEvidence(MAX_TOKENS)
    found: dict[str, Any] = {"max_new_tokens": most}
    for name in _SAMPLING:
        value = said.get(name)
        if value is None:
            continue
        whole = name in ("top_k", "seed")
        if type(value) is not int and (whole or type(value) is not float):
            raise NoEvidence(VALUE)
        if not -_MOST <= value <= _MOST:
            raise NoEvidence(VALUE)
        found[name] = value
    return found


def _one_prompt(asked: Asked) -> bool:
    return asked.prompt.startswith(b'"') or asked.known_tokens is not None


def _texts_only(messages: Raw | None) -> bool:
    """Whether nothing but texts is in a chat: what an image becomes, ids do not say."""
    found = _plain(messages) if messages is not None else None
    if not isinstance(found, list) or not found:
        return False
    for message in found:
        content = message.get("content") if isinstance(message, dict) else 0
        if isinstance(content, list):
            if any(not isinstance(p, dict) or p.get("type") != "text" for p in content):
                return False
        elif content is not None and not isinstance(content, str):
            return False
    return True


def _plain(raw: Raw) -> Any:
    return msgspec.json.decode(raw)


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def allowed(text: bytes, best: int) -> int:
    """How many likeliest tokens a pool gives, by what it says where it refuses.

    A client's own words may stand in there: it is true once a request for so many has an answer.
    """
    match = _ALLOWED.search(text)
    return min(best, int(match[1])) if match else best
