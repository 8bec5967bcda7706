# llama-server, by its own /completion.
#
# Seen on build b1-0c1e570: `tokens` and `completion_probabilities` hold the token that ended
# the sequence.  `n_probs` lists only the most likely tokens, whichever was sampled.  Before
# sampling a logprob is that of the plain softmax, after it (post_sampling_probs) a probability of
# what the filters left, and the list may be shorter than requested.  A probability of 0 has the
# logprob -3.4e38.  The echoed prompt is a text, so only its length can be held against what was
# sent; a BOS is added to texts alone.  There are no logprobs of a prompt.  A token after which the
# text is no valid UTF-8, as within a character, has no entry in `completion_probabilities`.

from __future__ import annotations

import math

from servanda.contract.identity import DEFAULT
from servanda.contract.model import Path
from servanda.engines.http.dialects.base import (
    DIALECTS,
    Answer,
    Dialect,
    Ids,
    Meaning,
    Request,
    SequenceRequest,
    Server,
    Serving,
    complete,
    neutral,
    only_model,
)
from servanda.engines.http.responses import Best, Part, likeliest, same_number
from servanda.engines.http.transport import Transport
from servanda.errors import MeasurementError
from servanda.theory.sampling import Sampling

# of /props: what a request that names none is drawn with
_DEFAULTS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty"),
    *("presence_penalty", "frequency_penalty", "dry_multiplier", "xtc_probability", "mirostat"),
)
# those that other servers know by the same name, and of the others the value that changes no draw
_OURS = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
_OFF = {
    "typical_p": 1,
    "repeat_penalty": 1,
    "dynatemp_range": 0,
    "top_n_sigma": -1,
    "dry_multiplier": 0,
    "xtc_probability": 0,
    "mirostat": 0,
    "adaptive_target": -1,
}
_ENDS = {"eos": "stop", "limit": "length"}
# the order of our own transform; the server's default has the temperature last
_SAMPLERS = ["temperature", "top_k", "top_p", "min_p"]


@DIALECTS.register("llamacpp")
class LlamaCpp(Dialect):
    name = "llamacpp"
    encodes = decodes = True

    def meet(
        self, transport: Transport, served: str | None, known: Server | None = None
    ) -> Server | None:
        props = transport.maybe("/props")
        if props is None or props.get("build_info") is None:
            return None
        name, model = only_model(transport, served)
        meta, context = model.get("meta"), props["default_generation_settings"]["n_ctx"]
        facts = {key: part.text() for key in ("model_ftype",) if (part := props.get(key))}
        params = props["default_generation_settings"]
        params = params.get("params") or params
        facts |= {
            f"{DEFAULT}{key}": str(part.value)
            for key in _DEFAULTS
            if (part := params.get(key)) and part.value is not None
        }
        size = meta.get("n_vocab") if meta else None
        return Server(
            served=name,
            version=props["build_info"].text(),
            # the last place of a slot is never drawn into
            context=context.whole() - 1,
            vocab_size=size.whole() if size else 0,
            eos=_end(transport, props.get("eos_token")),
            defaults=_defaults(params),
            facts={**facts, "slots": str(props["total_slots"].whole())},
        )

    def serving(self, transport: Transport, server: Server) -> Serving:
        settings = transport.ask("/props")["default_generation_settings"]
        most = (settings.get("params") or settings)["n_predict"].number()
        # a streamed chat lacks the token that ended it
        return Serving(int(most) if most > 0 else None, frozenset(("streamed chats",)))

    def refusal(self, sampling: Sampling, meaning: Meaning) -> tuple[str, str] | None:
        return None  # probabilities after sampling can be had of any

    def draw(self, sequence: SequenceRequest, server: Server, meaning: Meaning) -> Request:
        sampling = sequence.sampling
        after = meaning == "processed" or not neutral(sampling)
        return "/completion", {
            "model": server.served,
            "prompt": list(sequence.prompt),
            "n_predict": sequence.width,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or 0,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repeat_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "samplers": _SAMPLERS,
            "seed": sequence.seed,
            "stop": [],
            "ignore_eos": False,
            "n_probs": max(sequence.best, 1) if sequence.record else 0,
            "post_sampling_probs": after and sequence.record,
            "return_tokens": True,
            # a cached prefix was computed in another batch
            "cache_prompt": sequence.warm,
        }

    def drawn(self, reply: Part, sequence: SequenceRequest, server: Server) -> Answer:
        same_number(
            reply["tokens_evaluated"],
            sequence.prompt,
            "start llama-server with a file whose tokenizer.ggml.add_bos_token is false",
        )
        tokens = reply["tokens"].tokens(server.vocab_size)
        why = reply["stop_type"].text()
        complete(reply, tokens, sequence.width, _ENDS.get(why, why))
        logp: list[float] = []
        best: list[Best] = []
        for step, token in zip(_steps(reply, tokens, server.vocab_size), tokens, strict=True):
            if step is None:
                logp.append(math.nan)
                best.append(())
                continue
            if step["id"].token(server.vocab_size) != token:
                raise step["id"].wrong(f"the token {token}, which `tokens` has there")
            after = "prob" in step.value
            value = _value(step, after)
            top = step["top_probs" if after else "top_logprobs"].items()
            if not top and sequence.best:
                raise step.refuse(
                    f"{step.place} is a token without logprobs, as llama-server reports one that "
                    "it accepted from a draft",
                    "start it without --spec-type",
                )
            pairs = [(p["id"].token(server.vocab_size), _value(p, after)) for p in top]
            k = max(sequence.best, 1)
            logp.append(value)
            pairs_of_best = likeliest(pairs, token, value, k, step, few=after)
            best.append(pairs_of_best if sequence.best else ())
        timings = reply.get("timings") if sequence.salt else None
        cached = timings.get("cache_n") if timings is not None else None
        return Answer(tokens, tuple(logp), tuple(best), cached and cached.whole())

    def score(self, sequence: SequenceRequest, server: Server, path: Path) -> Request:
        raise MeasurementError(
            "llama-server gives no logprobs of a prompt",
            hint="let it be infer, the side that draws; engine llamacpp scores with the same "
            "library",
        )

    def event(self, event: Part, before: int) -> tuple[int, bool]:
        # the last event has no tokens of its own
        return before + len(event["tokens"].items()), event["stop"].value is True

    def encode(self, text: str, server: Server) -> Request:
        return "/tokenize", {"content": text, "add_special": False}

    def decode(self, ids: Ids, server: Server) -> Request:
        return "/detokenize", {"tokens": list(ids)}

    def decoded(self, reply: Part) -> str:
        return reply["content"].text()


def _steps(reply: Part, tokens: Ids, size: int) -> list[Part | None]:
    """The entry of each token; None for those that llama-server leaves out, which are aligned by
    their ids.  A text of ASCII has all entries.
    """
    field, text = reply["completion_probabilities"], reply["content"].text()
    steps = field.items()
    if len(steps) >= len(tokens) or text.isascii():
        return [*field.items(len(tokens), "tokens")]
    found: list[Part | None] = []
    for token in reversed(tokens):
        here = bool(steps) and steps[-1]["id"].token(size) == token
        found.append(steps.pop() if here else None)
    if steps:
        field.items(len(tokens), "tokens")  # refused: these are entries of other tokens
    return found[::-1]


def _value(part: Part, after: bool) -> float:
    """The logprob of a step or of one of its top-k tokens."""
    key = "prob" if after else "logprob"
    if key not in part.value:
        raise part.refuse(f"{part.place} has no {key!r}", "update llama-server")
    field = Part(part.value[key], f"{part.place}.{key}", part.url, part.endpoint)
    return field.log_of_probability() if after else field.logprob()


def _defaults(params: Part) -> dict[str, float] | None:
    """What a request gets that names no sampling; under its own name what only this server has.

    None where it does not say all of it.
    """
    ours = {name: part.number() for name in _OURS if (part := params.get(name))}
    if len(ours) < len(_OURS):
        return None
    others = {name: part.number() for name in _OFF if (part := params.get(name))}
    return ours | {name: value for name, value in others.items() if value != _OFF[name]}


def _end(transport: Transport, token: Part | None) -> Ids:
    """The id of the end token, whose text /props tells."""
    if token is None or not token.text():
        return ()
    body = {"content": token.text(), "add_special": False, "parse_special": True}
    ids = transport.ask("/tokenize", body)["tokens"].tokens(0)
    return ids if len(ids) == 1 else ()
