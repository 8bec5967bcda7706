# Any other server of OpenAI's /v1/completions.
#
# It is asked in vLLM's words, and believed only where token ids come back: a token's text
# does not tell its id.  Given tokens cannot be scored: no two servers echo a prompt alike.

from __future__ import annotations

from servanda.engines.http.dialects import openai_token_ids
from servanda.engines.http.dialects.base import (
    DIALECTS,
    Answer,
    Dialect,
    Meaning,
    Request,
    SequenceRequest,
    Server,
    neutral,
    only_model,
)
from servanda.engines.http.responses import Part, same_number, same_prompt
from servanda.engines.http.transport import Transport
from servanda.theory.sampling import Sampling


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
        return openai_token_ids.request(sequence, server)

    def drawn(self, reply: Part, sequence: SequenceRequest, server: Server) -> Answer:
        choice = openai_token_ids.only_choice(reply)
        echo = choice.get("prompt_token_ids")
        if echo is not None:
            same_prompt(echo, sequence.prompt)
        else:  # one that does not even say how long the prompt was is not believed
            same_number(reply["usage"]["prompt_tokens"], sequence.prompt)
        ids = choice.get("token_ids")
        if ids is None:
            names = choice["logprobs"]["tokens"].items()
            tokens = tuple(openai_token_ids.named(part, server) for part in names)
        else:
            tokens = ids.tokens(server.vocab_size)
        openai_token_ids.ended(choice, tokens, sequence, server)
        return openai_token_ids.answer(choice, tokens, sequence, server)

    def event(self, event: Part, before: int) -> tuple[int, bool]:
        return openai_token_ids.streamed(event, before)
