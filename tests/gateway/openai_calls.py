# What OpenAI's Python client asks of a server: 49 calls, and what its user gets of each.

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import openai

WORDS = "The list of "
SAID = [{"role": "user", "content": WORDS}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *SAID]
PARTS = [{"role": "user", "content": [{"type": "text", "text": WORDS}]}]
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
SCHEMA = {"name": "n", "schema": {"type": "object", "properties": {"n": {"type": "integer"}}}}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
Call = Callable[[openai.OpenAI, str], Any]


def completion(client: openai.OpenAI, named: str, **more: Any) -> Any:
    asked = {"model": named, "prompt": WORDS, "max_tokens": 8, "seed": 5, **more}
    return client.completions.create(**asked)


def chat(client: openai.OpenAI, named: str, **more: Any) -> Any:
    asked = {"model": named, "messages": SAID, "max_tokens": 8, "seed": 5, **more}
    return client.chat.completions.create(**asked)


def without(name: str, call: Callable[..., Any]) -> Call:
    """The call without one of its fields."""
    return lambda client, model: call(client, model, **{name: openai.omit})


CALLS: dict[str, Call] = {
    "models": lambda client, _: client.models.list(),
    "a model": lambda client, model: client.models.retrieve(model),
    "no model": lambda client, _: client.models.retrieve("nobody-has-it"),
    "embeddings": lambda client, model: client.embeddings.create(model=model, input="a"),
    "responses": lambda client, model: client.responses.create(
        model=model, input="a", store=False, temperature=0, max_output_tokens=8
    ),
    **{
        f"completion: {name}": partial(completion, **more)
        for name, more in {
            "plain": {},
            "one token": {"max_tokens": 1},
            "greedy": {"temperature": 0},
            "warm": {"temperature": 0.7},
            "top-p": {"top_p": 0.5},
            "stop": {"stop": "e"},
            "stops": {"stop": ["e", "a"]},
            "echo": {"echo": True},
            "two": {"n": 2},
            "no logprobs": {"logprobs": 0},
            "logprobs": {"logprobs": 3},
            "presence": {"presence_penalty": 0.5},
            "frequency": {"frequency_penalty": 0.5},
            "user": {"user": "ada"},
            "ids": {"prompt": [5, 6, 7]},
            "two prompts": {"prompt": ["a", "b"]},
            "stream": {"stream": True},
            "stream with usage": USAGE,
            "stream with logprobs": {"stream": True, "logprobs": 2},
            "metadata": {"extra_body": {"metadata": {"domain": "x"}}},
            "top-k": {"extra_body": {"top_k": 5}},
            "token ids": {"extra_body": {"return_token_ids": True}},
            "an unknown field": {"extra_body": {"nobody_knows": 1}},
            "another model": {"model": "nobody-has-it"},
            "no tokens": {"max_tokens": -1},
            "too hot": {"temperature": 99.0},
        }.items()
    },
    "completion: no limit": without("max_tokens", completion),
    **{
        f"chat: {name}": partial(chat, **more)
        for name, more in {
            "plain": {},
            "system": {"messages": SYSTEM},
            "parts": {"messages": PARTS},
            "greedy": {"temperature": 0},
            "two": {"n": 2},
            "stop": {"stop": "e"},
            "new limit": {"max_tokens": openai.omit, "max_completion_tokens": 6},
            "logprobs": {"logprobs": True, "top_logprobs": 3},
            "stream": {"stream": True},
            "stream with usage": USAGE,
            "stream with logprobs": {"stream": True, "logprobs": True},
            "tools": {"tools": [TOOL]},
            "no choice of tools": {"tools": [TOOL], "tool_choice": "none"},
            "JSON": {"response_format": {"type": "json_object"}},
            "a schema": {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
            "metadata": {"metadata": {"domain": "x"}},
            "nothing said": {"messages": []},
        }.items()
    },
}


def outcome(call: Call, client: openai.OpenAI, model: str) -> Any:
    """What a user gets of a call, but for ids and times: an answer, a stream's events, an error."""
    try:
        found = call(client, model)
        if isinstance(found, openai.Stream):
            return _streamed([one.model_dump() for one in found])
        return _plain(found.model_dump(exclude_unset=True))
    except openai.APIStatusError as error:
        return type(error).__name__, error.status_code, _plain(error.body)


def _plain(found: Any) -> Any:
    text = json.dumps(found, sort_keys=True, default=str)
    text = re.sub(r"\b(chatcmpl|cmpl|modelperm|resp|req|msg|embd)-?_?[0-9a-f-]{8,}", "ID", text)
    return json.loads(re.sub(r'("created(_at)?": )[0-9.]+', r"\g<1>0", text))


def _streamed(events: list[Any]) -> Any:
    """What a stream says in all, for how many tokens an event has is a matter of time."""
    said: dict[Any, Any] = {}
    shapes = set()
    for event in map(_plain, events):
        said["usage"] = event.pop("usage", None) or said.get("usage")
        for choice in event.get("choices", ()):
            at = choice.get("index")
            for part in (choice, choice.get("delta") or {}, choice.get("logprobs") or {}):
                for key, value in part.items():
                    if isinstance(value, list) or (
                        key in ("text", "content") and value is not None
                    ):
                        kind = type(value).__name__
                        said[at, key, kind] = said.get((at, key, kind), type(value)()) + value
                        part[key] = kind
            said[at, "finish"] = choice.pop("finish_reason", None) or said.get((at, "finish"))
        shapes.add(json.dumps(event))
    return said, shapes
