# Answers as messages of a chat, and the calls of tools in them.

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from servanda.engines.server.jobs import Token
from servanda.engines.server.request import CompletionRequest
from servanda.engines.server.responses import (
    Choice,
    Head,
    number,
    prompt_logprobs,
    token_name,
    usage,
)

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)


def chat_logprobs(tokens: Sequence[Token], as_ids: bool) -> dict[str, list[Any]]:
    """The `logprobs` of a choice of a chat."""

    def entry(token: int, logp: float, word: str) -> dict[str, Any]:
        name = token_name(token, word, as_ids)
        return {"token": name, "logprob": number(logp), "bytes": list(name.encode())}

    return {
        "content": [
            {**entry(t.id, t.logp, t.word), "top_logprobs": [entry(*best) for best in t.best]}
            for t in tokens
        ]
    }


def chat_reply(request: CompletionRequest, head: Head, choices: Sequence[Choice]) -> dict[str, Any]:
    """The reply of /v1/chat/completions."""
    listed, more = [], {}
    for choice in choices:
        message = message_of(choice.text, bool(request.tools))
        called = bool(message.get("tool_calls"))
        entry: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", **message},
            "logprobs": None,
            "finish_reason": "tool_calls" if called else choice.why,
            "stop_reason": None,
        }
        if request.logprobs is not None:
            entry["logprobs"] = chat_logprobs(choice.tokens, request.as_ids)
        entry["token_ids"] = [t.id for t in choice.tokens] if request.return_token_ids else None
        more["prompt_token_ids"] = list(choice.prompt) if request.return_token_ids else None
        if choice.scored is not None:
            more["prompt_logprobs"] = prompt_logprobs(choice.scored)
        listed.append(entry)
    return head.reply("chat.completion", listed, usage=usage(choices, request.n), **more)


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
