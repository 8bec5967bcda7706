# What a request asks: fields as vLLM has them, checked one by one.
#
# A field that would change a draw and is not known here is refused by name, never ignored.

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from servanda.errors import ServandaError
from servanda.sampling import Sampling

MAX_LOGPROBS = 1024  # or the vocabulary, where that is less
MAX_SEQUENCES = 128
_INT64 = 2**63
_COLDEST = 0.01  # as vLLM: below it, logits over the temperature leave their range

# of no consequence for what is drawn
_HARMLESS = {"user", "cache_salt", "request_id", "service_tier", "store", "metadata"}
_HARMLESS |= {"skip_special_tokens", "spaces_between_special_tokens", "parallel_tool_calls"}
# field -> the values that change nothing
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "stop": ("", []),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "min_tokens": (0,),
    "best_of": (1,),
    "suffix": ("",),
    "priority": (0,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "response_format": ({"type": "text"},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


class Refused(ServandaError):  # noqa: N818 - of the request, and no fault of the server
    """A request that cannot be answered as it is."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


@dataclass(frozen=True)
class Ask:
    """A request that is understood.

    Args:
        prompts: texts, or token ids.
        max_tokens: None: as many as the context has room for.
        logprobs, prompt_logprobs: likeliest tokens of each position; None: no logprobs.
        given: what is decoded instead of draws.
        tools: what the model may call, in a chat.
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
    chat: bool = False
    messages: tuple[Any, ...] = ()
    tools: tuple[Any, ...] = ()


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
    prompt_logprobs: int | None = Field(None, ge=-1)
    stream: bool = False
    stream_options: _StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    add_special_tokens: bool = False
    trace_decode_token_ids: list[int] | None = Field(None, min_length=1)

    def ask(self, **more: Any) -> Ask:
        given = self.trace_decode_token_ids
        if given is not None and self.n > 1:
            raise Refused("trace_decode_token_ids is one continuation: n is 1", "n")
        if self.stream and self.prompt_logprobs is not None:
            raise Refused("prompt_logprobs are not streamed", "prompt_logprobs")
        return Ask(
            sampling=self._sampling(),
            seed=self.seed,
            n=self.n,
            stream=self.stream,
            include_usage=bool(self.stream_options and self.stream_options.include_usage),
            return_token_ids=self.return_token_ids,
            as_ids=self.return_tokens_as_token_ids,
            given=tuple(given) if given is not None else None,
            **{"prompt_logprobs": self.prompt_logprobs, **more},
        )

    def _sampling(self) -> Sampling:
        if self.temperature == 0:  # greedy: the likeliest token, which then has probability 1
            return Sampling(temperature=1.0, top_k=1, top_p=1.0, min_p=0.0)
        if self.temperature < _COLDEST:
            raise Refused(f"a temperature is 0, or {_COLDEST} at least", "temperature")
        top_k = self.top_k if self.top_k > 0 else None
        return Sampling(
            temperature=self.temperature, top_k=top_k, top_p=self.top_p, min_p=self.min_p
        )


class _Completion(_Common):
    prompt: Any
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=-1)
    echo: bool = False


class _Chat(_Common):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=0)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=-1)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Literal["auto", "none"] = "auto"


def body_of(data: bytes) -> dict[str, Any]:
    """The JSON object of a request's body.

    Raises:
        Refused: it is none.
    """
    try:
        body = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused(f"the body is a JSON object, not a {type(body).__name__}")
    return body


def completion(body: Mapping[str, Any], served: str) -> Ask:
    """What a request of /v1/completions asks.

    Raises:
        Refused: a field is wrong, or would change a draw and is not supported.
    """
    fields = _read(_Completion, body, served)
    prompts = prompts_of(fields.prompt)
    if fields.add_special_tokens and any(isinstance(p, str) for p in prompts):
        raise Refused(
            "prompts are encoded as they are: write special tokens into the text, or send ids",
            "add_special_tokens",
        )
    if fields.trace_decode_token_ids is not None and len(prompts) > 1:
        raise Refused("trace_decode_token_ids continues one prompt", "trace_decode_token_ids")
    if len(prompts) * fields.n > MAX_SEQUENCES:
        raise Refused(f"a request has {MAX_SEQUENCES} sequences at most", "n")
    scored = fields.prompt_logprobs
    if fields.echo and fields.logprobs is not None and scored is None:
        if fields.stream:
            raise Refused("the logprobs of a prompt are not streamed", "echo")
        scored = fields.logprobs
    told = "max_tokens" in body and body["max_tokens"] is not None
    given = fields.trace_decode_token_ids
    return fields.ask(
        prompts=prompts,
        max_tokens=len(given) if given is not None and not told else fields.max_tokens,
        logprobs=fields.logprobs,
        prompt_logprobs=scored,
        echo=fields.echo,
    )


def chat(body: Mapping[str, Any], served: str) -> Ask:
    """What a request of /v1/chat/completions asks; its prompt is still to be rendered.

    Raises:
        Refused: a field is wrong, or would change a draw and is not supported.
    """
    fields = _read(_Chat, body, served)
    if fields.add_special_tokens:
        raise Refused("the chat template writes the special tokens", "add_special_tokens")
    if fields.top_logprobs and not fields.logprobs:
        raise Refused("top_logprobs needs logprobs: true", "top_logprobs")
    wanted = (fields.max_completion_tokens, fields.max_tokens)
    given = fields.trace_decode_token_ids
    return fields.ask(
        prompts=(),
        max_tokens=next((w for w in wanted if w is not None), len(given) if given else None),
        logprobs=fields.top_logprobs if fields.logprobs else None,
        chat=True,
        messages=tuple(fields.messages),
        tools=tuple(fields.tools) if fields.tool_choice == "auto" else (),
    )


def prompts_of(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """A text, token ids, or a list of either."""
    one = [value] if isinstance(value, str) or _ids(value) else value
    if not isinstance(one, list) or not one or not all(isinstance(p, str) or _ids(p) for p in one):
        raise Refused("prompt is a text, token ids, or a list of either; none is empty", "prompt")
    return tuple(p if isinstance(p, str) else tuple(p) for p in one)


def rendered(ask: Ask, text: str) -> Ask:
    """A chat, with its prompt."""
    return dataclasses.replace(ask, prompts=(text,))


def _ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def _read(model: Any, body: Mapping[str, Any], served: str) -> Any:
    """The fields of a body that are not of no consequence.

    Raises:
        Refused: one is wrong or not supported.
    """
    fields = {name: value for name, value in body.items() if value is not None}
    for name in [name for name in fields if name in _HARMLESS]:
        del fields[name]
    for name, neutral in _NEUTRAL.items():
        if name in fields and name not in model.model_fields and fields.pop(name) not in neutral:
            raise Refused(
                f"{name} is not supported: it would change what is drawn; leave it out", name
            )
    try:
        read = model.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            message = f"{name} is not supported: it might change what is drawn; leave it out"
        else:
            message = f"{name}: {first['msg']}"
        raise Refused(message, name) from None
    if read.model not in (None, served):
        raise Refused(f"there is no model {read.model!r}: this is {served!r}", "model", 404)
    return read


def refuse_misfits(
    ask: Ask, prompts: Sequence[Sequence[int]], vocab_size: int, longest: int
) -> None:
    """What the engine could not run, before it joins a batch with others.

    Raises:
        Refused: an empty prompt, an id that is none, or more tokens than there is room for.
    """
    for ids in prompts:
        if not ids:
            raise Refused("the prompt has no token", "prompt")
        for name, tokens in (("prompt", ids), ("trace_decode_token_ids", ask.given or ())):
            odd = next((t for t in tokens if t < 0 or (vocab_size and t >= vocab_size)), None)
            if odd is not None:
                end = f"end at {vocab_size - 1}" if vocab_size else "begin at 0"
                raise Refused(f"{name} has the token id {odd}, and ids {end}", name)
        new = ask.max_tokens if ask.max_tokens is not None else 1
        if len(ask.given or ()) > new:
            raise Refused(f"{len(ask.given or ())} tokens are given for {new} new", "max_tokens")
        if len(ids) + new > longest:
            raise Refused(
                f"{len(ids)} tokens of prompt and {new} new are more than the model's {longest}",
                "max_tokens",
            )
