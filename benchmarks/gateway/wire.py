# What a fake server reads of a request: its body, and what of it changes the reply.

from __future__ import annotations

from typing import Any

import msgspec

from benchmarks.gateway.answers import WORDS, Asked

_IDS = {word: i for i, word in enumerate(WORDS)}


class _Body(msgspec.Struct):
    model: str = "fake"
    prompt: str | list[int] = ""
    messages: list[Any] = []
    stream: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


_read = msgspec.json.Decoder(_Body).decode


def asked(path: bytes, body: bytes) -> Asked:
    """What a body asks for.

    Raises:
        msgspec.MsgspecError: it is none.
    """
    given = _read(body)
    chat = path.endswith(b"chat/completions")
    logprobs = given.logprobs
    if chat:
        logprobs = (given.top_logprobs or 0) if given.logprobs else None
    width = given.max_completion_tokens or given.max_tokens or 16
    prompt: tuple[int, ...] = ()
    if isinstance(given.prompt, list):
        prompt = tuple(given.prompt)
    elif given.return_token_ids:
        said = " ".join(str(m["content"]) for m in given.messages) if chat else given.prompt
        prompt = tuple(_IDS[word] for word in said.split() if word in _IDS)
    return Asked(
        chat=chat,
        stream=given.stream,
        width=width,
        logprobs=None if logprobs is None else int(logprobs),
        ids=given.return_token_ids,
        named=given.return_tokens_as_token_ids,
        model=given.model,
        prompt=prompt,
    )


def unchunked(data: bytes, at: int) -> tuple[bytes, int] | None:
    """A body in chunks and where it ends; None where it is not whole."""
    parts = []
    while True:
        stop = data.find(b"\r\n", at)
        if stop < 0:
            return None
        size = int(data[at:stop].split(b";")[0], 16)
        if len(data) < stop + 2 + size + 2:
            return None
        parts.append(data[stop + 2 : stop + 2 + size])
        at = stop + 2 + size + 2
        if not size:
            return b"".join(parts), at
