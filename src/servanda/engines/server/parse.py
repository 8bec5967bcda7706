# What a request asks: from the bytes of a body to an Ask.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Mapping
from typing import Any

from pydantic_core import from_json

from servanda.engines.server.request import (
    MAX_SEQUENCES,
    ChatFields,
    CompletionFields,
    CompletionRequest,
    RequestError,
    read,
)
from servanda.traces.corpus import NOT_READ, part_of


async def received(parts: AsyncIterable[bytes], most: int, idle_s: float) -> bytes:
    """A request's body.

    Raises:
        RequestError: it has more than `most` bytes, or takes longer than `idle_s`.
    """

    async def collected() -> bytes:
        data = bytearray()
        async for part in parts:
            data += part
            if len(data) > most:
                raise RequestError(f"a body has {most} bytes at most", status=413)
        return bytes(data)

    try:
        return await asyncio.wait_for(collected(), idle_s)
    except asyncio.TimeoutError:
        raise RequestError(f"the body did not come within {idle_s:g} s", status=408) from None


def body_of(data: bytes) -> dict[str, Any]:
    """The JSON object of a request's body.

    Raises:
        RequestError: it is invalid.
    """
    try:
        body = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body is a JSON object, not a {type(body).__name__}")
    return body


def completion(body: Mapping[str, Any], served: str) -> CompletionRequest:
    """What a request of /v1/completions asks.

    Raises:
        RequestError: a field is wrong, or would change a draw and is not supported.
    """
    fields = read(CompletionFields, body, served)
    prompts = prompts_of(fields.prompt)
    if fields.add_special_tokens and any(isinstance(p, str) for p in prompts):
        raise RequestError(
            "prompts are encoded as they are: write special tokens into the text, or send ids",
            "add_special_tokens",
        )
    given = fields.trace_decode_token_ids
    if given is not None and len(prompts) > 1:
        raise RequestError("trace_decode_token_ids continues one prompt", "trace_decode_token_ids")
    if given is not None and fields.n > 1:
        raise RequestError("trace_decode_token_ids is one continuation: n is 1", "n")
    if fields.stream and fields.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs are not streamed", "prompt_logprobs")
    if len(prompts) * fields.n > MAX_SEQUENCES:
        raise RequestError(f"a request has {MAX_SEQUENCES} sequences at most", "n")
    scored = fields.prompt_logprobs
    if fields.echo and fields.logprobs is not None and scored is None:
        if fields.stream:
            raise RequestError("the logprobs of a prompt are not streamed", "echo")
        scored = fields.logprobs
    limited = "max_tokens" in body and body["max_tokens"] is not None
    return fields.request(
        prompts=prompts,
        max_tokens=len(given) if given is not None and not limited else fields.max_tokens,
        logprobs=fields.logprobs,
        prompt_logprobs=scored,
        given=tuple(given) if given is not None else None,
        echo=fields.echo,
    )


def chat(body: Mapping[str, Any], served: str) -> CompletionRequest:
    """What a request of /v1/chat/completions asks; its prompt is still to be rendered.

    Raises:
        RequestError: a field is wrong, or would change a draw and is not supported.
    """
    fields = read(ChatFields, body, served)
    if kind := part_of(fields.messages):
        raise RequestError(f"messages have a part of type {kind!r}: {NOT_READ}", "messages")
    if fields.add_special_tokens:
        raise RequestError("the chat template writes the special tokens", "add_special_tokens")
    if fields.top_logprobs and not fields.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    wanted = (fields.max_completion_tokens, fields.max_tokens)
    return fields.request(
        prompts=(),
        max_tokens=next((w for w in wanted if w is not None), None),
        logprobs=fields.top_logprobs if fields.logprobs else None,
        chat=True,
        messages=tuple(fields.messages),
        tools=tuple(fields.tools),
    )


def prompts_of(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """A text, token ids, or a list of either."""
    prompts = [value] if isinstance(value, str) or _ids(value) else value
    if (
        not isinstance(prompts, list)
        or not prompts
        or not all(isinstance(p, str) or _ids(p) for p in prompts)
    ):
        raise RequestError(
            "prompt is a text, token ids, or a list of either; none is empty", "prompt"
        )
    return tuple(p if isinstance(p, str) else tuple(p) for p in prompts)


def _ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)
