# Servers behind a list of URLs, each scored and asked by itself.
#
# Axes: N scored tokens.

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from servanda.contract.model import Kernel
from servanda.engines.http.dialects.base import NEUTRAL
from servanda.engines.http.engine import HTTPEngine
from servanda.engines.http_policy import server_url
from servanda.errors import MeasurementError
from servanda.rl.sync_drill.servers.endpoints import ENDPOINTS
from servanda.rl.sync_drill.signals import TIMEOUT_S
from servanda.rl.sync_drill.trainee import Rows
from servanda.theory.sampling import Floats
from servanda.traces.trace import Batch

T = TypeVar("T")

_TOGETHER = 8  # replicas that are asked at once
_IN_FLIGHT = 16  # requests to one replica
_BLOCK = 64  # tokens of a block of a prefix cache, where the server does not say


class Replica:
    """One server.

    Args:
        url: its address; served: its name of the model, if it has several.
        dialect: its kind, as of a kernel's `dialect`; None asks it.
        key_env: environment variable with its API key.
        timeout_s: silence after which it is given up, seconds.

    Raises:
        MeasurementError: it does not answer, or gives no logprobs of a prompt.
    """

    def __init__(
        self,
        url: str,
        *,
        served: str | None = None,
        dialect: str | None = None,
        key_env: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if server_url(url) is None:
            raise MeasurementError(
                f"{url!r} is not the address of a server", hint="write http://HOST:PORT"
            )
        fields = {"url": url, "served": served, "dialect": dialect, "key_env": key_env}
        more = {"timeout_s": timeout_s, "batch_size": _IN_FLIGHT}
        self.engine = HTTPEngine(Kernel.model_validate({"engine": "openai_http", **fields, **more}))
        weakref.finalize(self, self.engine.close)
        self.url = self.engine.transport.url
        self.kind = self.engine.dialect.name
        if "prefill" not in self.engine.server.scores:
            raise MeasurementError(
                f"{self.url} gives no logprobs of a prompt (dialect {self.kind})",
                hint="serve the model with vLLM or SGLang, or pass Trainee(module, sync, score)",
            )

    def score(self, rows: Rows) -> list[Floats]:
        """Logprobs of each row's tokens except the first, nats, at temperature 1."""
        return self._scored(
            [(row[0],) for row in rows], [tuple(row[1:]) for row in rows], max(map(len, rows)) - 1
        )

    def decode_gap(self, prompts: Rows, seed: int) -> float:
        """Mean difference of a generated token's logprob from its score as part of a prompt, nats.

        Generation may read a prefix cache; scoring does not.
        """
        starts = [tuple(prompt) for prompt in prompts]
        drawn = self.engine.generate(_batch(starts, 1), NEUTRAL, seed)
        scored = self._scored(starts, [*drawn.continuations], 1)
        return float(np.nanmean(np.abs(drawn.columns["logp"] - np.concatenate(scored))))

    def draw(self, prompts: Rows, seed: int) -> None:
        """Generate one token of each prompt, which fills a prefix cache."""
        self.engine.generate(_batch([tuple(prompt) for prompt in prompts], 1), NEUTRAL, seed)

    @property
    def cached_tokens(self) -> int:
        """The length of a prompt of which a prefix cache keeps at least one block."""
        block = int(self.engine.server.facts.get("block_size", _BLOCK))
        longest = self.engine.server.context
        return 2 * block if longest is None else min(2 * block, longest - 1)

    def reload(self, folder: str) -> None:
        """Load the checkpoint of a folder.

        Raises:
            MeasurementError: the server cannot, or reports an error.
        """
        endpoints = ENDPOINTS.get(self.kind)
        if endpoints is None:
            raise MeasurementError(
                f"{self.url} has no known way to load a checkpoint (dialect {self.kind})",
                hint="pass sync=: the function that your trainer calls after an update",
            )
        endpoints.reload(self.engine.transport, folder)

    def version(self) -> str | None:
        """The version that it claims for its weights; None if it claims none."""
        endpoints = ENDPOINTS.get(self.kind)
        return endpoints.version(self.engine.transport) if endpoints else None

    def digests(self) -> dict[str, str] | None:
        """Digests of its tensors, by RANK:NAME; None if it reports none."""
        endpoints = ENDPOINTS.get(self.kind)
        return endpoints.digests(self.engine.transport) if endpoints else None

    def _scored(
        self, starts: list[tuple[int, ...]], given: list[tuple[int, ...]], width: int
    ) -> list[Floats]:
        trace = self.engine.score(_batch(starts, width, given), NEUTRAL, "prefill")
        return np.split(trace.columns["logp"], np.cumsum(trace.length_S)[:-1])


class Replicas:
    """Replicas of one engine, asked at once by a small pool of threads."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.all = tuple(replicas)
        twice = [r.url for r in self.all if sum(r.url == other.url for other in self.all) > 1]
        if twice or not self.all:
            raise MeasurementError(
                f"the URL {twice[0]} is given twice" if twice else "no URL of a server is given",
                hint="give each replica's own URL once",
            )

    def each(self, call: Callable[[Replica], T], among: Sequence[Replica] | None = None) -> list[T]:
        """The answers of some replicas in order, of all by default; the first error ends it."""
        asked = self.all if among is None else among
        pool = ThreadPoolExecutor(min(_TOGETHER, len(asked)))
        try:
            return [waiting.result() for waiting in [pool.submit(call, r) for r in asked]]
        finally:
            # no wait: one that hangs would hold up a timeout
            pool.shutdown(wait=False, cancel_futures=True)

    def score(self, rows: Rows) -> list[Floats]:
        """Scores by the first replica."""
        return self.all[0].score(rows)


def opened_at(
    urls: str | Sequence[str],
    *,
    served: str | None,
    dialect: str | None,
    key_env: str | None,
    timeout_s: float,
) -> Replicas:
    """The servers of some URLs; the arguments are those of Replica."""
    options = {"served": served, "dialect": dialect, "key_env": key_env}
    each = [urls] if isinstance(urls, str) else urls
    return Replicas([Replica(url, timeout_s=timeout_s, **options) for url in each])


def _batch(
    starts: Sequence[tuple[int, ...]], width: int, given: Sequence[tuple[int, ...]] = ()
) -> Batch:
    return Batch(tuple(range(len(starts))), tuple(starts), width, tuple(given))
