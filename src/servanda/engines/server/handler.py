# One request from its fields to its answers: encode, refuse, queue, collect.

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import secrets
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from servanda.engines.base import streams, verb_of
from servanda.engines.server.fields import MAX_LOGPROBS
from servanda.engines.server.jobs import Event, Job, Token, sequence_of
from servanda.engines.server.parse import rendered
from servanda.engines.server.request import Ask, Refused, refuse_misfits
from servanda.engines.server.responses import Choice
from servanda.engines.server.results import Answers
from servanda.engines.server.scheduler import Batcher
from servanda.errors import MeasurementError, ServandaError
from servanda.theory.sampling import Sampling

T = TypeVar("T")
_ROOM = 4096  # tokens of a sequence, where the engine has no limit of its own
PLAIN = Sampling()  # type: ignore[call-arg]


class Asking:
    """What is asked of an engine, through its queue."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher, self.about = batcher, batcher.runner.about
        self._engine = batcher.runner.engine
        self.longest = self.about.context or _ROOM
        self.streams = streams(self._engine)

    async def call(self, verb: Callable[..., T], *arguments: Any) -> T:
        """A short call of the engine.

        Raises:
            Refused: the engine does not like what it was given.
        """
        try:
            return await asyncio.wrap_future(self.batcher.call(verb, *arguments))
        except ServandaError as error:
            raise Refused(_told(error)) from None

    async def encode(self, text: str, param: str = "prompt") -> tuple[int, ...]:
        if not self.about.encodes:
            raise Refused("the engine has no tokenizer: send token ids", param)
        return tuple((await self.call(self._engine.encode, [text]))[0])

    async def decode(self, ids: tuple[int, ...]) -> str:
        if not self.about.decodes:
            raise Refused("the engine has no tokenizer: it cannot decode", "tokens")
        self.refuse_unknown(ids, "tokens")
        return await self.call(self.batcher.runner.words.text, ids)

    def refuse_unknown(self, ids: tuple[int, ...], param: str) -> None:
        size = self.about.vocab_size
        odd = next((i for i in ids if i < 0 or (size and i >= size)), None)
        if odd is not None:
            raise Refused(f"{param} has the id {odd}, which is none of the {size}", param)

    async def rendered(self, ask: Ask) -> Ask:
        """A chat, with its prompt by the model's template."""
        try:
            render = verb_of(self._engine, "render")
        except MeasurementError as error:
            raise Refused(_told(error), "messages") from None
        try:
            tools = list(ask.tools) or None
            text = await asyncio.wrap_future(self.batcher.call(render, ask.messages, tools))
        except ServandaError as error:
            raise Refused(_told(error), "messages") from None
        except Exception as error:  # a template is a program that the model brings
            raise Refused(
                f"the chat template refuses these messages: {type(error).__name__}: {error}",
                "messages",
            ) from None
        return rendered(ask, text)

    async def choices(self, ask: Ask) -> tuple[Ask, list[Choice]]:
        """The choices of a request, still empty, and the request with its numbers filled in.

        Raises:
            Refused: it cannot be run.
        """
        prompts = [await self.encode(p) if isinstance(p, str) else p for p in ask.prompts]
        refuse_misfits(ask, prompts, self.about.vocab_size, self.longest)
        self._refuse_unscored(ask)
        texts = list(ask.prompts)
        if ask.echo and self.about.decodes:
            texts = [await self.decode(p) if not isinstance(p, str) else p for p in texts]
        room = self.longest - max(map(len, prompts))
        numbers = {"logprobs": self._best(ask.logprobs, "logprobs")}
        numbers |= {"prompt_logprobs": self._best(ask.prompt_logprobs, "prompt_logprobs")}
        width = room if ask.max_tokens is None else ask.max_tokens
        ask = dataclasses.replace(ask, max_tokens=width, **numbers)
        found = []
        for prompt, text in zip(prompts, texts, strict=True):
            first = None
            if ask.prompt_logprobs is not None:
                word = (await self.call(self.batcher.runner.words.of, [prompt[0]]))[0]
                first = Token(prompt[0], math.nan, word=word)
            for _ in range(ask.n):
                text_or_none = text if isinstance(text, str) else ""
                found.append(Choice(len(found), prompt, text_or_none, first=first))
        return ask, found

    def _best(self, asked: int | None, name: str) -> int | None:
        """How many likeliest tokens, or a refusal in vLLM's words: clients read the limit there."""
        most = min(self.about.vocab_size or MAX_LOGPROBS, MAX_LOGPROBS)
        whole = asked == -1 and self.about.vocab_size == most
        if asked is not None and not whole and not 0 <= asked <= most:
            found = f"Requested {name} of {asked}, which is greater than max allowed: {most}"
            raise Refused(found, name)
        return most if whole else asked

    def _refuse_unscored(self, ask: Ask) -> None:
        """What this engine cannot report.

        Raises:
            Refused: it is asked for.
        """
        about = self.about
        if ask.prompt_logprobs is not None and "prefill" not in about.scores:
            raise Refused("this engine does not score prompts", "prompt_logprobs")
        if ask.given is not None and "decode" not in about.scores:
            raise Refused("this engine does not decode given tokens", "trace_decode_token_ids")
        if ask.prompt_logprobs and not about.full_logits:
            raise Refused("this engine scores without likeliest tokens", "prompt_logprobs")
        from_logits = ask.given is not None or not self.streams
        if ask.logprobs and from_logits and not about.full_logits:
            raise Refused("this engine has no likeliest tokens", "logprobs")

    def answers(
        self,
        ask: Ask,
        choices: list[Choice],
        drawn_by: Mapping[str, float] | None = None,
        aside: bool = False,
    ) -> Answers:
        """Queues a request.

        Args:
            drawn_by: what of the sampling is other than declared, in test mode.
            aside: whether the engine that stands aside answers it, in test mode.

        Raises:
            Full: the queue has no place.
        """
        loop, events = asyncio.get_running_loop(), asyncio.Queue[tuple[Any, Event]]()

        def teller(choice: Choice, of_prompt: bool) -> Callable[[Event], None]:
            def tell(event: Event) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended before the engine
                    loop.call_soon_threadsafe(events.put_nowait, ((choice, of_prompt), event))

            return tell

        jobs = self._jobs(ask, choices, drawn_by, teller)
        for job in jobs:
            job.aside = aside
        self.batcher.put(jobs)
        silent = [] if ask.max_tokens else choices
        return Answers(self.batcher, jobs, silent, events)

    def _jobs(
        self,
        ask: Ask,
        choices: list[Choice],
        drawn_by: Mapping[str, float] | None,
        teller: Callable[[Choice, bool], Callable[[Event], None]],
    ) -> list[Job]:
        seed = secrets.randbits(63) if ask.seed is None else ask.seed
        other = ask.sampling.model_copy(update=dict(drawn_by)) if drawn_by else None
        jobs: list[Job] = []
        for choice in choices:
            sequence, prompt = sequence_of(seed, choice.index), choice.prompt
            if ask.prompt_logprobs is not None:
                choice.scored = []
                if choice.index % ask.n:
                    choice.scored = choices[choice.index - choice.index % ask.n].scored
                elif len(prompt) > 1:
                    tell, rest = teller(choice, True), prompt[1:]
                    job = Job(prompt[:1], len(rest), PLAIN, sequence, tell, rest, "prefill")
                    jobs.append(dataclasses.replace(job, best=ask.prompt_logprobs))
            if ask.max_tokens:
                tell = teller(choice, False)
                job = Job(prompt, ask.max_tokens, ask.sampling, sequence, tell, ask.given)
                more: Any = {"best": ask.logprobs, "speaks": ask.stream}
                more |= {"drawn_by": other if ask.given is None else None}
                jobs.append(dataclasses.replace(job, **more))
        return jobs


def _told(error: ServandaError) -> str:
    problem = error.problems[0]
    return f"{problem.message} ({problem.hint})" if problem.hint else problem.message
