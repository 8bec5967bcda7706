# What vLLM and SGLang offer besides scoring: to load a checkpoint, and the version and the digests
# of their weights.
#
# Read in the sources of vLLM 0.32 (entrypoints/rl/online and entrypoints/serve/dev) and of SGLang
# 0.5.23 (entrypoints/http_server.py).

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from servanda.engines.http.responses import Part, shortened
from servanda.engines.http.transport import StatusError, Transport
from servanda.errors import MeasurementError

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
            f"{shortened(text)}",
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
