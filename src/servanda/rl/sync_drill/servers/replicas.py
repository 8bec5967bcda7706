# Servers behind a list of URLs, each scored and asked by itself.
#
# Axes: N scored tokens.

from __future__ import annotations

import json
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from servanda.contract.model import Kernel
from servanda.engines.http.dialects.base import NEUTRAL
from servanda.engines.http.engine import HTTPEngine
from servanda.engines.http.responses import Part, shortened
from servanda.engines.http.transport import StatusError, Transport
from servanda.engines.http_policy import server_url
from servanda.errors import MeasurementError
from servanda.rl.sync_drill.signals import TIMEOUT_S
from servanda.rl.sync_drill.trainee import Rows
from servanda.theory.sampling import Floats
from servanda.traces.json_fields import words
from servanda.traces.trace import Batch

# What vLLM and SGLang offer besides scoring: to load a checkpoint, and the version and the digests
# of their weights.
#
# Read in the sources of vLLM 0.32 (entrypoints/rl/online and entrypoints/serve/dev) and of SGLang
# 0.5.23 (entrypoints/http_server.py).


_SHARED = "the server must see the folder of the checkpoint: name one that it shares, folder="


class WeightEndpoints(ABC):
    """How one kind of server takes over weights, and what it reports of them."""

    @abstractmethod
    def reload(self, transport: Transport, folder: str) -> None:
        """Load the checkpoint of a folder, and drop what was computed with other weights.

        Raises:
            MeasurementError: the server has no such endpoint, or reports an error.
        """

    @abstractmethod
    def version(self, transport: Transport) -> str | None:
        """The version that the server claims for its weights; None if it claims none."""

    @abstractmethod
    def digests(self, transport: Transport) -> dict[str, str] | None:
        """Digests of its tensors, by RANK:NAME; None if it reports none."""


class VLLMWeights(WeightEndpoints):
    def reload(self, transport: Transport, folder: str) -> None:
        dev = "start vLLM with the environment variable VLLM_SERVER_DEV_MODE=1, or pass sync="
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        _done(transport, "/collective_rpc", body, dev)
        # reload_weights keeps the prefixes that were computed with the old weights
        _done(transport, "/reset_prefix_cache", {}, dev)

    def version(self, transport: Transport) -> str | None:
        return _text(_optional(transport, "/weight_info"), "weight_version")

    def digests(self, transport: Transport) -> dict[str, str] | None:
        reply = _optional(transport, "/weight_checker", {"action": "checksum"})
        sums = reply.get("checksums") if reply else None
        return {name: part.text() for name, part in sums.fields()} if sums else None


class SGLangWeights(WeightEndpoints):
    def reload(self, transport: Transport, folder: str) -> None:
        # the server flushes its prefix cache by itself
        missing = "is it SGLang? Otherwise pass sync="
        _done(transport, "/update_weights_from_disk", {"model_path": folder}, missing)

    def version(self, transport: Transport) -> str | None:
        info = _optional(transport, "/model_info") or _optional(transport, "/get_model_info")
        return _text(info, "weight_version")

    def digests(self, transport: Transport) -> dict[str, str] | None:
        reply = _optional(transport, "/weights_checker", {"action": "checksum"})
        ranks = reply.get("ranks") if reply else None
        if ranks is None:
            return None
        found: dict[str, str] = {}
        for number, rank in enumerate(ranks.items()):
            sums = rank["checksums"].fields()
            found |= {f"rank{number}:{name}": part.text() for name, part in sums}
        return found


# dialect -> its endpoints
ENDPOINTS: Mapping[str, WeightEndpoints] = {"vllm": VLLMWeights(), "sglang": SGLangWeights()}


def _done(transport: Transport, endpoint: str, body: Mapping[str, Any], missing: str) -> None:
    """Post, and refuse a reply that reports an error, also one of status 200.

    Raises:
        MeasurementError: it does, or there is no such endpoint.
    """
    try:
        text = transport.text(endpoint, body)
    except StatusError as refused:
        message = refused.problems[0].message
        raise MeasurementError(
            message, hint=f"the server's log has the reason; {_SHARED}"
        ) from None
    if text is None:
        raise MeasurementError(f"{transport.url} has no endpoint {endpoint}", hint=missing)
    try:
        reply: Any = json.loads(text or "{}")
    except ValueError:
        reply = {"error": "no JSON"}
    if not isinstance(reply, dict) or reply.get("success") is False or reply.get("error"):
        raise MeasurementError(
            f"{transport.url}{endpoint} answered with status 200, and reports an error: "
            f"{words(shortened(text))}",
            hint=f"the server's log has the reason; {_SHARED}",
        )


def _optional(
    transport: Transport, endpoint: str, body: Mapping[str, Any] | None = None
) -> Part | None:
    """The reply of an endpoint that a server may lack, or refuse."""
    try:
        return transport.maybe(endpoint, body)
    except StatusError:
        return None


def _text(reply: Part | None, key: str) -> str | None:
    part = reply.get(key) if reply else None
    return None if part is None else str(part.value)


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
