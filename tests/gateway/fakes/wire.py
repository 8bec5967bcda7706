# What a fake server reads of a request: its body, and what of it changes the reply.

from __future__ import annotations

from typing import Any

import msgspec

from tests.gateway.fakes.answers import WORDS, Asked

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
    if isinstance(given.prompt, list) or given.return_token_ids:
        prompt = _ids(given)
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


def tokenized(body: bytes) -> bytes:
    """The reply of /tokenize: words that the kernel knows.

    Raises:
        msgspec.MsgspecError: the body is none.
    """
    ids = _ids(_read(body))
    return msgspec.json.encode({"count": len(ids), "max_model_len": 1 << 20, "tokens": ids})


def _ids(given: _Body) -> tuple[int, ...]:
    if isinstance(given.prompt, list):
        return tuple(given.prompt)
    words = " ".join([given.prompt, *(str(m["content"]) for m in given.messages)]).split()
    return tuple(_IDS[word] for word in words if word in _IDS)


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
