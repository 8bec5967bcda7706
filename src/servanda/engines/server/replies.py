# Tokens to JSON, as vLLM writes it.
#
# Logprobs are processed: the log of the probability that a token was really drawn with.  Those
# of a prompt are of the model alone, before temperature and filters, as vLLM's are.  JSON has
# no infinity, so that -inf is -9999.0 here as there; a logprob that nobody knows is null.

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from servanda.engines.server.running import Token
from servanda.engines.server.wire import Ask

_LEAST = -9999.0
_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)


@dataclass
class Choice:
    """One answer, as it is collected.

    Args:
        scored: the prompt's tokens but the first, where their logprobs are asked for.
    """

    index: int
    prompt: tuple[int, ...]
    prompt_text: str
    tokens: list[Token] = field(default_factory=list)
    scored: list[Token] | None = None
    first: Token | None = None
    text: str = ""
    why: str = "length"


@dataclass(frozen=True)
class Head:
    """What every reply to one request begins with."""

    id: str
    created: int
    model: str

    @classmethod
    def of(cls, ask: Ask, model: str) -> Head:
        kind = "chatcmpl" if ask.chat else "cmpl"
        return cls(f"{kind}-{uuid.uuid4().hex}", int(time.time()), model)

    def reply(self, kind: str, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        about = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**about, "choices": list(choices), **more}


def number(logp: float) -> float | None:
    """A logprob in JSON."""
    return None if math.isnan(logp) else max(logp, _LEAST)


def usage(choices: Sequence[Choice], n: int) -> dict[str, int]:
    """Of a request's choices, n of each prompt: a prompt counts once."""
    prompt = sum(len(choice.prompt) for choice in choices[::n])
    new = sum(len(choice.tokens) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _name(token: int, word: str, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else word


def _top(token: Token, as_ids: bool) -> dict[str, float | None]:
    """The token itself and the likeliest: K or K + 1 entries, the token first."""
    found = {_name(token.id, token.word, as_ids): number(token.logp)}
    for other, logp, word in token.best:
        found.setdefault(_name(other, word, as_ids), number(logp))
    return found


def logprobs_of(
    tokens: Sequence[Token], ask: Ask, offset: int = 0, first: Token | None = None
) -> dict[str, list[Any]]:
    """The `logprobs` of a choice.

    Args:
        offset: characters before the first token.
        first: of a prompt, the token that nothing is before; its logprobs are null.
    """
    listed = [*([first] if first else []), *tokens]
    offsets = []
    for token in listed:
        offsets.append(offset)
        offset += len(token.word)
    unknown = [None] if first else []
    return {
        "tokens": [_name(t.id, t.word, ask.as_ids) for t in listed],
        "token_logprobs": [*unknown, *(number(t.logp) for t in tokens)],
        "top_logprobs": [*unknown, *(_top(t, ask.as_ids) for t in tokens)],
        "text_offset": offsets,
    }


def prompt_logprobs(scored: Sequence[Token]) -> list[dict[str, Any] | None]:
    """One entry a token of the prompt: null for the first, then by id; ranks count from 1."""
    rows: list[dict[str, Any] | None] = [None]
    for token in scored:
        rank = None if token.rank is None else token.rank + 1
        row = {str(token.id): _entry(token.logp, rank, token.word)}
        for k, (other, logp, word) in enumerate(token.best):
            row.setdefault(str(other), _entry(logp, k + 1, word))
        rows.append(row)
    return rows


def _entry(logp: float, rank: int | None, word: str) -> dict[str, Any]:
    return {"logprob": number(logp), "rank": rank, "decoded_token": word}


def chat_logprobs(tokens: Sequence[Token], as_ids: bool) -> dict[str, list[Any]]:
    """The `logprobs` of a choice of a chat."""

    def entry(token: int, logp: float, word: str) -> dict[str, Any]:
        name = _name(token, word, as_ids)
        return {"token": name, "logprob": number(logp), "bytes": list(name.encode())}

    return {
        "content": [
            {**entry(t.id, t.logp, t.word), "top_logprobs": [entry(*best) for best in t.best]}
            for t in tokens
        ]
    }


def completion_reply(ask: Ask, head: Head, choices: Sequence[Choice]) -> dict[str, Any]:
    """The reply of /v1/completions."""
    listed = []
    for choice in choices:
        echoed = ask.echo and ask.logprobs is not None
        before = choice.scored or [] if echoed else []
        entry: dict[str, Any] = {
            "index": choice.index,
            "text": (choice.prompt_text if ask.echo else "") + choice.text,
            "logprobs": None,
            "finish_reason": choice.why,
            "stop_reason": None,
            "prompt_logprobs": None if choice.scored is None else prompt_logprobs(choice.scored),
        }
        if ask.logprobs is not None:
            first = choice.first if echoed else None
            entry["logprobs"] = logprobs_of([*before, *choice.tokens], ask, first=first)
        if ask.return_token_ids:
            entry["token_ids"] = [t.id for t in choice.tokens]
            entry["prompt_token_ids"] = list(choice.prompt)
        listed.append(entry)
    return head.reply("text_completion", listed, usage=usage(choices, ask.n))


def chat_reply(ask: Ask, head: Head, choices: Sequence[Choice]) -> dict[str, Any]:
    """The reply of /v1/chat/completions."""
    listed, more = [], {}
    for choice in choices:
        message = message_of(choice.text, bool(ask.tools))
        called = bool(message.get("tool_calls"))
        entry: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", **message},
            "logprobs": None,
            "finish_reason": "tool_calls" if called else choice.why,
            "stop_reason": None,
        }
        if ask.logprobs is not None:
            entry["logprobs"] = chat_logprobs(choice.tokens, ask.as_ids)
        if ask.return_token_ids:
            entry["token_ids"] = [t.id for t in choice.tokens]
            more["prompt_token_ids"] = list(choice.prompt)
        if choice.scored is not None:
            more["prompt_logprobs"] = prompt_logprobs(choice.scored)
        listed.append(entry)
    return head.reply("chat.completion", listed, usage=usage(choices, ask.n), **more)


def message_of(text: str, tools: bool) -> Mapping[str, Any]:
    """An answer as a message: text, and calls of tools as Hermes writes them.

    >>> message_of('<tool_call>{"name": "f", "arguments": {}}</tool_call>', False)["content"][:11]
    '<tool_call>'
    """
    calls = []
    for block in _TOOL_CALL.findall(text) if tools else []:
        try:
            call = json.loads(block)
            name, arguments = call["name"], json.dumps(call.get("arguments", {}))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {"content": text}  # what is no call is shown as it is
        if not isinstance(name, str):
            return {"content": text}
        function = {"name": name, "arguments": arguments}
        calls.append({"id": f"call-{uuid.uuid4().hex}", "type": "function", "function": function})
    if not calls:
        return {"content": text}
    return {"content": text[: text.index("<tool_call>")] or None, "tool_calls": calls}
