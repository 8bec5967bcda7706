# Requests to a server as its clients send them: their own fields, several choices, streamed.
#
# What measuring reads is asked for: logprobs, and token ids.  Everything else that a request does
# not name is left to the server.

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from servanda.engines.http import HTTPEngine
from servanda.engines.http.dialects.base import NEUTRAL, SequenceRequest, best_of
from servanda.engines.http.dialects.openai import ENDPOINT, request
from servanda.engines.http.responses import Part
from servanda.engines.http.transport import StatusError
from servanda.errors import ContractError
from servanda.runner.relations.observation import Ids, Observation

DIALECTS = ("vllm", "plain")  # those that are asked by /v1/completions
_READ = {"return_token_ids": True, "return_tokens_as_token_ids": True}
# of a chat or a stream, what has no place in a request of token ids
_LEFT_OUT = (
    *("messages", "tools", "tool_choice", "top_logprobs", "max_completion_tokens"),
    "stream_options",
)
_UNABLE = (400, 404, 422, 501)
_WIDTH = 16  # new tokens of a request that names no number


@dataclass(frozen=True)
class ClientRequest:
    """A request of a client.

    Args:
        fields: of the body, without what measuring adds.
        prompt: its token ids.
    """

    fields: Mapping[str, Any]
    prompt: Ids

    @classmethod
    def made(cls, engine: HTTPEngine, prompt: Ids, width: int, seed: int) -> ClientRequest:
        """A request that names every parameter, and penalties, of which a server keeps counts."""
        sequence = SequenceRequest(prompt, width, NEUTRAL, seed)
        body = request(sequence, engine.server)[1]
        ours = "kernel.engine" in engine.server.facts  # it has no penalties
        if seed % 2 and engine.meaning == "raw" and not ours:
            body = {**body, "presence_penalty": 0.5, "frequency_penalty": 0.5}
        return cls(body, prompt)

    @classmethod
    def read(cls, path: Path, engine: HTTPEngine) -> ClientRequest:
        """The body of a request in a file: to /v1/completions, or to /v1/chat/completions.

        Raises:
            ContractError: not such a body, or no room for it.
            MeasurementError: the server makes no ids of it.
        """
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ContractError(
                f"{path}: no JSON file of a request ({error})",
                hint='{"prompt": "...", "max_tokens": 64, "temperature": 0.6}',
            ) from None
        if not isinstance(body, dict) or not {"prompt", "messages"} & body.keys():
            raise ContractError(
                f"{path}: neither 'prompt' nor 'messages': no body of a request to "
                "/v1/completions or /v1/chat/completions",
                hint="log the body that your client sends, and give that file",
            )
        asked: dict[str, Any] = {"model": engine.server.served}
        if "messages" in body:
            asked |= {key: body[key] for key in ("messages", "tools") if key in body}
            asked["add_generation_prompt"] = True
        elif isinstance(body["prompt"], str):
            asked["prompt"] = body["prompt"]
        ids = body.get("prompt")
        if len(asked) > 1:
            ids = list(engine.transport.ask("/tokenize", asked)["tokens"].tokens(0))
        if not isinstance(ids, list) or not all(type(one) is int for one in ids) or not ids:
            raise ContractError(
                f"{path}: 'prompt' is neither a text nor a list of token ids",
                hint="one request a file, with one prompt",
            )
        width = body.get("max_tokens") or body.get("max_completion_tokens") or _WIDTH
        if type(width) is not int or width < 1:
            raise ContractError(
                f"{path}: {width!r} new tokens are asked for", hint="a number, such as 64"
            )
        room = (engine.server.context or len(ids) + width) - len(ids)
        if room < 1:
            raise ContractError(
                f"{path}: a prompt of {len(ids)} tokens, and the server has a context of "
                f"{engine.server.context}",
                hint="give a shorter request",
            )
        kept = {key: value for key, value in body.items() if key not in _LEFT_OUT}
        kept |= {"prompt": ids, "max_tokens": min(width, room), "model": engine.server.served}
        return cls(kept, tuple(ids))

    @property
    def choices(self) -> int:
        n = self.fields.get("n")
        return max(2, n if isinstance(n, int) else 0)

    def answers(self, engine: HTTPEngine, *, n: int = 1, stream: bool = False) -> list[Observation]:
        """The choices of one reply; none where the server has no streams, or one choice alone."""
        try:
            return self._answers(engine, n, stream)
        except StatusError as refused:
            if (n > 1 or stream) and refused.status in _UNABLE:
                return []
            raise

    def _answers(self, engine: HTTPEngine, n: int, stream: bool) -> list[Observation]:
        best = best_of(NEUTRAL, engine.server)
        body = {**self.fields, **_READ, "logprobs": best, "n": n, "stream": stream}
        width = int(body["max_tokens"])
        reading = SequenceRequest(self.prompt, width, NEUTRAL, 0, best=best)
        if stream:
            with closing(engine.transport.events(ENDPOINT, body, width)) as events:
                reply = _whole([*events], engine.transport.url)
        else:
            reply = engine.transport.ask(ENDPOINT, body, tokens=width)
        found = []
        for choice in reply["choices"].items(n, "choices"):
            one = replace(reply, value={**reply.value, "choices": [choice.value]})
            answer = engine.dialect.drawn(one, reading, engine.server)
            steps = zip(answer.best, answer.tokens, answer.logp, strict=True)
            logp = tuple({**dict(best), token: own} for best, token, own in steps)
            found.append(Observation(answer.tokens, logp))
        return found

    def crowd(self, engine: HTTPEngine, size: int) -> list[Observation]:
        """The first choices of as many replies at once."""
        with ThreadPoolExecutor(size) as pool:
            return [*pool.map(lambda _: self.answers(engine)[0], range(size))]


def _whole(events: list[Part], url: str) -> Part:
    """The reply that a stream of one choice makes."""
    choice: dict[str, Any] = {"token_ids": [], "text": "", "logprobs": {}}
    for event in events:
        for part in event["choices"].items():
            for key, value in part.value.items():
                if key in ("token_ids", "text"):
                    choice[key] += value or type(choice[key])()
                elif key == "logprobs":
                    for name, values in (value or {}).items():
                        choice[key][name] = choice[key].get(name, []) + values
                elif value is not None or key not in choice:
                    choice[key] = value
    return Part({"choices": [choice]}, "", url, ENDPOINT)
