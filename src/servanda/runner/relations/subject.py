# The kernel under test: requests by themselves or in company, with a cold or a warm cache.

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from servanda.contract.model import Kernel, Path
from servanda.engines import Engine
from servanda.engines.http import HTTPEngine
from servanda.engines.worker import spawn
from servanda.errors import MeasurementError
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

    Args:
        between: tokens of other requests that are sent after a cache is filled, before it is read.
        sent: requests so far; last: the one that was sent last; longest: prompt that was answered.
    """

    kernel: Kernel
    engine: Engine
    between: int = 0
    sent: int = 0
    last: Request | None = None
    longest: int = 0

    @classmethod
    def open(cls, kernel: Kernel, between: int = 0) -> Subject:
        """Open a kernel: a server here, any other in a process of its own.

        Raises:
            MeasurementError: the server does not respond, or the engine refuses the kernel.
        """
        engine = HTTPEngine(kernel) if kernel.url is not None else spawn(kernel, "kernel")
        return cls(kernel, engine, between)

    def answer(self, request: Request, *, width: int | None = None) -> Observation:
        """The request alone, of which nothing is cached."""
        return self._send([request.prompt], request.seed, width or request.width)[0]

    def together(self, request: Request) -> Observation:
        """The request, sent at once with the others."""
        prompts = [request.prompt, *request.others]
        return self._send(prompts, request.seed, request.width)[0]

    def each(self, requests: Sequence[Request], seed: int, width: int) -> list[Observation]:
        """Long answers to the prompts of some requests, sent at once."""
        return self._send([request.prompt for request in requests], seed, width)

    def after(self, request: Request, others: Sequence[Ids]) -> Observation:
        """The request after others, one at a time."""
        for n, other in enumerate(others):
            self._send([other], request.seed, request.width, first=n + 1)
        return self.answer(request)

    def warm(self, request: Request, salt: str | None = None) -> Observation:
        """The request after the others, all of one salt: what they share with it is cached.

        Args:
            salt: under which the others were sent before; default: they are sent now.
        """
        if salt is None:
            salt = self.fill(request)
            self._pass_by(request)
        before = self._hits() if self.kernel.url is not None else None
        found = self._send([request.prompt], request.seed, request.width, salt=salt)[0]
        after = self._hits() if before is not None else None
        if found.cached is None and before is not None and after is not None:
            return replace(found, cached=int(after - before))
        return found

    def fill(self, request: Request) -> str:
        """Send the others under a salt of their own, which is returned."""
        salt = secrets.token_hex(16)
        for n, other in enumerate(request.others):
            # the first one computes all: what a cache without salts holds is of another run
            self._send([other], request.seed, 1, first=n + 1, salt=salt, warm=n > 0)
        return salt

    def _pass_by(self, request: Request) -> None:
        """Send other requests, so that a cache with tiers moves what it holds to the next one."""
        most = min(_OTHER_TOKENS, (self.engine.describe().context or _OTHER_TOKENS) - 1)
        ids = np.array(request.prompt)
        for n in range(-(-self.between // most)):
            drawn = uniforms(request.seed, "pass by", n, most) * len(ids)
            other = tuple(ids[drawn.astype(np.int64)].tolist())
            self._send([other], request.seed, 1, first=n + 1)

    def scored(self, request: Request, tokens: Ids, path: Path = "prefill") -> Observation:
        """The given tokens after the prompt."""
        batch = Batch((0,), (request.prompt,), len(tokens), (tokens,), together=1)
        self.sent += 1
        return Observation.each(self.engine.score(batch, PLAIN, path))[0]

    def next(self, request: Request, token: int) -> Observation:
        """What comes after a prompt: the token is scored where a given one can be decoded."""
        if "decode" not in self.engine.describe().scores or self.kernel.url is not None:
            return self.answer(request, width=1)
        return self.scored(request, (token,), "decode")

    def close(self) -> None:
        self.engine.close()

    def _send(
        self,
        prompts: Sequence[Ids],
        seed: int,
        width: int,
        *,
        first: int = 0,
        salt: str | None = None,
        warm: bool = True,
    ) -> list[Observation]:
        """Answers of prompts that are sent at once; without a salt each has one of its own."""
        salts = tuple(salt or secrets.token_hex(16) for _ in prompts)
        batch = Batch(
            tuple(range(first, first + len(prompts))),
            tuple(prompts),
            width,
            together=len(prompts),
            salts=salts,
            warm=salt is not None and warm,
        )
        self.sent += len(prompts)
        self.last = Request(prompts[0], width, tuple(prompts[1:]), seed)
        found = Observation.each(self.engine.generate(batch, PLAIN, seed))
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
        assert isinstance(self.engine, HTTPEngine)
        page = self.engine.transport.text("/metrics") if self.engine.dialect.name == "vllm" else ""
        found = _HITS.findall(page or "")
        return sum(map(float, found)) if found else None
