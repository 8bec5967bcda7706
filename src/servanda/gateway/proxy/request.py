# The user's request: the few fields of a body that decide its route.
#
# A body is parsed once, and only these fields; texts of prompts and messages are skipped as bytes.
# The forwarded body consists of the received bytes.

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

from servanda.gateway.http.error_replies import ErrorReply
from servanda.gateway.routing.model import Decision, RequestFacts

_METADATA = "request.metadata."
_LABEL = 256  # most characters of a label; longer ones are ignored


class _Fields(msgspec.Struct):
    stream: Any = None
    prompt: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    tool_choice: Any = None
    model: Raw | UnsetType = UNSET
    metadata: Raw | UnsetType = UNSET
    # fields that define the prompt
    add_special_tokens: Raw | UnsetType = UNSET
    add_generation_prompt: Raw | UnsetType = UNSET
    continue_final_message: Raw | UnsetType = UNSET
    chat_template_kwargs: Raw | UnsetType = UNSET
    documents: Raw | UnsetType = UNSET
    user: Any = None
    prompt_cache_key: Any = None
    # fields that redirected another proxy's API keys in the past
    api_base: Raw | UnsetType = UNSET
    base_url: Raw | UnsetType = UNSET
    api_key: Raw | UnsetType = UNSET
    proxies: Raw | UnsetType = UNSET


class _Message(msgspec.Struct):
    role: Any = None
    content: Raw | UnsetType = UNSET


_read = msgspec.json.Decoder(_Fields).decode
_messages = msgspec.json.Decoder(list[_Message]).decode
_OF_CHATS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_ELSEWHERE = ("api_base", "base_url", "api_key", "proxies")


class CompletionRequest:
    """A request for a completion.

    Args:
        body: as received; chat: whether it is for /v1/chat/completions.

    Raises:
        ErrorReply: the body is not a JSON object, or names a target server.
    """

    def __init__(self, body: bytes, chat: bool) -> None:
        self.body, self.chat = body, chat
        try:
            self._fields = fields = _read(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            message = f"the body is not an object of JSON: {error}"
            raise ErrorReply(400, message, "no_json") from None
        self.stream = fields.stream is True
        for name in _ELSEWHERE:
            if getattr(fields, name) is not UNSET:
                raise ErrorReply(
                    400,
                    f"{name!r} is not for a request to say: leave it out, this gateway's upstreams "
                    "are those that it was started with",
                    "elsewhere",
                )

    @property
    def prompt(self) -> bytes:
        """The prompt or the messages, as JSON; empty if missing."""
        prompt = self._fields.messages if self.chat else self._fields.prompt
        return b"" if isinstance(prompt, UnsetType) else bytes(prompt)

    @cached_property
    def known_tokens(self) -> int | None:
        """Token count of a prompt of token ids; None for any other."""
        if self.chat or not self.prompt.startswith(b"["):
            return None
        first = self.prompt[1:].lstrip()[:1]
        return self.prompt.count(b",") + 1 if first.isdigit() else None

    def labels(self, sources: Mapping[str, str], holder: str, route: str) -> dict[str, str]:
        """The request's labels that the contract uses.

        Args:
            sources: name -> api_key, route or request.metadata.KEY.
            holder: name of the holder of the key; "" if clients need no key.
            route: path of the request.
        """
        labels: dict[str, str] = {}
        for name, source in sources.items():
            if source == "api_key":
                value: Any = holder or None
            elif source == "route":
                value = route
            else:
                value = self._metadata.get(source.removeprefix(_METADATA))
            if isinstance(value, bool | int | float):
                value = str(value)
            if isinstance(value, str) and len(value) <= _LABEL:
                labels[name] = value
        return labels

    @cached_property
    def _metadata(self) -> Mapping[str, Any]:
        raw = self._fields.metadata
        try:
            metadata = None if isinstance(raw, UnsetType) else msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return {}
        return metadata if isinstance(metadata, dict) else {}

    @cached_property
    def user(self) -> str:
        """The request's `user` field; "" if missing."""
        for value in (self._fields.prompt_cache_key, self._fields.user):
            if isinstance(value, str) and value:
                return value
        return ""

    def conversation(self) -> str:
        """A hash of the system message and first user message, constant over a chat.

        "" if it is not a chat.
        """
        if not self.chat:
            return ""
        digest = blake2b(digest_size=16)
        try:
            messages = _messages(self.prompt)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return ""
        for message in messages:
            if message.role not in ("system", "developer", "user"):
                continue
            if not isinstance(message.content, UnsetType):
                digest.update(message.content)
            digest.update(b"\0")
            if message.role == "user":
                return digest.hexdigest()
        return ""

    @property
    def alone(self) -> bool:
        """Whether `about` contains everything that defines the prompt.

        Tokenizer endpoints take no documents and no tool_choice "none", with which some servers
        leave the tools out of the prompt.
        """
        fields = self._fields
        tools = isinstance(fields.tools, UnsetType) or fields.tool_choice != "none"
        return tools and isinstance(fields.documents, UnsetType)

    @property
    def about(self) -> dict[str, Raw]:
        """The fields for a tokenizer endpoint."""
        fields = self._fields
        named = {"model": fields.model, "add_special_tokens": fields.add_special_tokens}
        if self.chat:
            named |= {name: getattr(fields, name) for name in _OF_CHATS}
        named["messages" if self.chat else "prompt"] = Raw(self.prompt)
        return {name: value for name, value in named.items() if not isinstance(value, UnsetType)}


class RoutedRequest(NamedTuple):
    """A request for a completion, with the decisions about it.

    Args:
        user_hash: keyed hash of the user; "" if the request is not sampled.
        client: identity of the client, as in `Exchange.client`.
    """

    request: CompletionRequest
    path: str
    facts: RequestFacts
    decision: Decision
    user_hash: str
    client: str
