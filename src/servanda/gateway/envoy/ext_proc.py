# Envoy's external processor: a stream per request, whose headers and body come as messages.
#
# Body modes: NONE and STREAMED route by the headers alone, because Envoy forwards them before the
# body is read. BUFFERED routes when the body is there. FULL_DUPLEX_STREAMED hands the body over,
# and it is sent back behind the headers. Responses are not read.

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

from servanda.gateway.envoy.request_route import MOST, Ask, RequestRoutes, foreign
from servanda.gateway.http.error_replies import ErrorReply

_CHUNK = 62 << 10  # bytes of a streamed part; Envoy recommends less than 64 KiB
_BUFFERED, _PARTIAL, _DUPLEX = 2, 3, 4  # of ProcessingMode.BodySendMode


class Processor:
    """The gRPC service envoy.service.ext_proc.v3.ExternalProcessor."""

    def __init__(self, routes: RequestRoutes) -> None:
        self._routes = routes
        base = "envoy.service.ext_proc.v3.external_processor_pb2"
        self._pb: Any = import_module(base)
        self._grpc: Any = import_module(f"{base}_grpc")

    def join(self, server: Any) -> None:
        self._grpc.add_ExternalProcessorServicer_to_server(self, server)

    async def Process(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Route one request; the stream ends with its request, and Envoy goes on without us."""
        ask, body, mode = Ask("", {}), bytearray(), 0
        async for message in requests:
            if message.HasField("protocol_config"):
                mode = message.protocol_config.request_body_mode
            kind = message.WhichOneof("request")
            replies: Iterator[Any] = iter(())
            done = False
            try:
                if kind == "request_headers":
                    headers = {h.key: _text(h) for h in message.request_headers.headers.headers}
                    ask = Ask(headers.get(":path", ""), headers, id=self._routes.new_id())
                    done = message.request_headers.end_of_stream
                    if done or mode not in (_BUFFERED, _PARTIAL, _DUPLEX):
                        replies, done = iter([self._headers(ask)]), True
                    elif mode != _DUPLEX:
                        go_on = self._pb.ProcessingResponse()
                        go_on.request_headers.response.status = self._pb.CommonResponse.CONTINUE
                        replies = iter([go_on])
                elif kind == "request_body":
                    body += message.request_body.body
                    if len(body) > MOST:
                        raise ErrorReply(413, f"a body has {MOST >> 20} MiB at most", "too_large")
                    done = message.request_body.end_of_stream
                    if mode == _DUPLEX:
                        if done:
                            replies = self._duplex(ask, bytes(body), end=True)
                    else:  # one message; a partial one does not end the stream
                        whole = done or mode != _PARTIAL
                        full = replace(ask, body=bytes(body), whole=whole)
                        replies, done = iter([self._body(full)]), True
                elif kind == "request_trailers":
                    reply = self._pb.ProcessingResponse()
                    reply.request_trailers.SetInParent()
                    replies = iter([*self._duplex(ask, bytes(body), end=False), reply])
                    done = True
                for reply in replies:
                    yield reply
            except ErrorReply as error:
                yield self._refusal(error)
                return
            if done:
                return

    def _headers(self, ask: Ask) -> Any:
        reply = self._pb.ProcessingResponse()
        self._route(reply.request_headers.response, ask)
        return reply

    def _body(self, ask: Ask) -> Any:
        reply = self._pb.ProcessingResponse()
        self._route(reply.request_body.response, ask)
        return reply

    def _duplex(self, ask: Ask, body: bytes, *, end: bool) -> Iterator[Any]:
        """The headers, then the body as it came, in parts.

        Args:
            end: whether the body ends the request; otherwise trailers do.
        """
        yield self._headers(replace(ask, body=body))
        for at in range(0, max(1, len(body)), _CHUNK):
            reply = self._pb.ProcessingResponse()
            part = reply.request_body.response.body_mutation.streamed_response
            part.body = body[at : at + _CHUNK]
            part.end_of_stream = end and at + _CHUNK >= len(body)
            yield reply

    def _route(self, common: Any, ask: Ask) -> None:
        """The headers that route a request; Envoy then chooses its route again."""
        mutation = common.header_mutation
        for name, value in self._routes.headers(ask).items():
            option = mutation.set_headers.add()
            option.header.key, option.header.raw_value = name, value.encode()
            option.append_action = option.OVERWRITE_IF_EXISTS_OR_ADD
        mutation.remove_headers.extend(foreign(ask.headers))
        common.clear_route_cache = True

    def _refusal(self, error: ErrorReply) -> Any:
        reply = self._pb.ProcessingResponse()
        reply.immediate_response.status.code = error.status
        reply.immediate_response.body = error.body
        reply.immediate_response.details = error.code
        media = reply.immediate_response.headers.set_headers.add().header
        media.key, media.raw_value = "content-type", b"application/json"
        return reply


def _text(header: Any) -> str:
    return header.value or header.raw_value.decode("latin-1")
