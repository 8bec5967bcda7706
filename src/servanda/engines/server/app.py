# The routes: the requests of clients, and error replies.

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from servanda._version import __version__
from servanda.engines.base import Engine, streams, verb_of
from servanda.engines.server import parse, responses
from servanda.engines.server.parse import (
    MAX_LOGPROBS,
    CompletionRequest,
    RequestError,
    refuse_misfits,
)
from servanda.engines.server.responses import (
    Choice,
    Head,
    chat_reply,
    completion_reply,
    failed,
    json_reply,
    not_found,
)
from servanda.engines.server.scheduler import (
    Ended,
    Event,
    Failed,
    Job,
    QueueFullError,
    Scheduler,
    Token,
    sequence_of,
)
from servanda.errors import MeasurementError, ServandaError
from servanda.theory.sampling import Sampling, uniforms

# A server that fails on purpose: faults of the transport, for tests of clients.
#
# Only in test mode.  A fault strikes a seeded share of the requests for completions.  What an
# engine gets wrong from its start is the `fault=` of its kernel; `kernel` lets it go wrong later,
# as a build does that was sound when it was described.


Kind = Literal["hang", "drop", "status", "garble", "slow", "kernel"]
_STRUCK = ("/v1/completions", "/v1/chat/completions")


class Fault(BaseModel):
    """One fault of the transport.

    hang: no answer ever.  drop: the connection is closed without one.  status: an error.
    garble: the body is no JSON.  slow: the answer comes late.  kernel: every batch
    that begins from now on is run by the same kernel with `fault` of the catalogue in it, and
    the server's description is unchanged; with `when`, only for requests whose
    `metadata` says so, and the others run in batches of their own, by the sound kernel.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    kind: Kind
    share: float = Field(1.0, ge=0, le=1)
    seed: int = 0
    status: int = Field(503, ge=400, le=599)
    seconds: float = Field(1.0, ge=0, le=3600)
    fault: dict[str, Any] | None = Field(None, min_length=1, max_length=1)
    when: dict[str, str] | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _of_a_kernel(self) -> Fault:
        if (self.kind == "kernel") != (self.fault is not None):
            raise ValueError("kind kernel has a fault of the catalogue, and no other kind has one")
        if self.kind == "kernel" and self.share != 1:
            raise ValueError(
                "a kernel is at fault for all requests, or for those of a `when`: leave out share"
            )
        if self.kind != "kernel" and self.when is not None:
            raise ValueError("only kind kernel has a `when`")
        return self


class FaultInjector:
    """What is on, and which requests it strikes."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.requests = self.struck = 0

    def read(self, body: dict[str, Any]) -> Fault:
        """A fault as it is asked for.

        Raises:
            RequestError: no such fault.
        """
        try:
            return Fault.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            message = f"{name}: {first['msg']}" if name else first["msg"]
            raise RequestError(f"{message}; kinds: {get_args(Kind)}", name or None) from None

    def begin(self, fault: Fault | None) -> None:
        """Counts requests anew, so that the same share strikes the same ones; None: it ends."""
        self.fault = fault
        self.requests = self.struck = 0

    def status(self) -> dict[str, Any]:
        on = self.fault.model_dump(exclude_none=True) if self.fault else None
        return {"fault": on, "asked": self.requests, "struck": self.struck}

    def next(self) -> Fault | None:
        """The fault of the next request, if it has one."""
        if self.fault is None:
            return None
        self.requests += 1
        if self.fault.when is not None:  # told by its body, which is not read yet
            return None
        if uniforms(self.fault.seed, "misbehave", self.requests, 1)[0] >= self.fault.share:
            return None
        self.struck += 1
        return self.fault

    def strikes(self, body: Mapping[str, Any]) -> bool:
        """Whether the metadata of a request make it one of those that `when` is for."""
        when = self.fault.when if self.fault is not None else None
        metadata = body.get("metadata")
        if when is None or not isinstance(metadata, dict):
            return False
        struck = all(metadata.get(name) == value for name, value in when.items())
        self.struck += struck
        return struck


class FaultMiddleware:
    """An application behind a transport that fails on purpose."""

    def __init__(self, app: ASGIApp, injector: FaultInjector) -> None:
        self._app, self._injector = app, injector

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generates = scope["type"] == "http" and scope["path"] in _STRUCK
        fault = self._injector.next() if generates else None
        if fault is None:
            return await self._app(scope, receive, send)
        if fault.kind in ("hang", "drop"):
            if fault.kind == "drop":
                # uvicorn's `send` is a method of what holds the connection
                send.__self__.transport.abort()  # type: ignore[attr-defined]
            return await disconnected(receive)
        if fault.kind == "status":
            message = f"the server misbehaves on purpose: {fault.status}"
            error = {"message": message, "type": "Misbehaviour", "param": None}
            body = json.dumps({"error": {**error, "code": fault.status}}).encode()
            return await _reply(send, fault.status, body)
        if fault.kind == "garble":  # neither JSON nor UTF-8
            return await _reply(send, 200, b"{\xff\xfe")
        if fault.kind == "slow":
            await asyncio.sleep(fault.seconds)
        return await self._app(scope, receive, send)


async def _reply(send: Send, status: int, body: bytes) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def disconnected(receive: Receive) -> None:
    """Wait until the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass


# Server-sent events: a chunk for each token, then the usage, then [DONE].


DONE = b"data: [DONE]\n\n"


class ClientDisconnected(Exception):  # noqa: N818 - a client may leave
    """The client has hung up."""


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """What the work comes to; it is cancelled where the client hangs up first.

    Raises:
        ClientDisconnected: the client has hung up, or the work has given it up.
    """
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done() and not tasks[0].cancelled():
            return tasks[0].result()
        raise ClientDisconnected
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, allow_nan=False).encode() + b"\n\n"


class EventStream(Response):
    """Sends events as they come, until the client hangs up; calls `ended` at the end.

    Args:
        idle_s: how long a client may read nothing of what waits for it; then it is given up.
    """

    def __init__(
        self, events: AsyncIterator[bytes], ended: Callable[[], None], idle_s: float
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]  # no one knows it yet
        self._events, self._ended, self._idle_s = events, [ended], idle_s

    def and_then(self, ended: Callable[[], None]) -> None:
        """One more thing to do at the end."""
        self._ended.append(ended)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in self._events:
                await part(data, True)
                await asyncio.sleep(0)  # neither call above need pause: others have their turn here
            self._end()  # anyone who has read it all finds the place free
            await part(b"", False)

        async def part(data: bytes, more: bool) -> None:
            task = asyncio.current_task()
            late = asyncio.get_running_loop().call_later(self._idle_s, task.cancel)  # type: ignore
            try:
                await send({"type": "http.response.body", "body": data, "more_body": more})
            finally:
                late.cancel()

        try:
            with contextlib.suppress(ClientDisconnected):
                await unless_disconnected(receive, sent())
        finally:
            self._end()

    def _end(self) -> None:
        while self._ended:
            self._ended.pop(0)()


Source = AsyncIterable[tuple[Choice, Token | None]]


async def chunks(
    request: CompletionRequest, head: Head, choices: Sequence[Choice], source: Source
) -> AsyncIterator[bytes]:
    """The events of a reply.

    Args:
        source: (choice, its next token), and (choice, None) once it is over.
    """
    write = _chat_chunk if request.chat else _completion_chunk
    kind = "chat.completion.chunk" if request.chat else "text_completion"
    begun: set[int] = set()
    ended: set[int] = set()
    try:
        async for choice, token in source:
            if token is None and choice.index in ended:
                continue
            new = choice.index not in begun
            begun.add(choice.index)
            if token is None or token.end is not None:
                ended.add(choice.index)
            for entry in write(request, choice, token, new):
                yield event(head.reply(kind, [entry]))
        if request.include_usage:
            yield event(head.reply(kind, [], usage=responses.usage(choices, request.n)))
    except Exception as error:
        yield event(failed(error))
    yield DONE


def _completion_chunk(
    request: CompletionRequest, choice: Choice, token: Token | None, new: bool
) -> list[Any]:
    text = choice.prompt_text if request.echo and new else ""
    entry: dict[str, Any] = {
        "index": choice.index,
        "text": text + (token.text if token else ""),
        "logprobs": None,
        "finish_reason": choice.why if token is None else token.end,
        "stop_reason": None,
    }
    if request.logprobs is not None and token is not None:
        offset = sum(len(t.word) for t in choice.tokens[:-1])
        entry["logprobs"] = responses.logprobs_of([token], request, offset)
    entry["token_ids"] = _ids(request, token)
    entry["prompt_token_ids"] = list(choice.prompt) if new and request.return_token_ids else None
    return [entry]


def _ids(request: CompletionRequest, token: Token | None) -> list[int] | None:
    return ([token.id] if token else []) if request.return_token_ids else None


def _chat_chunk(
    request: CompletionRequest, choice: Choice, token: Token | None, new: bool
) -> list[Any]:
    """The role comes first."""
    entries: list[dict[str, Any]] = []
    if new:
        delta = {"role": "assistant", "content": ""}
        entries.append({"index": choice.index, "delta": delta, "finish_reason": None})
        entries[0]["prompt_token_ids"] = list(choice.prompt) if request.return_token_ids else None
    entry: dict[str, Any] = {
        "index": choice.index,
        "delta": {"content": token.text if token else ""},
        "logprobs": None,
        "finish_reason": choice.why if token is None else token.end,
    }
    if request.logprobs is not None and token is not None:
        entry["logprobs"] = responses.chat_logprobs([token], request.as_ids)
    entry["token_ids"] = _ids(request, token)
    return [*entries, entry]


# One request from its fields to its answers: encode, refuse, queue, collect.


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

    async def encode(self, text: str) -> tuple[int, ...]:
        if not self.description.encodes:
            raise RequestError("the engine has no tokenizer: send token ids", "prompt")
        return tuple((await self.call(self._engine.encode, [text]))[0])

    async def decode(self, ids: tuple[int, ...]) -> str:
        if not self.description.decodes:
            raise RequestError("the engine has no tokenizer: it cannot decode", "tokens")
        size = self.description.vocab_size
        odd = next((i for i in ids if i < 0 or (size and i >= size)), None)
        if odd is not None:
            raise RequestError(f"tokens has the id {odd}, which is none of the {size}", "tokens")
        return await self.call(self.scheduler.executor.detokenizer.text, ids)

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
        return dataclasses.replace(request, prompts=(text,))

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


Endpoint = Callable[[Request], Awaitable[Response]]
Faulty = Callable[[Mapping[str, Any]], Engine]  # a fault -> the served kernel with it
_LEFT = 499  # no one reads it
_OF_A_PROMPT = (
    *("model", "messages", "tools"),
    *("add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
)


@dataclass(frozen=True)
class Limits:
    """How much a server takes on.

    Args:
        max_batch: sequences that run together; wait_s: how long the oldest waits for company.
        places: sequences that may wait; in_flight: requests that are being answered.
        body_bytes: of a request; idle_s: how long its client may neither send nor read.
    """

    max_batch: int = 8
    wait_s: float = 0.005
    places: int = 1024
    in_flight: int = 256
    body_bytes: int = 8 << 20
    idle_s: float = 60.0


class Server:
    """An engine behind the routes.

    Args:
        faulty: opens the same kernel with a fault, in test mode.
    """

    def __init__(
        self,
        engine: Engine,
        served: str,
        limits: Limits,
        test_mode: bool,
        faulty: Faulty | None = None,
    ) -> None:
        self.served, self.limits = served, limits
        room = {"max_batch": limits.max_batch, "wait_s": limits.wait_s, "places": limits.places}
        self.scheduler = Scheduler(engine, **room)
        self.handler = Handler(self.scheduler)
        self.injector = FaultInjector() if test_mode else None
        self._sound, self._open_faulty, self._faulty = engine, faulty, None
        self._one_at_a_time = asyncio.Lock()
        self._in_flight = 0

    def app(self) -> ASGIApp:
        routes = [
            Route("/health", self._health),
            Route("/version", self._version),
            Route("/v1/models", self._models),
            Route("/servanda/describe", self._describe),
            Route("/tokenize", self._guarded(self._tokenize), methods=["POST"]),
            Route("/detokenize", self._guarded(self._detokenize), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
        ]
        if self.injector is not None:
            at, endpoint = "/servanda/misbehave", self._guarded(self._misbehave)
            routes.append(Route(at, endpoint, methods=["GET", "POST", "DELETE"]))
        app = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={HTTPException: not_found},  # type: ignore[dict-item]
        )
        return FaultMiddleware(app, self.injector) if self.injector else app

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self.scheduler.close()
            if self._faulty is not None:
                self._faulty.close()

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        """The handler within the limits; whatever it raises is told as JSON."""

        async def guarded(http_request: Request) -> Response:
            if self._in_flight >= self.limits.in_flight:
                message = f"{self._in_flight} requests are being answered, and no more are taken"
                return json_reply(failed(QueueFullError(message, hint="ask again later")))
            self._in_flight += 1
            response = None
            try:
                response = await endpoint(http_request)
                return response
            except (ClientDisconnected, ClientDisconnect):
                return Response(status_code=_LEFT)
            except Exception as error:
                return json_reply(failed(error))
            finally:
                if isinstance(response, EventStream):
                    response.and_then(self._leave)
                else:
                    self._leave()

        return guarded

    def _leave(self) -> None:
        self._in_flight -= 1

    async def _health(self, _: Request) -> Response:
        return Response()

    async def _version(self, _: Request) -> Response:
        return json_reply({"version": __version__})

    async def _models(self, _: Request) -> Response:
        model = {"id": self.served, "object": "model", "created": 0, "owned_by": "servanda"}
        more = {"root": self.served, "max_model_len": self.handler.longest}
        return json_reply({"object": "list", "data": [{**model, **more}]})

    async def _describe(self, _: Request) -> Response:
        description = self.handler.description
        fields = {k: v for k, v in asdict(description).items() if k != "tensors"}
        how = {
            "version": __version__,
            "logprobs": "processed",
            "prompt_logprobs": "raw",
            "filters": ["temperature", "top_k", "top_p", "min_p"],
            "sampling_defaults": Sampling().model_dump(exclude_none=True),  # type: ignore[call-arg]
            "streams": self.handler.streams,
        }
        digests = {"digest": description.digest, "weights": description.weights}
        room = {"max_model_len": self.handler.longest, "max_logprobs": MAX_LOGPROBS}
        return json_reply({**fields, **digests, **how, **room, "test_mode": bool(self.injector)})

    async def _tokenize(self, http_request: Request) -> Response:
        body = await self._body(http_request)
        if body.get("messages") is not None:
            request = parse.chat({k: body[k] for k in _OF_A_PROMPT if k in body}, self.served)
            text = (await self.handler.rendered(request)).prompts[0]
        else:
            text = body.get("prompt")
        if not isinstance(text, str):
            raise RequestError("prompt is a text, or messages are those of a chat", "prompt")
        if body.get("add_special_tokens"):
            raise RequestError("texts are encoded as they are", "add_special_tokens")
        ids = await self.handler.encode(text)
        counts = {"count": len(ids), "max_model_len": self.handler.longest}
        return json_reply({**counts, "tokens": list(ids), "token_strs": None})

    async def _detokenize(self, http_request: Request) -> Response:
        tokens = (await self._body(http_request)).get("tokens")
        if not isinstance(tokens, list) or not all(type(i) is int for i in tokens):
            raise RequestError("tokens is a list of token ids", "tokens")
        return json_reply({"prompt": await self.handler.decode(tuple(tokens))})

    async def _completions(self, http_request: Request) -> Response:
        body = await self._body(http_request)
        return await self._answer(http_request, body, parse.completion(body, self.served))

    async def _chat(self, http_request: Request) -> Response:
        body = await self._body(http_request)
        request = parse.chat(body, self.served)
        return await self._answer(http_request, body, await self.handler.rendered(request))

    async def _answer(
        self, http_request: Request, body: Mapping[str, Any], request: CompletionRequest
    ) -> Response:
        request, choices = await self.handler.choices(request)
        head = Head.of(request, self.served)
        aside = self.injector is not None and self.injector.strikes(body)
        source = self.handler.answers(request, choices, aside)
        if request.stream:
            events = chunks(request, head, choices, source)
            return EventStream(events, source.drop, self.limits.idle_s)

        async def collected() -> None:
            async for _ in source:
                pass

        try:
            await unless_disconnected(http_request.receive, collected())
        finally:
            source.drop()
        return json_reply(
            (chat_reply if request.chat else completion_reply)(request, head, choices)
        )

    async def _misbehave(self, http_request: Request) -> Response:
        assert self.injector is not None
        if http_request.method == "POST":
            fault = self.injector.read(await self._body(http_request))
            await self._run_by(fault)
            self.injector.begin(fault)
        elif http_request.method == "DELETE":
            await self._run_by(None)
            self.injector.begin(None)
        return json_reply(self.injector.status())

    async def _run_by(self, fault: Fault | None) -> None:
        """Let the batches that begin from now on be run by the sound engine, or by a faulty one.

        Raises:
            RequestError: the engine cannot have this fault.
        """
        async with self._one_at_a_time:
            before, self._faulty = self._faulty, None
            if fault is not None and fault.fault is not None:
                if self._open_faulty is None:
                    raise RequestError("this server cannot open its kernel again", "fault")
                try:
                    # beside the engine's thread: who is served meanwhile does not wait
                    self._faulty = await asyncio.to_thread(self._open_faulty, fault.fault)
                except ServandaError as error:
                    self._faulty = before
                    raise RequestError(error.problems[0].message, "fault") from None
            some = fault is not None and fault.when is not None
            by = (self._sound, self._faulty) if some else (self._faulty or self._sound, None)
            await self.scheduler.run_by(*by)
            if before is not None:
                before.close()

    async def _body(self, http_request: Request) -> dict[str, Any]:
        most, idle_s = self.limits.body_bytes, self.limits.idle_s
        return parse.body_of(await parse.received(http_request.stream(), most, idle_s))
