# Cases: texts and conversations that tokenizers, chat templates and tool parsers differ on.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
