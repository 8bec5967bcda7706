# How each kind of server renders a chat, calls a tool, and reports its defaults.

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from servanda.engines.http import HTTPEngine
from servanda.engines.http.responses import Part
from servanda.engines.http.transport import StatusError
from servanda.errors import MeasurementError
from servanda.runner.compare.surface.cases import Conversation
from servanda.traces.json_fields import words

_CALL_TOKENS = 128  # most new tokens of a response with a tool call
# sampling parameters that a server's defaults may set
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "repeat_penalty")


@dataclass(frozen=True)
class Rendered:
    """A chat as rendered by a server.

    Args:
        ids: token ids; None if only their number is reported.
        count: number of ids; refused: the server's reason if there are none.
    """

    ids: tuple[int, ...] | None = None
    count: int | None = None
    refused: str = ""


@dataclass(frozen=True)
class ToolCalls:
    """A response with tools: valid calls, and the problems of others."""

    calls: int = 0
    wrong: tuple[str, ...] = ()
    refused: str = ""


@dataclass(frozen=True)
class Client:
    """One server as seen by a client of its API."""

    name: str
    engine: HTTPEngine

    @property
    def title(self) -> str:
        server = self.engine.server
        context = f", context {server.context:,}" if server.context else ""
        version = f" {server.version}" if server.version else ""
        return f"{self.name}: {self.engine.dialect.name}{version}, {server.served}{context}"

    def encoded(self, text: str) -> Rendered:
        """The ids of a plain text, without special tokens."""
        if not self.engine.dialect.encodes:
            return Rendered(refused="it has no tokenizer to ask")
        try:
            (ids,) = self.engine.encode([text])
        except StatusError as refused:
            return Rendered(refused=_refusal(refused))
        return Rendered(tuple(ids), len(ids))

    def rendered(self, chat: Conversation) -> Rendered:
        """A chat rendered by the server's template, the input of the model."""
        kind, ask = self.engine.dialect.name, self.engine.transport.ask
        try:
            if kind == "llamacpp":
                request = {"messages": [*chat.messages], **_tools(chat)}
                text = ask("/apply-template", request)["prompt"].text()
                body = {"content": text, "add_special": True, "parse_special": True}
                return _ids(ask("/tokenize", body)["tokens"])
            if kind == "vllm":
                body = {
                    "model": self.engine.server.served,
                    "messages": [*chat.messages],
                    "add_generation_prompt": True,
                    **_tools(chat),
                }
                return _ids(ask("/tokenize", body)["tokens"])
            # others report only the token count of a prompt
            usage = self._chat(chat, max_tokens=1)["usage"]
            return Rendered(count=usage["prompt_tokens"].whole())
        except StatusError as refused:
            return Rendered(refused=_refusal(refused))

    def called(self, chat: Conversation) -> ToolCalls:
        """The model's tool calls under greedy decoding, from the server's parser."""
        try:
            reply = self._chat(chat, max_tokens=_CALL_TOKENS)
        except StatusError as refused:
            return ToolCalls(refused=_refusal(refused))
        message = reply["choices"].items()[0]["message"]
        listed = message.get("tool_calls")
        calls = listed.items() if listed is not None else []
        wrong = tuple(filter(None, (_wrong(call, chat) for call in calls)))
        return ToolCalls(len(calls) - len(wrong), wrong)

    def defaults(self) -> Mapping[str, float] | None:
        """The default sampling parameters of requests; None if not reported."""
        kind = self.engine.dialect.name
        if kind == "llamacpp":
            props = self.engine.transport.maybe("/props")
            values = props and props.get("default_generation_settings")
            values = values and (values.get("params") or values)
        else:
            description = self.engine.transport.maybe("/servanda/describe")
            values = description and description.get("defaults")
        if not isinstance(values, Part):
            return None
        return {
            name: part.value
            for name, part in values.fields()
            if name in SAMPLING and type(part.value) in (int, float)
        }

    def _chat(self, chat: Conversation, max_tokens: int) -> Part:
        body = {
            "model": self.engine.server.served,
            "messages": [*chat.messages],
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "top_k": 1,  # greedy, in parameters that every server accepts
            "seed": 0,
            **_tools(chat),
        }
        return self.engine.transport.ask("/v1/chat/completions", body)


def _refusal(refused: StatusError) -> str:
    return words(refused.text) or f"status {refused.status}"


def _tools(chat: Conversation) -> dict[str, Any]:
    return {"tools": [*chat.tools]} if chat.tools else {}


def _ids(listed: Part) -> Rendered:
    ids = tuple(part.whole() for part in listed.items())
    return Rendered(ids, len(ids))


def _wrong(call: Part, chat: Conversation) -> str:
    """The problem of a call; "" if it is valid."""
    declared = {tool["function"]["name"]: tool["function"]["parameters"] for tool in chat.tools}
    try:
        name = call["function"]["name"].text()
        arguments = json.loads(call["function"]["arguments"].text())
    except (MeasurementError, ValueError, RecursionError):
        return f"{chat.name}: no name, or arguments that are no JSON"
    if name not in declared:
        return f"{chat.name}: calls {name!r}, which was not offered"
    given = arguments if isinstance(arguments, dict) else {}
    lacking = [key for key in declared[name]["required"] if key not in given]
    return f"{chat.name}: {name} without {lacking[0]!r}" if lacking else ""
