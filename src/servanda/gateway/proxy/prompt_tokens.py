# Token counts and ids of prompts, from a pool that has the tokenizer.  The prompt tokens that infer
# reports are compared with stable's for the same request.

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

import msgspec

from servanda.gateway.proxy.config import Limits
from servanda.gateway.proxy.pools.upstreams import Server, UpstreamError
from servanda.gateway.proxy.request import CompletionRequest
from servanda.gateway.proxy.server_kinds import KINDS

_REMEMBERED = 8192
_MOST = 64 << 20  # bytes of a response


class _Tokens(msgspec.Struct):
    count: int | None = None
    tokens: list[int] | None = None


class _Text(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw(b"")


_read = msgspec.json.Decoder(_Tokens).decode
_rendered = msgspec.json.Decoder(_Text).decode


class PromptTokens:
    """Requests the tokens of prompts, with a cache; stores no text.

    Args:
        server: the pool to ask; None if none is available.
    """

    def __init__(self, limits: Limits, server: Callable[[], Server | None]) -> None:
        self._limits, self._server = limits, server
        self._known: OrderedDict[bytes, int] = OrderedDict()

    async def count(self, request: CompletionRequest) -> int | None:
        """Token count of a prompt; None on a timeout."""
        if request.known_tokens is not None:
            return request.known_tokens
        if not request.prompt or len(request.body) > self._limits.read_bytes:
            return None
        body = msgspec.json.encode(request.about)
        digest = blake2b(body, digest_size=16).digest()
        known = self._known.get(digest)
        if known is not None:
            self._known.move_to_end(digest)
            return known
        answer = await self._ask(request)
        if answer is None:
            return None
        count = len(answer.tokens or ()) if answer.count is None else answer.count
        if not count:
            return None
        self._known[digest] = count
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return count

    async def ids(
        self, request: CompletionRequest, server: Server | None = None
    ) -> list[int] | None:
        """Token ids of a prompt; None on a timeout.

        Args:
            server: the pool to ask; None: stable, or infer while stable is down.
        """
        if request.known_tokens is not None:
            try:
                return msgspec.json.decode(request.prompt, type=list[int])
            except msgspec.DecodeError:
                return None
        answer = await self._ask(request, server)
        return answer.tokens or None if answer is not None else None

    async def _ask(
        self, request: CompletionRequest, server: Server | None = None
    ) -> _Tokens | None:
        server = server or self._server()
        if server is None:
            return None
        template = KINDS[server.about.dialect].template
        body = msgspec.json.encode(request.about)
        try:
            if template:
                text = request.prompt
                if request.chat:
                    text = bytes(_rendered(await self._post(server, template, body)).prompt)
                if not text.startswith(b'"'):
                    return None
                # tokenized like the text of a request
                body = b'{"add_special":true,"parse_special":true,"content":' + text + b"}"
            return _read(await self._post(server, "/tokenize", body))
        except (UpstreamError, msgspec.DecodeError):
            return None

    async def _post(self, server: Server, path: str, body: bytes) -> bytes:
        status, text = await server.ask(path, body, self._limits.count_s, _MOST)
        if status != 200:
            raise UpstreamError("broken")
        return text
