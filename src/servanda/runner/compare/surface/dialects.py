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

_CALL_TOKENS = 128  # new tokens that an answer with a tool call may have
# what may be set by a server's own defaults and changes a draw
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "repeat_penalty")


@dataclass(frozen=True)
class Rendered:
    """A chat as a server reads it.

    Args:
        ids: token ids; None if only their number is reported.
        count: how many there are; refused: why there are none, in the server's words.
    """

    ids: tuple[int, ...] | None = None
    count: int | None = None
    refused: str = ""


@dataclass(frozen=True)
class ToolCalls:
    """An answer to a question with tools: calls that are sound, and what was wrong with others."""

    calls: int = 0
    wrong: tuple[str, ...] = ()
    refused: str = ""


@dataclass(frozen=True)
class Client:
    """One server as a client of its API meets it."""

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
        """A chat by the server's template, as the model is fed it."""
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
            # others only tell how many tokens the prompt of an answer had
            usage = self._chat(chat, max_tokens=1)["usage"]
            return Rendered(count=usage["prompt_tokens"].whole())
        except StatusError as refused:
            return Rendered(refused=_refusal(refused))

    def called(self, chat: Conversation) -> ToolCalls:
        """The tools that the model calls, greedily, as the server's parser reads them."""
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
            "top_k": 1,  # greedy, in words that every server takes
            "seed": 0,
            **_tools(chat),
        }
        return self.engine.transport.ask("/v1/chat/completions", body)


def _refusal(refused: StatusError) -> str:
    return refused.text or f"status {refused.status}"


def _tools(chat: Conversation) -> dict[str, Any]:
    return {"tools": [*chat.tools]} if chat.tools else {}


def _ids(listed: Part) -> Rendered:
    ids = tuple(part.whole() for part in listed.items())
    return Rendered(ids, len(ids))


def _wrong(call: Part, chat: Conversation) -> str:
    """What is wrong with a call; "" where a client could run it."""
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
