# The routes: the requests of clients, and error replies.

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from servanda._version import __version__
from servanda.engines.base import Engine
from servanda.engines.server import parse
from servanda.engines.server.chat import chat_reply
from servanda.engines.server.fault_injection import Fault, FaultInjector, FaultMiddleware
from servanda.engines.server.handler import Handler
from servanda.engines.server.request import MAX_LOGPROBS, CompletionRequest, RequestError
from servanda.engines.server.responses import Head, completion_reply, failed, json_reply, not_found
from servanda.engines.server.scheduler import QueueFullError, Scheduler
from servanda.engines.server.stream import (
    ClientDisconnected,
    EventStream,
    chunks,
    unless_disconnected,
)
from servanda.errors import ServandaError
from servanda.theory.sampling import Sampling

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
            events = chunks(request, head, choices, source, failed)
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
