# Two servers on the same texts and chats, layer by layer, before any statistics.
#
# Token ids on both sides bypass tokenizers, templates and parsers, so a comparison of kernels
# cannot detect the usual faults of server upgrades.

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, TypeVar

from servanda.engines.http import HTTPEngine
from servanda.engines.http.responses import Part
from servanda.engines.http.transport import StatusError
from servanda.errors import MeasurementError
from servanda.traces.json_fields import words

# Cases: texts and conversations that tokenizers, chat templates and tool parsers differ on.


Message = Mapping[str, Any]

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  two blanks before, three after   ",
    "tabs\tand\nnew lines\r\n\n\nand none at the end",
    "1234567890 3.14159 1,000,000 0x1F -5e-7",
    "def f(x):\n    return x ** 2  # a comment\n",
    "naïve café, 東京, Привет, مرحبا, 👩‍👩‍👧",
    "<|im_start|>user<|im_end|> </s> <s> [INST] <tool_call>",
    "a" * 70,
)


@dataclass(frozen=True)
class Conversation:
    """A chat, its peculiarity, and the tools that the model may call."""

    name: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()


def _message(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


def _tool(name: str, what: str, **arguments: str) -> Mapping[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": what,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in arguments.items()},
                "required": [*arguments],
            },
        },
    }


WEATHER = _tool("get_weather", "The weather of a city today.", city="string")
ADD = _tool("add", "The sum of two numbers.", a="number", b="number")

_CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_000000001",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
        }
    ],
}
_RETURNED: Message = {"role": "tool", "tool_call_id": "call_000000001", "content": "-3 °C, snow"}

CONVERSATIONS = (
    Conversation("one question", [_message("user", "What is 2 + 2?")]),
    Conversation(
        "with a system message",
        [
            _message("system", "Answer in one word."),
            _message("user", "What is the capital of France?"),
        ],
    ),
    Conversation(
        "several turns",
        [
            _message("user", "Hello."),
            _message("assistant", "Hello, what can I do for you?"),
            _message("user", "Tell me a number."),
            _message("assistant", "Seven."),
            _message("user", "Another one."),
        ],
    ),
    Conversation("blanks at both ends", [_message("user", "  keep my blanks \n")]),
    Conversation("an empty system message", [_message("system", ""), _message("user", "Hello.")]),
    Conversation("other scripts", [_message("user", "Привет 東京 👩‍👩‍👧")]),
    Conversation("marks of a template", [_message("user", "<|im_end|> </s> {{ messages }}")]),
    Conversation("content in parts", [_message("user", [{"type": "text", "text": "Hello."}])]),
    Conversation("with tools", [_message("user", "How warm is it in Oslo?")], [WEATHER, ADD]),
    Conversation(
        "after a call",
        [_message("user", "How warm is it in Oslo?"), _CALLED, _RETURNED],
        [WEATHER],
    ),
)

TOOL_PROMPTS = (
    Conversation("weather", [_message("user", "How warm is it in Oslo today?")], [WEATHER]),
    Conversation("sum", [_message("user", "Add 17 and 25.")], [ADD]),
    Conversation("weather, of two", [_message("user", "Does it rain in Lima?")], [WEATHER, ADD]),
    Conversation("sum, of two", [_message("user", "What is 1.5 plus 2.25?")], [WEATHER, ADD]),
    Conversation(
        "told to call",
        [_message("system", "Always call a tool."), _message("user", "Weather in Kyiv?")],
        [WEATHER],
    ),
    Conversation(
        "both at once",
        [_message("user", "Weather in Rome, and the sum of 2 and 3.")],
        [WEATHER, ADD],
    ),
)


# How each kind of server renders a chat and calls a tool.


_CALL_TOKENS = 128  # most new tokens of a response with a tool call


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


# The comparison of two servers on one layer above the kernel, and its lines in the output of
# `servanda compare`, before any statistics.


Layer = Literal["servers", "defaults", "tokenizer", "chat template", "tool calls"]
Outcome = Literal["same", "differs", "unknown"]


@dataclass(frozen=True)
class LayerResult:
    """One layer of two servers.

    Args:
        outcome: unknown if one of them does not report it, which is no agreement.
        text: the comparison and its result.
        first: the first case that differs, both sides; "" if none does.
        fails: whether the difference affects responses; a difference that a client can avoid, such
            as a default that every request overrides, is only reported.
    """

    layer: Layer
    outcome: Outcome
    text: str
    first: str = ""
    fails: bool = True


def differs(findings: Iterable[LayerResult]) -> tuple[LayerResult, ...]:
    """The layers on which two servers differ."""
    return tuple(f for f in findings if f.outcome == "differs" and f.fails)


_GLYPH = {"same": "✓", "differs": "✗", "unknown": "?"}
_HEADS = {"chat template": "template", "tool calls": "tools"}


def lines(finding: LayerResult) -> Iterator[str]:
    """The lines of a result: its text, and the first difference."""
    head = _HEADS.get(finding.layer, finding.layer)
    glyph = "!" if finding.outcome == "differs" and not finding.fails else _GLYPH[finding.outcome]
    mark = "" if finding.layer == "servers" else f"{glyph} "
    yield f"{head:<9} {mark}{finding.text}"
    if finding.first:
        yield f"            {finding.first}"


def conclusion(layers: tuple[LayerResult, ...]) -> str:
    """The consequence of different layers; names the lowest one."""
    lowest = layers[0].layer
    if lowest == "tokenizer":
        return (
            "the tokenizers differ: a token id does not mean the same on both servers, so there "
            "is nothing to compare below"
        )
    what = " and the ".join(f.layer for f in layers)
    return (
        f"the {what} differ{'s' if len(layers) == 1 and lowest != 'tool calls' else ''}: clients "
        "get other responses, whatever the kernels do; the comparison below uses token ids, which "
        "bypass it"
    )


T = TypeVar("T")

_HEAD = 6  # token ids per side in the text of a first difference


def compare_layers(a: Client, b: Client, texts: Sequence[str] = ()) -> Iterator[LayerResult]:
    """Every layer above the kernel, one finding each, the lowest first.

    Args:
        texts: texts of the workload, in addition to the built-in ones.

    Raises:
        MeasurementError: a server does not respond, or not like its kind.
    """
    yield LayerResult("servers", "same", f"{a.title} · {b.title}")
    yield _defaults(a, b)
    plain = [*TEXTS, *texts]
    yield _same_ids("tokenizer", "texts", plain, Client.encoded, (a, b), repr)
    name = attrgetter("name")
    yield _same_ids("chat template", "chats", CONVERSATIONS, Client.rendered, (a, b), name)
    yield _tool_calls(a, b)


def _defaults(a: Client, b: Client) -> LayerResult:
    """Compare the default sampling parameters."""
    defaults = {client.name: client.engine.server.fills_in for client in (a, b)}
    silent = [name for name, values in defaults.items() if values is None]
    if silent:
        who = f"{silent[0]} tells" if len(silent) == 1 else "A and B tell"
        text = f"{who} no sampling defaults; all are sent here"
        return LayerResult("defaults", "unknown", text, fails=False)
    mine, theirs = defaults[a.name] or {}, defaults[b.name] or {}
    odd = [key for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key)]
    if not odd:
        return LayerResult("defaults", "same", "equal sampling defaults; every one is sent here")
    named = "; ".join(f"{key} {mine.get(key, 'none')} and {theirs.get(key, 'none')}" for key in odd)
    text = f"other sampling defaults: {named}. Clients that name none are served otherwise"
    return LayerResult("defaults", "differs", text, fails=False)


def _same_ids(
    layer: Layer,
    what: str,
    cases: Sequence[T],
    ask: Callable[[Client, T], Rendered],
    clients: tuple[Client, Client],
    describe: Callable[[T], str],
) -> LayerResult:
    """Whether both servers make the same prompt ids of each case."""
    same = counted = 0
    refused: dict[str, str] = {}
    first = ""
    for case in cases:
        mine, theirs = (ask(client, case) for client in clients)
        for client, rendering in zip(clients, (mine, theirs), strict=True):
            if rendering.refused:
                refused.setdefault(client.name, f"{describe(case)}: {rendering.refused}")
        if mine.refused and theirs.refused:
            continue  # neither can: no difference for clients
        alike = mine.count == theirs.count
        if mine.ids is not None and theirs.ids is not None:
            counted += 1
            alike = mine.ids == theirs.ids
        if alike and not mine.refused and not theirs.refused:
            same += 1
        elif not first:
            first = _difference(describe(case), mine, theirs, clients)
    total = len(cases)
    if len(refused) == 2 and not first and not same:
        text = "; ".join(f"{name} refuses {refusal}" for name, refusal in refused.items())
        return LayerResult(layer, "unknown", text)
    how = "prompt ids" if counted else "numbers of prompt tokens (ids are not told)"
    if first:
        return LayerResult(layer, "differs", f"{how} of {same} of {total} {what} are equal", first)
    both = total - same
    besides = f", {both} refused by both" if both else ""
    return LayerResult(layer, "same", f"{how} of {same} of {total} {what} are equal{besides}")


def _difference(case: str, mine: Rendered, theirs: Rendered, clients: tuple[Client, Client]) -> str:
    """The first difference of two renderings."""
    sides = zip(clients, (mine, theirs), strict=True)
    if mine.refused or theirs.refused:
        refusals = (f"{d.name} refuses it ({r.refused})" if r.refused else "" for d, r in sides)
        return f"{case}: {', '.join(filter(None, refusals))}"
    if mine.ids is None or theirs.ids is None:
        return f"{case}: {mine.count} tokens and {theirs.count}"
    pairs = enumerate(zip(mine.ids, theirs.ids, strict=False))
    at = next((i for i, (x, y) in pairs if x != y), min(len(mine.ids), len(theirs.ids)))
    heads = (f"{d.name} {[*(r.ids or ())][at : at + _HEAD]} of {r.count}" for d, r in sides)
    return f"{case}: from token {at} on, {', '.join(heads)}"


def _tool_calls(a: Client, b: Client) -> LayerResult:
    """Whether the responses of both contain valid tool calls."""
    calls = {client.name: [client.called(chat) for chat in TOOL_PROMPTS] for client in (a, b)}
    # a server without tool support refuses each of them
    refused = {
        name: answers[0].refused if all(answer.refused for answer in answers) else ""
        for name, answers in calls.items()
    }
    sound = {name: sum(answer.calls > 0 for answer in answers) for name, answers in calls.items()}
    total = len(TOOL_PROMPTS)
    if all(refused.values()):
        return LayerResult("tool calls", "unknown", f"both refuse tools: {refused[a.name]}")
    counts = [
        f"{name} {'refuses tools' if refused[name] else f'{calls} of {total}'}"
        for name, calls in sound.items()
    ]
    text = f"answers with calls that parse: {', '.join(counts)}"
    if any(refused.values()):
        first = next(refusal for refusal in refused.values() if refusal)
        return LayerResult("tool calls", "differs", text, first)
    odd = [w for answers in calls.values() for answer in answers for w in answer.wrong]
    pairs = [(bool(x.calls), bool(y.calls)) for x, y in zip(*calls.values(), strict=True)]
    if not any(x or y for x, y in pairs) and not odd:
        return LayerResult("tool calls", "unknown", "the model calls no tool on either server")
    if all(x == y for x, y in pairs) and not odd:
        return LayerResult("tool calls", "same", text)
    at = next((i for i, (x, y) in enumerate(pairs) if x != y), 0)
    first = odd[0] if odd else f"{TOOL_PROMPTS[at].name}: only one of them calls a tool"
    return LayerResult("tool calls", "differs", text, first)
