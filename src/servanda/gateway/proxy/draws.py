# Draws: what a request asks of the draw, or why its answer says nothing of the kernel's law.
#
# What is looked at is what a user asked for, before anything is sent (law 5).  A field that
# nobody here knows may change the draw.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from servanda.engines.neutral_fields import DECIDING, NEUTRAL
from servanda.gateway.proxy.config import Upstream
from servanda.gateway.proxy.request import Asked
from servanda.gateway.proxy.server_kinds import KINDS, Kind

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
# of no consequence for what is drawn, or said in the reply itself
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
# looked at one by one
_LOOKED_AT = ("n", "stop", "stop_token_ids", "tools", "tool_choice", "parallel_tool_calls")
# field -> values that change nothing
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {**NEUTRAL, "echo": (False,)}
# fields that make tokens impossible, by whatever name a server knows a grammar: the logprobs do
# not say which, so no token of such an answer is one
_MASKS = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "regex", "ebnf", "grammar", "structural_tag"),
)
# why a request is no evidence, besides the fields above
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
REASONS: tuple[str, ...] = (*dict.fromkeys((*_NEUTRAL, *_LOOKED_AT, *_MASKS, *_OTHERS)),)
_MOST = 2**63 - 1  # of a number that others can read too


class NoEvidence(Exception):  # noqa: N818 - what a request is
    """A request is none; `why` is one of REASONS."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def sampling_of(
    asked: Asked, fields: Mapping[str, Raw], values: Mapping[str, Any], pool: Upstream
) -> dict[str, Any]:
    """What is asked for, as a row has it: what the request leaves unsaid is the server's.

    Raises:
        NoEvidence: it is none.
    """
    own = {name: value for name, value in values.items() if value is not None}
    if pool.defaults is None and not own.keys() >= {*DECIDING}:
        raise NoEvidence(DEFAULTS)
    said = {**(pool.defaults or {}), **own}
    for name, value in said.items():
        if name in _HARMLESS or name in _LOOKED_AT:
            continue
        if name in _MASKS:
            raise NoEvidence(name)
        if name not in _NEUTRAL:
            raise NoEvidence(UNKNOWN if name in own else DEFAULTS)
        if not any(_same(value, v) for v in _NEUTRAL[name]):
            raise NoEvidence(name)
    kind = KINDS[pool.dialect]
    if why := _choices(own) or _stops(own, kind) or _tools(own, kind, pool.masks):
        raise NoEvidence(why)
    if not (_texts_only(fields.get("messages")) if asked.chat else _one_prompt(asked)):
        raise NoEvidence(CONTENT if asked.chat else PROMPTS)
    found = {"max_new_tokens": _most(asked, own, pool), **_numbers(said)}
    if not kind.filters and _filtered(found):
        raise NoEvidence(FILTERS)
    return found


def _choices(said: Mapping[str, Any]) -> str:
    """Why choices are none; the one with index 0 is a draw of the law, however many there are."""
    n = said.get("n", 1)
    return "" if type(n) is int and n >= 1 else "n"


def _stops(said: Mapping[str, Any], kind: Kind) -> str:
    """Why an answer is none that ends where the request says.

    Its tokens have the same law, and it ends at one that they tell, if all of them come.
    """
    if kind.stops:
        return ""
    return next((name for name in ("stop", "stop_token_ids") if said.get(name)), "")


def _tools(said: Mapping[str, Any], kind: Kind, masks: bool) -> str:
    """Why a chat that may call tools is none; one that must is held to a grammar."""
    tools = said.get("tools") or []
    choice = said.get("tool_choice", "auto")
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
    return "parallel_tool_calls" if said.get("parallel_tool_calls") is False else ""


def _is_strict(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and bool(function.get("strict"))


def _most(asked: Asked, said: Mapping[str, Any], pool: Upstream) -> int:
    """New tokens that it gets at most: those that it names, or what its server allows.

    Raises:
        NoEvidence: nobody knows.
    """
    kind = KINDS[pool.dialect]
    names = (
        ("max_completion_tokens", "max_tokens") if asked.chat or kind.either else ("max_tokens",)
    )
    most = next((said[name] for name in names if name in said), None)
    if most is None and not asked.chat:
        most = kind.completion
    if most is None:
        most = min((n for n in (pool.limit, pool.context) if n is not None), default=None)
    if type(most) is not int or not 1 <= most <= _MOST:
        raise NoEvidence(MAX_TOKENS)
    return most


def _numbers(said: Mapping[str, Any]) -> dict[str, Any]:
    """Temperature, filters and seed.

    Raises:
        NoEvidence: one is no number that others can read too.
    """
    found: dict[str, Any] = {}
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


def _filtered(sampling: Mapping[str, Any]) -> bool:
    """Whether fewer tokens can be drawn than the model has."""
    top_k, top_p, min_p = (sampling.get(name) for name in ("top_k", "top_p", "min_p"))
    return bool((top_k or 0) > 0 or (top_p is not None and top_p < 1) or (min_p or 0) > 0)


def _one_prompt(asked: Asked) -> bool:
    return asked.prompt.startswith(b'"') or asked.known_tokens is not None


def _texts_only(messages: Raw | None) -> bool:
    """Whether nothing but texts is in a chat: what an image becomes, ids do not say."""
    found = msgspec.json.decode(messages) if messages is not None else None
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


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
