# A request that is understood, and what is refused.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from servanda.errors import ServandaError
from servanda.theory.sampling import Sampling


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


def refuse_misfits(
    request: CompletionRequest, prompts: Sequence[Sequence[int]], vocab_size: int, longest: int
) -> None:
    """What the engine could not run, before it joins a batch with others.

    Raises:
        RequestError: an empty prompt, an id that is none, or more tokens than there is room for.
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
