# A kernel without context: every token is drawn from one distribution, so that a whole answer
# is known, with its logprobs, before it is asked for.

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

WORDS = (*"abcdefg", ".")
FAIR = (0.2, 0.15, 0.15, 0.15, 0.1, 0.1, 0.1, 0.05)
_KEPT = 512  # answers that are drawn beforehand


@dataclass(frozen=True)
class Drawn:
    """One answer: ids of its tokens, and whether the last one ended it."""

    ids: tuple[int, ...]
    finish: str

    def cut(self, width: int) -> Drawn:
        return self if len(self.ids) <= width else Drawn(self.ids[:width], "length")


@dataclass(frozen=True)
class Answers:
    """Answers of the kernel that draws each token from `probs`.

    Args:
        least, most: tokens of an answer; the last word ends it.
    """

    probs: Sequence[float] = FAIR
    seed: int = 0
    least: int = 1
    most: int = 64
    made: dict[Any, bytes] = field(default_factory=dict, repr=False)

    @cached_property
    def drawn(self) -> tuple[Drawn, ...]:
        rng = np.random.default_rng(self.seed)
        end = len(WORDS) - 1
        found = []
        for row in rng.choice(len(WORDS), size=(_KEPT, self.most), p=self.probs).tolist():
            stops = [at for at, token in enumerate(row) if token == end and at + 1 >= self.least]
            ids = row[: stops[0] + 1] if stops else row
            found.append(Drawn(tuple(ids), "stop" if stops else "length"))
        return tuple(found)

    def logps(self, ids: Sequence[int]) -> list[float]:
        return [math.log(self.probs[token]) for token in ids]

    def best(self, k: int) -> list[int]:
        return sorted(range(len(WORDS)), key=lambda token: -self.probs[token])[:k]


@dataclass(frozen=True)
class Asked:
    """What of a request changes the reply."""

    chat: bool
    stream: bool
    width: int
    logprobs: int | None
    ids: bool
    named: bool  # tokens by their ids
    model: str
    prompt: tuple[int, ...]


def text(ids: Sequence[int]) -> str:
    return " ".join(WORDS[token] for token in ids)


def reply(asked: Asked, drawn: Drawn, answers: Answers) -> bytes:
    """The JSON of an answer that is not streamed."""
    drawn = drawn.cut(asked.width)
    key = None if asked.ids else (asked.chat, asked.logprobs, asked.named, asked.model, drawn)
    if key is not None and key in answers.made:
        return answers.made[key]
    choice: dict[str, Any] = {
        "index": 0,
        "logprobs": _logprobs(asked, drawn.ids, answers),
        "finish_reason": drawn.finish,
        "stop_reason": None,
    }
    more: dict[str, Any] = {}
    if asked.chat:
        choice["message"] = {"role": "assistant", "content": text(drawn.ids)}
    else:
        choice["text"] = text(drawn.ids)
    if asked.ids:
        choice["token_ids"] = list(drawn.ids)
        (more if asked.chat else choice)["prompt_token_ids"] = list(asked.prompt)
    found = _json(_head(asked, False) | {"choices": [choice], "usage": _usage(asked, drawn)} | more)
    if key is not None:
        answers.made[key] = found
    return found


def events(asked: Asked, drawn: Drawn, answers: Answers) -> Iterator[bytes]:
    """The server-sent events of an answer, a token each, then [DONE]."""
    drawn = drawn.cut(asked.width)
    last = len(drawn.ids) - 1
    for at, token in enumerate(drawn.ids):
        key = (asked.chat, asked.logprobs, asked.named, asked.ids, asked.model, token, at == last)
        if at and key in answers.made:
            yield answers.made[key]
            continue
        word = WORDS[token] if not at else f" {WORDS[token]}"
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": _logprobs(asked, (token,), answers),
            "finish_reason": drawn.finish if at == last else None,
        }
        more: dict[str, Any] = {}
        if asked.chat:
            choice["delta"] = {"content": word} | ({} if at else {"role": "assistant"})
        else:
            choice["text"] = word
        if asked.ids:
            choice["token_ids"] = [token]
            if not at:
                (more if asked.chat else choice)["prompt_token_ids"] = list(asked.prompt)
        event = b"data: " + _json(_head(asked, True) | {"choices": [choice]} | more) + b"\n\n"
        if at:
            answers.made[key] = event
        yield event
    yield b"data: [DONE]\n\n"


def _head(asked: Asked, stream: bool) -> dict[str, Any]:
    kind = "chat.completion" if asked.chat else "text_completion"
    chunk = ".chunk" if asked.chat and stream else ""
    return {"id": "cmpl-0", "object": kind + chunk, "created": 1763741490, "model": asked.model}


def _usage(asked: Asked, drawn: Drawn) -> dict[str, int]:
    prompt, new = len(asked.prompt), len(drawn.ids)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _logprobs(asked: Asked, ids: Sequence[int], answers: Answers) -> Mapping[str, Any] | None:
    if asked.logprobs is None:
        return None
    logps = answers.logps(ids)

    def name(token: int) -> str:
        return f"token_id:{token}" if asked.named else WORDS[token]

    def value(token: int) -> float:
        return math.log(answers.probs[token])

    best = answers.best(asked.logprobs)
    if asked.chat:

        def entry(token: int, logp: float) -> dict[str, Any]:
            return {"token": name(token), "logprob": logp, "bytes": list(name(token).encode())}

        tops = [entry(other, value(other)) for other in best]
        listed = zip(ids, logps, strict=False)
        return {"content": [entry(t, logp) | {"top_logprobs": tops} for t, logp in listed]}
    own = zip(ids, logps, strict=False)
    return {
        "tokens": [name(token) for token in ids],
        "token_logprobs": logps,
        "top_logprobs": [{name(t): logp} | {name(b): value(b) for b in best} for t, logp in own],
        "text_offset": [2 * at for at in range(len(ids))],
    }


def _json(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()
