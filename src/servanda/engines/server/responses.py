# Tokens and errors to JSON, as vLLM writes it: ids that no one asked for are null.
#
# Logprobs are processed: the log of the probability that a token was really drawn with.  Those
# of a prompt are of the model alone, before temperature and filters, as vLLM's are.  JSON has
# no infinity, so that -inf is -9999.0 here as there; a logprob that no one knows is null.

from __future__ import annotations

import json
import math
import time
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from servanda.engines.server.parse import CompletionRequest, RequestError
from servanda.engines.server.scheduler import QueueFullError, Token
from servanda.errors import ServandaError

# Answers as messages of a chat.


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


_LEAST = -9999.0
_ERRORS = {400: "BadRequestError", 404: "NotFoundError", 429: "TooManyRequestsError"}


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
    def of(cls, request: CompletionRequest, model: str) -> Head:
        kind = "chatcmpl" if request.chat else "cmpl"
        return cls(f"{kind}-{uuid.uuid4().hex}", int(time.time()), model)

    def reply(self, kind: str, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        about = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**about, "choices": list(choices), **more}


def number(logp: float) -> float | None:
    """A logprob in JSON."""
    return None if math.isnan(logp) else max(logp, _LEAST)


def usage(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """Of a request's choices, n of each prompt: a prompt counts once."""
    prompt = sum(len(choice.prompt) for choice in choices[::n])
    new = sum(len(choice.tokens) for choice in choices)
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": new}
    counts["total_tokens"] = prompt + new
    cached = [choice.tokens[0].cached for choice in choices if choice.tokens]
    known = [tokens for tokens in cached if tokens is not None]
    if known:
        counts["prompt_tokens_details"] = {"cached_tokens": sum(known)}
    return counts


def token_name(token: int, word: str, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else word


def _top(token: Token, as_ids: bool) -> dict[str, float | None]:
    """The token itself and the likeliest: K or K + 1 entries, the token first."""
    logprobs = {token_name(token.id, token.word, as_ids): number(token.logp)}
    for other, logp, word in token.best:
        logprobs.setdefault(token_name(other, word, as_ids), number(logp))
    return logprobs


def logprobs_of(
    tokens: Sequence[Token], request: CompletionRequest, offset: int = 0, first: Token | None = None
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
        "tokens": [token_name(t.id, t.word, request.as_ids) for t in listed],
        "token_logprobs": [*unknown, *(number(t.logp) for t in tokens)],
        "top_logprobs": [*unknown, *(_top(t, request.as_ids) for t in tokens)],
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


def completion_reply(
    request: CompletionRequest, head: Head, choices: Sequence[Choice]
) -> dict[str, Any]:
    """The reply of /v1/completions."""
    listed = []
    for choice in choices:
        echoed = request.echo and request.logprobs is not None
        before = choice.scored or [] if echoed else []
        entry: dict[str, Any] = {
            "index": choice.index,
            "text": (choice.prompt_text if request.echo else "") + choice.text,
            "logprobs": None,
            "finish_reason": choice.why,
            "stop_reason": None,
            "prompt_logprobs": None if choice.scored is None else prompt_logprobs(choice.scored),
        }
        if request.logprobs is not None:
            first = choice.first if echoed else None
            entry["logprobs"] = logprobs_of([*before, *choice.tokens], request, first=first)
        entry["token_ids"] = [t.id for t in choice.tokens] if request.return_token_ids else None
        entry["prompt_token_ids"] = list(choice.prompt) if request.return_token_ids else None
        listed.append(entry)
    return head.reply("text_completion", listed, usage=usage(choices, request.n))


def failed(error: Exception) -> dict[str, Any]:
    """The JSON of an error: the client's own, the queue's, or the engine's."""
    param, status, message = None, 500, f"{type(error).__name__}: {error}"
    if isinstance(error, RequestError):
        param, status = error.param, error.status
    elif isinstance(error, QueueFullError):
        status = 429
    if isinstance(error, ServandaError):
        message = "\n".join(map(str, error.problems))
    else:
        traceback.print_exception(error)
    kind = _ERRORS.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


async def not_found(_: Request, error: HTTPException) -> Response:
    return json_reply(failed(RequestError(str(error.detail), status=error.status_code)))


def json_reply(data: dict[str, Any]) -> Response:
    status = data["error"]["code"] if "error" in data else 200
    headers = {"retry-after": "1"} if status == 429 else None
    body = json.dumps(data, allow_nan=False)
    return Response(body, status, headers, media_type="application/json")
