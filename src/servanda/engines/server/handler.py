# One request from its fields to its answers: encode, refuse, queue, collect.

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from servanda.engines.base import streams, verb_of
from servanda.engines.server.jobs import Ended, Event, Failed, Job, Token, sequence_of
from servanda.engines.server.parse import rendered
from servanda.engines.server.request import (
    MAX_LOGPROBS,
    CompletionRequest,
    RequestError,
    refuse_misfits,
)
from servanda.engines.server.responses import Choice
from servanda.engines.server.scheduler import Scheduler
from servanda.errors import MeasurementError, ServandaError
from servanda.theory.sampling import Sampling

T = TypeVar("T")
_ROOM = 4096  # tokens of a sequence, where the engine has no limit of its own
PLAIN = Sampling()  # type: ignore[call-arg]


class Handler:
    """Handles requests to an engine, through its queue."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.description = scheduler, scheduler.executor.description
        self._engine = scheduler.executor.engine
        self.longest = self.description.context or _ROOM
        self.streams = streams(self._engine)

    async def call(self, verb: Callable[..., T], *arguments: Any) -> T:
        """A short call of the engine.

        Raises:
            RequestError: the engine does not like what it was given.
        """
        try:
            return await asyncio.wrap_future(self.scheduler.call(verb, *arguments))
        except ServandaError as error:
            raise RequestError(_message_of(error)) from None

    async def encode(self, text: str, param: str = "prompt") -> tuple[int, ...]:
        if not self.description.encodes:
            raise RequestError("the engine has no tokenizer: send token ids", param)
        return tuple((await self.call(self._engine.encode, [text]))[0])

    async def decode(self, ids: tuple[int, ...]) -> str:
        if not self.description.decodes:
            raise RequestError("the engine has no tokenizer: it cannot decode", "tokens")
        self.refuse_unknown(ids, "tokens")
        return await self.call(self.scheduler.executor.detokenizer.text, ids)

    def refuse_unknown(self, ids: tuple[int, ...], param: str) -> None:
        size = self.description.vocab_size
        odd = next((i for i in ids if i < 0 or (size and i >= size)), None)
        if odd is not None:
            raise RequestError(f"{param} has the id {odd}, which is none of the {size}", param)

    async def rendered(self, request: CompletionRequest) -> CompletionRequest:
        """A chat, with its prompt by the model's template."""
        try:
            render = verb_of(self._engine, "render")
        except MeasurementError as error:
            raise RequestError(_message_of(error), "messages") from None
        try:
            tools = list(request.tools) or None
            text = await asyncio.wrap_future(self.scheduler.call(render, request.messages, tools))
        except ServandaError as error:
            raise RequestError(_message_of(error), "messages") from None
        except Exception as error:  # a template is a program that the model brings
            raise RequestError(
                f"the chat template refuses these messages: {type(error).__name__}: {error}",
                "messages",
            ) from None
        return rendered(request, text)

    async def choices(self, request: CompletionRequest) -> tuple[CompletionRequest, list[Choice]]:
        """The choices of a request, still empty, and the request with its numbers filled in.

        Raises:
            RequestError: it cannot be run.
        """
        prompts = [await self.encode(p) if isinstance(p, str) else p for p in request.prompts]
        refuse_misfits(request, prompts, self.description.vocab_size, self.longest)
        self._refuse_unscored(request)
        texts = list(request.prompts)
        if request.echo and self.description.decodes:
            texts = [await self.decode(p) if not isinstance(p, str) else p for p in texts]
        room = self.longest - max(map(len, prompts))
        numbers = {"logprobs": self._best(request.logprobs, "logprobs")}
        numbers |= {"prompt_logprobs": self._best(request.prompt_logprobs, "prompt_logprobs")}
        width = room if request.max_tokens is None else request.max_tokens
        request = dataclasses.replace(request, max_tokens=width, **numbers)
        choices = []
        for prompt, text in zip(prompts, texts, strict=True):
            first = None
            if request.prompt_logprobs is not None:
                word = (await self.call(self.scheduler.executor.detokenizer.of, [prompt[0]]))[0]
                first = Token(prompt[0], math.nan, word=word)
            for _ in range(request.n):
                text_or_none = text if isinstance(text, str) else ""
                choices.append(Choice(len(choices), prompt, text_or_none, first=first))
        return request, choices

    def _best(self, k: int | None, name: str) -> int | None:
        """How many top-k tokens, or a refusal in vLLM's words: clients read the limit there."""
        most = min(self.description.vocab_size or MAX_LOGPROBS, MAX_LOGPROBS)
        whole = k == -1 and self.description.vocab_size == most
        if k is not None and not whole and not 0 <= k <= most:
            raise RequestError(
                f"Requested {name} of {k}, which is greater than max allowed: {most}", name
            )
        return most if whole else k

    def _refuse_unscored(self, request: CompletionRequest) -> None:
        """What this engine cannot report.

        Raises:
            RequestError: it is asked for.
        """
        description = self.description
        if request.prompt_logprobs is not None and "prefill" not in description.scores:
            raise RequestError("this engine does not score prompts", "prompt_logprobs")
        if request.given is not None and "decode" not in description.scores:
            raise RequestError("this engine does not decode given tokens", "trace_decode_token_ids")
        if request.prompt_logprobs and not description.full_logits:
            raise RequestError("this engine scores without likeliest tokens", "prompt_logprobs")
        from_logits = request.given is not None or not self.streams
        if request.logprobs and from_logits and not description.full_logits:
            raise RequestError("this engine has no likeliest tokens", "logprobs")

    def answers(
        self, request: CompletionRequest, choices: list[Choice], aside: bool = False
    ) -> Results:
        """Queues a request.

        Args:
            aside: whether the engine that stands aside answers it, in test mode.

        Raises:
            QueueFullError: the queue has no place.
        """
        loop, events = asyncio.get_running_loop(), asyncio.Queue[tuple[Any, Event]]()

        def emitter(choice: Choice, of_prompt: bool) -> Callable[[Event], None]:
            def emit(event: Event) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended before the engine
                    loop.call_soon_threadsafe(events.put_nowait, ((choice, of_prompt), event))

            return emit

        jobs = self._jobs(request, choices, emitter)
        for job in jobs:
            job.aside = aside
        self.scheduler.put(jobs)
        silent = [] if request.max_tokens else choices
        return Results(self.scheduler, jobs, silent, events)

    def _jobs(
        self,
        request: CompletionRequest,
        choices: list[Choice],
        emitter: Callable[[Choice, bool], Callable[[Event], None]],
    ) -> list[Job]:
        seed = secrets.randbits(63) if request.seed is None else request.seed
        jobs: list[Job] = []
        for choice in choices:
            sequence, prompt = sequence_of(seed, choice.index), choice.prompt
            if request.prompt_logprobs is not None:
                choice.scored = []
                if choice.index % request.n:
                    choice.scored = choices[choice.index - choice.index % request.n].scored
                elif len(prompt) > 1:
                    emit, rest = emitter(choice, True), prompt[1:]
                    job = Job(prompt[:1], len(rest), PLAIN, sequence, emit, rest, "prefill")
                    jobs.append(dataclasses.replace(job, best=request.prompt_logprobs))
            if request.max_tokens:
                emit = emitter(choice, False)
                job = Job(
                    prompt, request.max_tokens, request.sampling, sequence, emit, request.given
                )
                more: Any = {"best": request.logprobs, "speaks": request.stream}
                more |= {"salt": request.salt}
                jobs.append(dataclasses.replace(job, **more))
        return jobs


class Results:
    """A queued request: its tokens as they come, each put into its choice."""

    def __init__(
        self,
        scheduler: Scheduler,
        jobs: list[Job],
        silent: list[Choice],
        events: asyncio.Queue[tuple[Any, Event]],
    ) -> None:
        self._batcher, self._jobs, self._events = scheduler, jobs, events
        self._silent = silent  # choices of no token

    async def __aiter__(self) -> AsyncIterator[tuple[Choice, Token | None]]:
        """(choice, its next token), and (choice, None) once it is over.

        Raises:
            Exception: what the engine raised.
        """
        left = len(self._jobs)
        while left:
            (choice, of_prompt), event = await self._events.get()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Ended):
                left -= 1
                if not of_prompt:
                    choice.text, choice.why = event.text, event.why
                    yield choice, None
                continue
            (choice.scored if of_prompt else choice.tokens).append(event)
            if not of_prompt:
                yield choice, event
        for choice in self._silent:
            yield choice, None

    def drop(self) -> None:
        """No one waits for it any more."""
        self._batcher.drop(self._jobs)


def _message_of(error: ServandaError) -> str:
    problem = error.problems[0]
    return f"{problem.message} ({problem.hint})" if problem.hint else problem.message
