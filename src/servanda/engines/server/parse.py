# What a request asks, as vLLM has it: from the bytes of a body, its fields, checked one by one.
#
# A field that would change a draw and is not known here is refused by name, never ignored.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from servanda.engines.neutral_fields import NEUTRAL
from servanda.errors import ServandaError
from servanda.theory.sampling import Sampling
from servanda.traces.corpus import NOT_READ, is_medium, part_of

MAX_LOGPROBS = 1024  # or the vocabulary, where that is less
MAX_SEQUENCES = 128
_INT64 = 2**63
_COLDEST = 0.01  # as vLLM: below it, logits over the temperature leave their range

# of no consequence for what is drawn
_HARMLESS = {"user", "request_id", "service_tier", "store", "metadata"}
_HARMLESS |= {"skip_special_tokens", "spaces_between_special_tokens"}
# field -> the values that change nothing
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "priority": (0,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


class RequestError(ServandaError):
    """A request that cannot be answered as it is."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


@dataclass(frozen=True)
class CompletionRequest:
    """A request that is understood.

    Args:
        prompts: texts, or token ids.
        max_tokens: None: as many as the context has room for.
        logprobs, prompt_logprobs: top-k tokens of each position; None: no logprobs.
        given: what is decoded instead of draws.
        salt: only requests of one salt share cached prefixes.
        tools: for the chat template.
    """

    prompts: tuple[str | tuple[int, ...], ...]
    sampling: Sampling
    max_tokens: int | None
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    as_ids: bool = False
    given: tuple[int, ...] | None = None
    salt: str = ""
    chat: bool = False
    messages: tuple[Any, ...] = ()
    tools: tuple[Any, ...] = ()


def refuse_misfits(
    request: CompletionRequest, prompts: Sequence[Sequence[int]], vocab_size: int, longest: int
) -> None:
    """What the engine could not run, before it joins a batch with others.

    Raises:
        RequestError: an empty prompt, an invalid id, or more tokens than the context has room for.
    """
    for ids in prompts:
        if not ids:
            raise RequestError("the prompt has no token", "prompt")
        for name, tokens in (("prompt", ids), ("trace_decode_token_ids", request.given or ())):
            odd = next((t for t in tokens if t < 0 or (vocab_size and t >= vocab_size)), None)
            if odd is not None:
                end = f"end at {vocab_size - 1}" if vocab_size else "begin at 0"
                raise RequestError(f"{name} has the token id {odd}, and ids {end}", name)
        new = request.max_tokens if request.max_tokens is not None else 1
        if len(request.given or ()) > new:
            raise RequestError(
                f"{len(request.given or ())} tokens are given for {new} new", "max_tokens"
            )
        if len(ids) + new > longest:
            raise RequestError(
                f"{len(ids)} tokens of prompt and {new} new are more than the model's {longest}",
                "max_tokens",
            )


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _StreamOptions(_Strict):
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class _Common(_Strict):
    model: str | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=_INT64)
    min_p: float = Field(0.0, ge=0, lt=1)
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    n: int = Field(1, ge=1, le=MAX_SEQUENCES)
    stream: bool = False
    stream_options: _StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    add_special_tokens: bool = False
    cache_salt: str | None = Field(None, min_length=1)

    def request(self, **more: Any) -> CompletionRequest:
        return CompletionRequest(
            sampling=self._sampling(),
            seed=self.seed,
            n=self.n,
            stream=self.stream,
            include_usage=bool(self.stream_options and self.stream_options.include_usage),
            return_token_ids=self.return_token_ids,
            as_ids=self.return_tokens_as_token_ids,
            salt=self.cache_salt or "",
            **more,
        )

    def _sampling(self) -> Sampling:
        if self.temperature == 0:  # greedy: the most likely token, which then has probability 1
            return Sampling(temperature=1.0, top_k=1, top_p=1.0, min_p=0.0)
        if self.temperature < _COLDEST:
            raise RequestError(f"a temperature is 0, or {_COLDEST} at least", "temperature")
        top_k = self.top_k if self.top_k > 0 else None
        return Sampling(
            temperature=self.temperature, top_k=top_k, top_p=self.top_p, min_p=self.min_p
        )


class CompletionFields(_Common):
    prompt: Any
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=-1)
    prompt_logprobs: int | None = Field(None, ge=-1)
    trace_decode_token_ids: list[int] | None = Field(None, min_length=1)
    echo: bool = False


class ChatFields(_Common):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=0)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=-1)
    tools: list[dict[str, Any]] = Field(default_factory=list)


def read(model: Any, body: Mapping[str, Any], served: str) -> Any:
    """The fields of a body that are not of no consequence.

    Raises:
        RequestError: one is wrong or not supported.
    """
    fields = {name: value for name, value in body.items() if value is not None}
    for name in [name for name in fields if name in _HARMLESS]:
        del fields[name]
    for name, neutral in _NEUTRAL.items():
        if name in fields and name not in model.model_fields and fields.pop(name) not in neutral:
            raise RequestError(
                f"{name} is not supported: it would change what is drawn; leave it out", name
            )
    try:
        validated = model.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden" and is_medium(name):
            message = f"{name} is not supported: {NOT_READ}"
        elif first["type"] == "extra_forbidden":
            message = f"{name} is not supported: it might change what is drawn; leave it out"
        else:
            message = f"{name}: {first['msg']}"
        raise RequestError(message, name) from None
    if validated.model not in (None, served):
        raise RequestError(
            f"there is no model {validated.model!r}: this is {served!r}", "model", 404
        )
    return validated


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
