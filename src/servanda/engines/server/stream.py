# Server-sent events: a chunk for each token, then the usage, then [DONE].

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from servanda.engines.server import chat, responses
from servanda.engines.server.jobs import Token
from servanda.engines.server.request import CompletionRequest
from servanda.engines.server.responses import Choice, Head

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class ClientDisconnected(Exception):  # noqa: N818 - a client may leave
    """The client has hung up."""


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """What the work comes to; it is cancelled where the client hangs up first.

    Raises:
        ClientDisconnected: the client has hung up, or the work has given it up.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
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
    request: CompletionRequest,
    head: Head,
    choices: Sequence[Choice],
    source: Source,
    failed: Callable[..., Any],
) -> AsyncIterator[bytes]:
    """The events of a reply.

    Args:
        source: (choice, its next token), and (choice, None) once it is over.
        failed: makes the JSON of an error.
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
        entry["logprobs"] = chat.chat_logprobs([token], request.as_ids)
    entry["token_ids"] = _ids(request, token)
    return [*entries, entry]
