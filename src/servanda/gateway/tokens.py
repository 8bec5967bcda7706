# Tokens: how many a prompt has, and which, by asking a pool that has the tokenizer.  What infer
# says that it was asked is compared with what stable makes of the same request.

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

import msgspec

from servanda.gateway.asked import Asked
from servanda.gateway.config import Limits
from servanda.gateway.upstreams import Failed, Server

_REMEMBERED = 8192
_MOST = 64 << 20  # bytes of an answer


class _Tokens(msgspec.Struct):
    count: int | None = None
    tokens: list[int] | None = None


_read = msgspec.json.Decoder(_Tokens).decode


class Tokens:
    """Asks for prompts, each only once while it is remembered; no text is kept.

    Args:
        server: whom to ask; None where no pool may be asked now.
    """

    def __init__(self, limits: Limits, server: Callable[[], Server | None]) -> None:
        self._limits, self._server = limits, server
        self._known: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    async def count(self, asked: Asked) -> int | None:
        """Tokens of a prompt; None where nobody said in time."""
        if asked.known_tokens is not None:
            return asked.known_tokens
        if not asked.prompt or len(asked.body) > self._limits.read_bytes:
            return None
        body = msgspec.json.encode(asked.about)
        digest = blake2b(body, digest_size=16).digest()
        found = self._known.get(digest)
        if found is not None:
            self._known.move_to_end(digest)
            return found
        answer = await self._ask(body)
        if answer is None or answer.count is None:
            return None
        self._known[digest] = answer.count
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return answer.count

    async def ids(self, asked: Asked, server: Server | None = None) -> list[int] | None:
        """The ids of a prompt; None where nobody said in time.

        Args:
            server: the one to ask; None: stable, or infer while stable is down.
        """
        if asked.known_tokens is not None:
            try:
                return msgspec.json.decode(asked.prompt, type=list[int])
            except msgspec.DecodeError:
                return None
        answer = await self._ask(msgspec.json.encode(asked.about), server)
        return answer.tokens or None if answer is not None else None

    async def _ask(self, body: bytes, server: Server | None = None) -> _Tokens | None:
        server = server or self._server()
        if server is None:
            return None
        try:
            status, text = await server.ask("/tokenize", body, self._limits.count_s, _MOST)
            return _read(text) if status == 200 else None
        except (Failed, msgspec.DecodeError):
            return None
