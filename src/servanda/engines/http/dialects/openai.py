# OpenAI's /v1/completions: with the fields by which vLLM returns token ids, and of other servers.
#
# Any other server is asked in vLLM's words, and believed only where token ids come back: a token's
# text does not tell its id.  Given tokens cannot be scored: no two servers echo a prompt alike.
# Tokens are named "token_id:7" (return_tokens_as_token_ids), so no text is ever encoded again.

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from servanda.engines.http.dialects.base import (
    DIALECTS,
    Answer,
    Dialect,
    Ids,
    Meaning,
    Request,
    SequenceRequest,
    Server,
    complete,
    neutral,
    only_model,
)
from servanda.engines.http.responses import Best, Part, likeliest, same_number, same_prompt
from servanda.engines.http.transport import Transport
from servanda.theory.sampling import Sampling

ENDPOINT = "/v1/completions"
_NAME = re.compile(r"token_id:(0|[1-9][0-9]{0,9})", re.ASCII)
_ID = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
_TEXTS = "the server names tokens by their texts, which do not tell ids: use one that has \
`return_tokens_as_token_ids` (vLLM), or the dialect of this server"


def request(sequence: SequenceRequest, server: Server, **more: Any) -> Request:
    """One sequence.  Every parameter is written out: a server has defaults of its own
    (of a model's generation_config.json), and those apply to what a request leaves unsaid."""
    sampling = sequence.sampling
    return ENDPOINT, {
        "model": server.served,
        "prompt": list(sequence.prompt),
        "max_tokens": sequence.width,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": sequence.seed,
        "n": 1,
        "stop": [],
        "ignore_eos": False,
        "logprobs": sequence.best if sequence.record else None,
        "add_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **more,
    }


def only_choice(reply: Part) -> Part:
    return reply["choices"].items(1, "request")[0]


def named(part: Part, server: Server) -> int:
    """The id of a token that is named "token_id:7"."""
    match = _NAME.fullmatch(part.text())
    if match is None:
        raise part.wrong('"token_id:" and a number', _TEXTS)
    return _token(part, match[1], server)


def _token(part: Part, digits: str, server: Server) -> int:
    return Part(int(digits), part.place, part.url, part.endpoint).token(server.vocab_size)


def answer(choice: Part, tokens: Ids, sequence: SequenceRequest, server: Server) -> Answer:
    """Logprobs of drawn tokens, and the most likely ones beside them."""
    logprobs, n = choice["logprobs"], len(tokens)
    for part, token in zip(logprobs["tokens"].items(n, "tokens"), tokens, strict=True):
        if named(part, server) != token:
            raise part.wrong(f"the token {token}, which `token_ids` has there")
    logp = tuple(part.logprob() for part in logprobs["token_logprobs"].items(n, "tokens"))
    best: tuple[Best, ...] = ((),) * n
    if sequence.best:
        steps = logprobs["top_logprobs"].items(n, "tokens")
        best = tuple(
            _best(step, token, value, sequence.best, server)
            for step, token, value in zip(steps, tokens, logp, strict=True)
        )
    return Answer(tokens, logp, best)


def _best(step: Part, token: int, logp: float, k: int, server: Server) -> Best:
    if step.value is None:
        return ()
    pairs = []
    for name, part in step.fields():
        key = Part(name, step.place, step.url, step.endpoint)
        pairs.append((named(key, server), part.logprob()))
    return likeliest(pairs, token, logp, k, step, few=False)


def ended(choice: Part, tokens: Ids, sequence: SequenceRequest, server: Server) -> None:
    complete(choice, tokens, sequence.width, choice["finish_reason"].text(), server.eos)


def rows(choice: Part, sequence: SequenceRequest, server: Server) -> Answer:
    """Given tokens by `prompt_logprobs`, whose row i is the distribution after i tokens.

    Row 0 is null.  A later row that is null is unknown.
    """
    text, given = (*sequence.prompt, *sequence.given), sequence.given
    parts = choice["prompt_logprobs"].items(len(text), "tokens of the prompt")
    logp: list[float] = []
    best: list[Best] = []
    for row, token in zip(parts[len(sequence.prompt) :], given, strict=True):
        value, step = _row(row, token, sequence.best, server)
        logp.append(value)
        best.append(step)
    return Answer(given, tuple(logp), tuple(best))


def _row(row: Part, token: int, k: int, server: Server) -> tuple[float, Best]:
    if row.value is None:
        return float("nan"), ()
    pairs = []
    for name, part in row.fields():
        if _ID.fullmatch(name) is None:
            raise row.refuse(f"{row.place} has {name!r} where a token id is wanted", _TEXTS)
        pairs.append((_token(row, name, server), part["logprob"].logprob()))
    own = [value for other, value in pairs if other == token]
    if not own:
        raise row.refuse(
            f"{row.place} has another token than the {token} that was sent there",
            "rows of another prompt, or shifted by one: nothing can be aligned",
        )
    # with none asked for, the row holds the given token alone
    return own[0], likeliest(pairs, token, own[0], k, row, few=False)


def streamed(event: Part, before: int) -> tuple[int, bool]:
    """Tokens so far, and whether they are all."""
    choices = event["choices"].items()
    if not choices:
        return before, False  # usage, after the last token
    choice = event["choices"].items(1, "request")[0]
    ids = choice.get("token_ids")
    count = len(ids.items()) if ids is not None else int(bool(choice["text"].text()))
    return before + count, choice.get("finish_reason") is not None


def replayed(answer: Answer, given: Sequence[int], choice: Part) -> Answer:
    """Given tokens that were decoded one by one."""
    if answer.tokens != tuple(given):
        raise choice.refuse(
            f"{choice.place}.token_ids are not the tokens that were to be decoded",
            "the server drew instead of replaying: score by prefill",
        )
    return answer


@DIALECTS.register("plain")
class Plain(Dialect):
    name = "plain"

    def meet(
        self, transport: Transport, served: str | None, known: Server | None = None
    ) -> Server | None:
        return Server(only_model(transport, served)[0])

    def refusal(self, sampling: Sampling, meaning: Meaning) -> tuple[str, str] | None:
        if neutral(sampling) or meaning == "processed":
            return None
        return (
            "the sampling has a temperature or a filter, and raw logprobs of drawn tokens do not "
            "say what they were drawn with",
            "let the server report logprobs after its sampling and declare `logprobs: processed`, "
            "or sample at temperature 1 without filters",
        )

    def draw(self, sequence: SequenceRequest, server: Server, meaning: Meaning) -> Request:
        return request(sequence, server)

    def drawn(self, reply: Part, sequence: SequenceRequest, server: Server) -> Answer:
        choice = only_choice(reply)
        echo = choice.get("prompt_token_ids")
        if echo is not None:
            same_prompt(echo, sequence.prompt)
        else:  # one that does not even say how long the prompt was is not believed
            same_number(reply["usage"]["prompt_tokens"], sequence.prompt)
        ids = choice.get("token_ids")
        if ids is None:
            names = choice["logprobs"]["tokens"].items()
            tokens = tuple(named(part, server) for part in names)
        else:
            tokens = ids.tokens(server.vocab_size)
        ended(choice, tokens, sequence, server)
        return answer(choice, tokens, sequence, server)

    def event(self, event: Part, before: int) -> tuple[int, bool]:
        return streamed(event, before)
