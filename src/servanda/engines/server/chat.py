# Answers as messages of a chat.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servanda.engines.server.jobs import Token
from servanda.engines.server.request import CompletionRequest
from servanda.engines.server.responses import Choice, Head, number, token_name, usage


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
    listed = []
    for choice in choices:
        entry: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text},
            "logprobs": None,
            "finish_reason": choice.why,
            "stop_reason": None,
        }
        if request.logprobs is not None:
            entry["logprobs"] = chat_logprobs(choice.tokens, request.as_ids)
        entry["token_ids"] = [t.id for t in choice.tokens] if request.return_token_ids else None
        listed.append(entry)
    prompt = list(choices[0].prompt) if request.return_token_ids else None
    counts = usage(choices, request.n)
    return head.reply("chat.completion", listed, usage=counts, prompt_token_ids=prompt)
