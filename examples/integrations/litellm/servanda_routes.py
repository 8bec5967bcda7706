# A hook for LiteLLM's router and proxy: of the deployments of a model, keep those of the pool that
# Servanda's leader decides for the request.
#
# A deployment names its pool: model_info: {servanda_pool: infer}, or stable. Models without such
# deployments are left alone. Copy this file beside your proxy's config.yaml.

from __future__ import annotations

import os
import uuid
from typing import Any

import httpx
from litellm.integrations.custom_logger import CustomLogger

_POOL = "servanda_pool"


class ServandaRoutes(CustomLogger):
    """Ask POST /v1/route/decide for each request.

    Args:
        gateway: URL of the leader's listener; key: of a holder with the role gateway.
        labels: keys of the request's metadata that are labels of the contract, of the same name.
        timeout_s: longest wait for the leader; then stable serves.
    """

    def __init__(
        self, gateway: str, key: str, labels: tuple[str, ...] = (), timeout_s: float = 1.0
    ) -> None:
        super().__init__()
        self._at, self._labels, self._timeout_s = f"{gateway}/v1/route/decide", labels, timeout_s
        self._headers = {"authorization": f"Bearer {key}"}
        self._client: httpx.AsyncClient | None = None  # of the loop that asks first

    async def async_filter_deployments(
        self,
        model: str,
        healthy_deployments: list,
        messages: list | None,
        request_kwargs: dict | None = None,
        parent_otel_span: Any = None,
    ) -> list[dict]:
        """The deployments of the decided pool; stable's if there is no decision."""
        pools = {pool(deployment) for deployment in healthy_deployments}
        if not pools & {"infer", "stable"}:
            return healthy_deployments
        request = request_kwargs if request_kwargs is not None else {}
        metadata = request.get("metadata") or request.get("litellm_metadata") or {}
        decision = await self._decide(request, metadata)
        metadata["servanda"] = decision  # for your logs: pool, sampled, chance, reason, version
        chosen = decision["pool"] or "stable"
        kept = [d for d in healthy_deployments if pool(d) == chosen]
        if not kept and chosen == "infer":  # it is cooling down; never the other way round
            kept = [d for d in healthy_deployments if pool(d) == "stable"]
        return kept

    async def _decide(self, request: dict, metadata: dict) -> dict:
        own = metadata.get("requester_metadata", metadata)  # in the proxy, what the client sent
        labels = {name: str(own[name]) for name in self._labels if own.get(name) is not None}
        # a retry of LiteLLM has the same trace, so it gets the same decision
        name = str(request.get("litellm_trace_id") or uuid.uuid4())
        session = request.get("litellm_session_id") or request.get("user")
        sticky = f"{metadata.get('user_api_key_hash') or ''} {session or name}"
        facts = {"request": name[:1024], "sticky": sticky[:1024], "labels": labels}
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=self._timeout_s, headers=self._headers)
        try:
            reply = await self._client.post(self._at, json=facts)
            reply.raise_for_status()
            return reply.json()
        except (httpx.HTTPError, ValueError) as error:
            return {"pool": "stable", "reason": f"no decision: {type(error).__name__}"}


def pool(deployment: dict) -> str | None:
    return (deployment.get("model_info") or {}).get(_POOL)


routes = ServandaRoutes(
    os.environ.get("SERVANDA_GATEWAY", "http://127.0.0.1:8081").rstrip("/"),
    os.environ.get("SERVANDA_GATEWAY_KEY", ""),
    tuple(os.environ.get("SERVANDA_LABELS", "").split()),
)
