# SGLang's server, by its own /generate.
#
# Written from its documentation; what it says is read as strictly as anything else.
# `output_token_logprobs` are [logprob, id, text]: after the temperature, before the filters
# (SGLANG_RETURN_ORIGINAL_LOGPROB=1: before both).  `input_token_logprobs` are at temperature
# 1, with null first.  A request that hits the prefix cache returns fewer rows of its prompt,
# so the cache is flushed before scoring.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from servanda.contract.identity import DEFAULT
from servanda.contract.model import Path
from servanda.engines.http import routed_experts
from servanda.engines.http.dialects.base import (
    CHAT,
    DIALECTS,
    TOP,
    Answer,
    Dialect,
    Ids,
    Meaning,
    Mute,
    Request,
    SequenceRequest,
    Server,
    Serving,
    complete,
    only_model,
    with_end,
)
from servanda.engines.http.dialects.openai import ENDPOINT
from servanda.engines.http.responses import Best, Part, likeliest, same_number, same_prompt
from servanda.engines.http.transport import StatusError, Transport
from servanda.theory.sampling import Sampling

_FACTS = ("dtype", "quantization", "kv_cache_dtype", "attention_backend", "sampling_backend",
          "tp_size", "enable_deterministic_inference", "disable_radix_cache",
          "chunked_prefill_size", "enable_return_routed_experts")  # fmt: skip
_RETURNS, _PICKED, _UNTOLD = "enable_return_routed_experts", "experts_of_a_token", "untold"
_ROWS = 512  # tokens of a prompt that tells how many experts a token has


@DIALECTS.register("sglang")
class SGLang(Dialect):
    name = "sglang"
    meaning: Meaning = "processed"
    flush = "/flush_cache"

    def meet(
        self, transport: Transport, served: str | None, known: Server | None = None
    ) -> Server | None:
        info = transport.maybe("/get_model_info")
        if info is None or info.get("model_path") is None:
            return None
        name, model = only_model(transport, served)
        about = transport.maybe("/get_server_info") or info
        length, version = model.get("max_model_len"), about.get("version")
        facts = {key: str(part.value) for key in _FACTS if (part := about.get(key))}
        # "model": those of the folder's generation_config.json; others were preferred at the start
        facts |= {
            f"{DEFAULT}{key}": str(part.value)
            for key in ("sampling_defaults", "preferred_sampling_params")
            if (part := about.get(key)) and part.value is not None
        }
        sampling, preferred = about.get("sampling_defaults"), about.get("preferred_sampling_params")
        openai = sampling is not None and sampling.value == "openai" and preferred is None
        if facts.get(_RETURNS) == "True":
            experts = known.facts.get(_PICKED) if known else _experts(transport, length)
            facts |= {_PICKED: experts or _UNTOLD}
        return Server(
            served=name,
            version=version.text() if version else "",
            context=length.whole() - 1 if length else None,
            scores=("prefill",),
            top=TOP,
            defaults={} if openai else None,
            facts=facts,
        )

    def serving(self, transport: Transport, server: Server) -> Serving:
        """Which answers come with token ids is a matter of its version: it is asked for some."""
        ids = {"model": server.served, "max_tokens": 1, "return_token_ids": True}
        framed = {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}
        mute: set[Mute] = set()
        if "token_ids" not in _first_of(_reply(transport, ENDPOINT, {**ids, "prompt": [0]})):
            mute.add("completions")
        chat = _reply(transport, "/v1/chat/completions", {**ids, **framed, **CHAT})
        if "token_ids" not in _first_of(chat):
            mute.add("chats")
        if "output_ids" not in (chat.get("sglext") or {}):
            mute.add("streamed chats")
        return Serving(mute=frozenset(mute))

    def refusal(self, sampling: Sampling, meaning: Meaning) -> tuple[str, str] | None:
        if sampling.filters:
            return (
                "SGLang's logprobs are those before its filters, and the sampling has one",
                "sample without top_k, top_p and min_p",
            )
        if sampling.temperature != 1.0 and meaning == "raw":
            return (
                "the sampling has a temperature, and logprobs before it do not say what tokens "
                "were drawn with",
                "start the server without SGLANG_RETURN_ORIGINAL_LOGPROB and declare "
                "`logprobs: processed`",
            )
        return None

    def draw(self, sequence: SequenceRequest, server: Server, meaning: Meaning) -> Request:
        # the seed counts where the server was started with --enable-deterministic-inference
        sampling = sequence.sampling
        return "/generate", {
            "input_ids": list(sequence.prompt),
            "sampling_params": {
                "max_new_tokens": sequence.width,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "sampling_seed": sequence.seed,
                "n": 1,
                "stop": [],
                "ignore_eos": False,
            },
            "return_logprob": sequence.record,
            "logprob_start_len": -1,
            "top_logprobs_num": sequence.best if sequence.record else 0,
            "return_text_in_logprobs": False,
            **({"return_routed_experts": True} if _records(server) else {}),
        }

    def drawn(self, reply: Part, sequence: SequenceRequest, server: Server) -> Answer:
        meta = reply["meta_info"]
        same_number(meta["prompt_tokens"], sequence.prompt)
        tokens = reply["output_ids"].tokens(server.vocab_size)
        why = meta["finish_reason"]
        complete(reply, tokens, sequence.width, why["type"].text())
        answer = _steps(meta, "output", tokens, sequence, server, 0)
        cached = meta.get("cached_tokens") if sequence.salt else None
        if cached is not None:
            answer = replace(answer, cached=cached.whole())
        matched = why.get("matched")
        if matched is not None and isinstance(matched.value, int):
            answer = with_end(answer, matched.token(server.vocab_size), sequence.width)
        return _routed(answer, meta, len(sequence.prompt), server)

    def score(self, sequence: SequenceRequest, server: Server, path: Path) -> Request:
        endpoint, body = self.draw(sequence, server, "raw")
        text = [*sequence.prompt, *sequence.given]
        changes = {"input_ids": text, "logprob_start_len": 0, "top_logprobs_num": sequence.best}
        changes["sampling_params"] = {**body["sampling_params"], "max_new_tokens": 0}
        return endpoint, {**body, **changes}

    def scored(self, reply: Part, sequence: SequenceRequest, server: Server, path: Path) -> Answer:
        meta, text = reply["meta_info"], (*sequence.prompt, *sequence.given)
        rows = meta["input_token_logprobs"].items(len(text), "tokens of the prompt")
        ids = [_pair(row, server)[0] for row in rows]
        place = f"{rows[0].place.removesuffix('[0]')}[*][1]"
        same_prompt(Part(ids, place, reply.url, reply.endpoint), text)
        prompt = len(sequence.prompt)
        answer = _steps(meta, "input", sequence.given, sequence, server, prompt)
        return _routed(answer, meta, prompt, server)

    def event(self, event: Part, before: int) -> tuple[int, bool]:
        # its ids are all so far or the new ones, as the server was started; the count is not
        meta = event["meta_info"]
        return meta["completion_tokens"].whole(), meta.get("finish_reason") is not None


def _records(server: Server) -> bool:
    return server.facts.get(_PICKED, _UNTOLD) != _UNTOLD


def _experts(transport: Transport, length: Part | None) -> str | None:
    """How many experts a token has in a layer, from the rows of a prompt; None if they differ."""
    ids = list(range(1, min(_ROWS, length.whole() - 1 if length else _ROWS)))
    sampling = {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "return_routed_experts": True}
    meta = transport.ask("/generate", body)["meta_info"]
    part = meta.get("routed_experts")
    if part is None:
        return None
    route = routed_experts.as_numbers(part, meta.get("routed_experts_dtype"), len(ids))
    experts = routed_experts.experts_of_token(route[:, :, 0])
    return None if experts is None else str(experts)


def _routed(answer: Answer, meta: Part, prompt: int, server: Server) -> Answer:
    """The answer with its experts, of a server that was asked for them."""
    part, tokens = meta.get("routed_experts"), len(answer.tokens)
    if part is None or not _records(server):
        return answer
    fed = prompt + tokens - 1
    experts = int(server.facts[_PICKED])
    route = routed_experts.as_numbers(part, meta.get("routed_experts_dtype"), fed, experts)
    return replace(answer, routes=routed_experts.answered(route, part, prompt, tokens, fed))


def _reply(transport: Transport, endpoint: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A reply as it is; empty where the request is refused."""
    try:
        value = transport.ask(endpoint, body).value
    except StatusError:
        return {}
    return value if isinstance(value, dict) else {}


def _first_of(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first choice of a reply without its nulls; empty where there is none."""
    choices: Any = reply.get("choices")
    first = choices[0] if choices else {}
    return {name: value for name, value in first.items() if value is not None}


def _steps(
    meta: Part, side: str, tokens: Ids, sequence: SequenceRequest, server: Server, first: int
) -> Answer:
    """Logprobs of the tokens from row `first` on; side: "input" or "output"."""
    rows = meta[f"{side}_token_logprobs"].items(first + len(tokens), "tokens")[first:]
    logp: list[float] = []
    for row, token in zip(rows, tokens, strict=True):
        stated, value = _pair(row, server)
        if stated != token:
            raise row.wrong(f"of the token {token}, which stands there")
        logp.append(value)
    best: list[Best] = [()] * len(tokens)
    if sequence.best:
        lists = meta[f"{side}_top_logprobs"].items(first + len(tokens), "tokens")[first:]
        for at, row in enumerate(lists):
            if row.value is not None:
                pairs = [_pair(part, server) for part in row.items()]
                best[at] = likeliest(pairs, tokens[at], logp[at], sequence.best, row, few=False)
    return Answer(tokens, tuple(logp), tuple(best))


def _pair(row: Part, server: Server) -> tuple[int, float]:
    """A token id and its logprob, of [logprob, id, text]."""
    value, token, *_ = row.items(3, "fields: logprob, id and text")
    return token.token(server.vocab_size), value.logprob()
