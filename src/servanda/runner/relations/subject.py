# The kernel under test: requests by themselves or in company, with a cold or a warm cache.

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

import numpy as np

from servanda.contract.model import Kernel, Path
from servanda.engines import Engine
from servanda.engines.http import HTTPEngine
from servanda.engines.http.dialects.base import BEST, TOP, without_sampling
from servanda.engines.worker import spawn
from servanda.errors import MeasurementError
from servanda.runner.relations.client import ClientRequest
from servanda.runner.relations.observation import Ids, Observation
from servanda.theory.sampling import Sampling, uniforms
from servanda.traces.trace import Batch

_OTHER_TOKENS = 256  # of a request that passes by
PLAIN = Sampling()  # type: ignore[call-arg]
_HITS = re.compile(r"^vllm:prefix_cache_hits(?:_total)?\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Request:
    """A request, and the others that its answer must not depend on.

    Args:
        prompt: its token ids; width: new tokens at most.
        others: prompts of the requests beside it, before it, or that fill the cache.
        seed: of all draws.
    """

    prompt: Ids
    width: int
    others: tuple[Ids, ...] = ()
    seed: int = 0

    @property
    def tokens(self) -> int:
        return len(self.prompt) + self.width + sum(map(len, self.others))


@dataclass
class Subject:
    """An open kernel.

    The draws of a request follow from its prompt and its seed, whatever is sent beside it.

    Args:
        between: tokens of other requests that are sent after a cache is filled, before it is read.
        like: the user's own request; None where there is none.
        sent: requests so far; last: the one that was sent last; longest: prompt that was answered.
        claimed: requests of which nothing can be cached, and how many cached tokens they claim.
    """

    kernel: Kernel
    engine: Engine
    between: int = 0
    like: ClientRequest | None = None
    sent: int = 0
    last: Request | None = None
    longest: int = 0
    claimed: dict[Ids, int] = field(default_factory=dict)
    _alone: dict[tuple[Ids, int, int], Observation] = field(default_factory=dict)

    @classmethod
    def open(cls, kernel: Kernel, between: int = 0) -> Subject:
        """Open a kernel: a server here, any other in a process of its own.

        Raises:
            MeasurementError: the server does not respond, or the engine refuses the kernel.
        """
        engine = HTTPEngine(kernel) if kernel.url is not None else spawn(kernel, "kernel")
        return cls(kernel, engine, between)

    @property
    def remote(self) -> bool:
        return self.kernel.url is not None

    @property
    def _server(self) -> HTTPEngine:
        assert isinstance(self.engine, HTTPEngine)
        return self.engine

    def answer(self, request: Request) -> Observation:
        """The request alone, of which nothing is cached."""
        return self._cold([request.prompt], request)[0]

    def alone(self, request: Request) -> Observation:
        """The same; a request that was sent before is not sent again."""
        key = (request.prompt, request.width, request.seed)
        if key not in self._alone:
            self._alone[key] = self.answer(request)
        return self._alone[key]

    def together(self, request: Request) -> list[Observation]:
        """The request and the others, sent at once."""
        return self._cold([request.prompt, *request.others], request)

    def drawn(self, request: Request, named: bool = True) -> list[Observation]:
        """The same with longer lists, and equal prompts have draws of their own.

        Args:
            named: whether requests to a server name the sampling.
        """
        prompts = [request.prompt, *request.others]
        if not isinstance(engine := self.engine, HTTPEngine):
            return self._cold(prompts, request, alike=False)
        engine.best, engine.unnamed = TOP, not named
        try:
            return self._cold(prompts, request, alike=False)
        finally:
            engine.best, engine.unnamed = BEST, False

    def plain(self, request: Request) -> Observation:
        """The request alone, as a client sends it that knows no salts: a cache may be read."""
        return self._send([request.prompt], request, salts=(), warm=True)[0]

    def after(self, request: Request) -> Observation:
        """The request after the others, one at a time."""
        for other in request.others:
            self._cold([other], request)
        return self.answer(request)

    def warm(self, request: Request, salt: str) -> Observation:
        """The request after others of the same salt: what they share with it is cached."""
        before = self._hits() if self.remote else None
        found = self._send([request.prompt], request, salts=(salt,), warm=True)[0]
        after = self._hits() if before is not None else None
        if found.cached is None and before is not None and after is not None:
            return replace(found, cached=int(after - before))
        return found

    def fill(self, request: Request) -> str:
        """Send the others under a salt of their own, which is returned, and then others yet."""
        salt = secrets.token_hex(16)
        for n, other in enumerate(request.others):
            # the first one computes all: what a cache without salts holds is of another run
            self._send([other], replace(request, width=1), salts=(salt,), warm=n > 0)
        self._pass_by(request)
        return salt

    def _pass_by(self, request: Request) -> None:
        """Send other requests, so that a cache with tiers moves what it holds to the next one."""
        most = min(_OTHER_TOKENS, (self.engine.describe().context or _OTHER_TOKENS) - 1)
        ids = np.array(request.prompt)
        for n in range(-(-self.between // most)):
            drawn = uniforms(request.seed, "pass by", n, most) * len(ids)
            other = tuple(ids[drawn.astype(np.int64)].tolist())
            self._cold([other], replace(request, width=1))

    def scored(
        self, prompt: Ids, tokens: Ids, path: Path = "prefill", salt: str | None = None
    ) -> Observation:
        """The given tokens after the prompt.

        Args:
            salt: under which a cache may be read; default: none is.
        """
        salts = () if salt is None else (salt,)
        batch = Batch(
            (0,), (prompt,), len(tokens), (tokens,), together=1, salts=salts, warm=bool(salts)
        )
        self.sent += 1
        return Observation.each(self.engine.score(batch, PLAIN, path))[0]

    def next(self, request: Request, token: int) -> Observation:
        """What comes after a prompt: the token is scored where a given one can be decoded."""
        if "decode" not in self.engine.describe().scores or self.remote:
            return self.alone(replace(request, width=1))
        return self.scored(request.prompt, (token,), "decode")

    def asked(self, request: Request) -> ClientRequest:
        """The user's own request, or one that names every parameter."""
        self.last = request
        of = request.prompt, request.width, request.seed
        return self.like or ClientRequest.made(self._server, *of)

    def raw(self, client: ClientRequest) -> bool:
        """Whether the logprobs of its answer are those before any sampling."""
        body, server = client.fields, self._server
        neutral = without_sampling(body) == body and server.server.fills_in == {}
        return server.meaning == "raw" or client is not self.like or neutral

    def choices(
        self, client: ClientRequest, n: int = 1, *, stream: bool = False
    ) -> list[Observation]:
        """Those of one reply to a client's request."""
        self.sent += 1
        return client.answers(self._server, n=n, stream=stream)

    def crowd(self, client: ClientRequest, size: int) -> list[Observation]:
        """Replies to a client's request that is sent several times at once."""
        self.sent += size
        return client.crowd(self._server, size)

    def close(self) -> None:
        self.engine.close()

    def _cold(
        self, prompts: Sequence[Ids], request: Request, *, alike: bool = True
    ) -> list[Observation]:
        """Answers of prompts that are sent at once, each under a salt of its own."""
        salts = tuple(secrets.token_hex(16) for _ in prompts)
        found = self._send(prompts, request, salts=salts, warm=False, alike=alike)
        for prompt, one in zip(prompts, found, strict=True):
            if one.cached:
                self.claimed[prompt] = one.cached
        return found

    def _send(
        self,
        prompts: Sequence[Ids],
        request: Request,
        *,
        salts: tuple[str, ...],
        warm: bool,
        alike: bool = True,
    ) -> list[Observation]:
        """Answers of prompts that are sent at once.

        Args:
            salts: one of each prompt, or none.
            alike: whether equal prompts draw the same.
        """
        batch = Batch(
            tuple(map(_number, prompts)) if alike else tuple(range(len(prompts))),
            tuple(prompts),
            request.width,
            together=len(prompts),
            salts=salts,
            warm=warm,
        )
        self.sent += len(prompts)
        self.last = replace(request, prompt=prompts[0], others=tuple(prompts[1:]))
        found = Observation.each(self.engine.generate(batch, PLAIN, request.seed))
        if any(not one.tokens for one in found):
            raise MeasurementError(
                f"{self.kernel} lost a request", hint="look at the log of the server"
            )
        self.longest = max(self.longest, *map(len, prompts))
        return found

    def stopped(self) -> bool:
        """Whether a server that has answered requests does so no longer."""
        if not isinstance(self.engine, HTTPEngine) or not self.longest:
            return False
        try:
            self.engine.transport.text("/health")
        except MeasurementError:
            return True
        return False

    def _hits(self) -> float | None:
        """Tokens that vLLM says it has read from its prefix cache so far."""
        server = self._server
        page = server.transport.text("/metrics") if server.dialect.name == "vllm" else ""
        found = _HITS.findall(page or "")
        return sum(map(float, found)) if found else None


def _number(prompt: Ids) -> int:
    """Of a prompt's draws."""
    return crc32(np.array(prompt, dtype=np.int64).tobytes())
