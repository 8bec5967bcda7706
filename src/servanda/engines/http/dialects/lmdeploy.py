# lmdeploy's server, by its own /generate.
#
# Written from the source of 0.16 (serve/openai).  `output_token_logprobs` are [logprob, id], of
# drawn tokens alone, before the temperature and the filters, and only of a server that was started
# with --logprobs-mode raw_logprobs.  No endpoint scores given tokens one by one, and no request has
# a seed.  Routed experts come as lists, [tokens that were fed, layers, experts].

from __future__ import annotations

from dataclasses import replace

import numpy as np

from servanda.engines.http import routed_experts
from servanda.engines.http.dialects.base import (
    DIALECTS,
    Answer,
    Dialect,
    Meaning,
    Request,
    SequenceRequest,
    Server,
    complete,
    neutral,
    only_model,
)
from servanda.engines.http.responses import Part, same_number
from servanda.engines.http.transport import Transport
from servanda.theory.sampling import Sampling

_OWNER = "lmdeploy"
_MODE = "start it with --logprobs-mode raw_logprobs"


@DIALECTS.register("lmdeploy")
class LMDeploy(Dialect):
    name = "lmdeploy"

    def meet(
        self, transport: Transport, served: str | None, known: Server | None = None
    ) -> Server | None:
        listed = transport.maybe("/v1/models")
        models = listed.get("data") if listed else None
        owners = [model.get("owned_by") for model in models.items()] if models else []
        if not any(owner is not None and owner.value == _OWNER for owner in owners):
            return None
        return Server(only_model(transport, served)[0])

    def refusal(self, sampling: Sampling, meaning: Meaning) -> tuple[str, str] | None:
        if neutral(sampling):
            return None
        return (
            "lmdeploy's logprobs are those before the temperature and the filters, and the "
            "sampling has one",
            "sample at temperature 1 without top_k, top_p and min_p",
        )

    def draw(self, sequence: SequenceRequest, server: Server, meaning: Meaning) -> Request:
        sampling = sequence.sampling
        return "/generate", {
            "input_ids": list(sequence.prompt),
            "max_tokens": sequence.width,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "stop": [],
            "ignore_eos": False,
            "return_logprob": sequence.record,
            # without it the token that ends an answer, and its logprob, are left out
            "include_stop_str_in_output": True,
            "return_routed_experts": sequence.record,
        }

    def drawn(self, reply: Part, sequence: SequenceRequest, server: Server) -> Answer:
        meta = reply["meta_info"]
        same_number(meta["prompt_tokens"], sequence.prompt)
        tokens = reply["output_ids"].tokens(server.vocab_size)
        complete(reply, tokens, sequence.width, meta["finish_reason"]["type"].text())
        pairs = meta.get("output_token_logprobs")
        if pairs is None:
            raise meta.refuse("meta_info.output_token_logprobs is missing", _MODE)
        logp = []
        for row, token in zip(pairs.items(len(tokens), "tokens"), tokens, strict=True):
            value, stated = row.items(2, "fields: logprob and id")
            if stated.token(server.vocab_size) != token:
                raise row.wrong(f"of the token {token}, which stands there")
            logp.append(value.logprob())
        answer = Answer(tokens, tuple(logp), ((),) * len(tokens))
        return _routed(answer, meta, len(sequence.prompt))

    def event(self, event: Part, before: int) -> tuple[int, bool]:
        meta = event["meta_info"]
        return meta["completion_tokens"].whole(), meta.get("finish_reason") is not None


def _routed(answer: Answer, meta: Part, prompt: int) -> Answer:
    """The answer with its experts; a server with a shared store names a key instead."""
    part, tokens = meta.get("routed_experts"), len(answer.tokens)
    if part is None or isinstance(part.value, str):
        return answer
    rows = [[[k.whole() for k in layer.items()] for layer in row.items()] for row in part.items()]
    try:
        route = np.array(rows, dtype=np.int64)
    except ValueError:
        route = np.zeros(0)
    if route.ndim != 3 or not route.size:
        raise part.wrong("a list of tokens, layers and experts")
    fed = prompt + tokens - 1
    return replace(answer, routes=routed_experts.answered(route, part, prompt, tokens, fed))
