# Envoy's external authorization: one check of a request, by gRPC or by HTTP.
#
# Nothing is authorized here: every request is allowed, with the headers that route it, but for
# those that the contract or the gateway refuses.

from __future__ import annotations

from importlib import import_module
from typing import Any

from starlette.types import Receive, Scope, Send

from servanda.gateway.envoy.request_route import MOST, Ask, RequestRoutes, foreign
from servanda.gateway.http.error_replies import ErrorReply, send_error, send_whole

AT = "/authz"  # path_prefix of the HTTP service in Envoy's configuration
_PERMISSION_DENIED = 7
_PARTIAL = "x-envoy-auth-partial-body"


class Authorization:
    """The gRPC service envoy.service.auth.v3.Authorization."""

    def __init__(self, routes: RequestRoutes) -> None:
        self._routes = routes
        self._pb: Any = import_module("envoy.service.auth.v3.external_auth_pb2")
        self._grpc: Any = import_module("envoy.service.auth.v3.external_auth_pb2_grpc")

    def join(self, server: Any) -> None:
        self._grpc.add_AuthorizationServicer_to_server(self, server)

    async def Check(self, request: Any, context: Any) -> Any:
        """Allow a request, with its headers; or deny it with a status and a body."""
        http = request.attributes.request.http
        headers = dict(http.headers) | {h.key: _text(h) for h in http.header_map.headers}
        # an empty body and one that Envoy was not told to send look alike
        body = http.raw_body or http.body.encode() or None
        reply = self._pb.CheckResponse()
        try:
            ask = Ask(http.path, headers, body, headers.get(_PARTIAL) != "true")
            routed = self._routes.headers(ask)
        except ErrorReply as error:
            reply.status.code = _PERMISSION_DENIED
            reply.denied_response.status.code = error.status
            reply.denied_response.body = error.body.decode()
            media = reply.denied_response.headers.add().header
            media.key, media.value = "content-type", "application/json"
            return reply
        reply.ok_response.headers_to_remove.extend(foreign(headers))
        for name, value in routed.items():
            option = reply.ok_response.headers.add()
            option.header.key, option.header.value = name, value
            option.append_action = option.OVERWRITE_IF_EXISTS_OR_ADD
        return reply


def _text(header: Any) -> str:
    return header.value or header.raw_value.decode("latin-1")


async def check_http(routes: RequestRoutes, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a check by HTTP: 200 with the headers that route the request, or its refusal.

    The path is that of the request below `AT`.
    """
    body = bytearray()
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if len(body) > MOST:
                raise ErrorReply(413, f"a body has {MOST >> 20} MiB at most", "too_large")
            if not message.get("more_body"):
                break
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        whole, path = headers.get(_PARTIAL) != "true", scope["path"].removeprefix(AT)
        routed = routes.headers(Ask(path, headers, bytes(body) or None, whole))
    except ErrorReply as error:
        await send_error(send, error)
        return
    more = [(name.encode(), value.encode()) for name, value in routed.items()]
    await send_whole(send, 200, more, b"")
