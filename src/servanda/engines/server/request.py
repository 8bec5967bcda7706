# A request as vLLM has it: its fields, checked one by one, and what is refused.
#
# A field that would change a draw and is not known here is refused by name, never ignored.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from servanda.engines.neutral_fields import NEUTRAL
from servanda.errors import ServandaError
from servanda.theory.sampling import Sampling
from servanda.traces.corpus import NOT_READ, is_medium

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
