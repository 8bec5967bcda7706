# vLLM's server, and `servanda tools serve-kernel`, which speaks the same.
#
# Seen on vLLM 0.32: `token_ids` and `logprobs` hold the token that ended the sequence, with
# its logprob, so nothing has to be appended; a stop token of the request's or of a model's
# generation_config is named by `stop_reason`.  `logprobs: k` lists k tokens, and the drawn
# one first where it is not among them.  -inf is written as -9999.  `prompt_logprobs` are raw
# whatever --logprobs-mode says.  `trace_decode_token_ids` is no field of /v1/completions
# there, and is ignored without a word: only a server that announces it is trusted with it.

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from servanda.contract.identity import DEFAULT
from servanda.contract.model import Path
from servanda.engines.http import routed_experts
from servanda.engines.http.dialects import openai
from servanda.engines.http.dialects.base import (
    CHAT,
    DIALECTS,
    NEUTRAL,
    TOP,
    Answer,
    Dialect,
    Ids,
    Meaning,
    Request,
    SequenceRequest,
    Server,
    Serving,
    neutral,
    only_model,
    with_end,
)
from servanda.engines.http.responses import Part, same_prompt
from servanda.engines.http.transport import StatusError, Transport
from servanda.engines.neutral_fields import DECIDING
from servanda.errors import MeasurementError
from servanda.theory.sampling import Sampling

_ALLOWED = re.compile(r"max allowed: ([0-9]{1,6})", re.ASCII)
_CACHE = re.compile(r'\b(block_size|cache_dtype|enable_prefix_caching)="([^"]*)"')
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
RAW = (
    "the sampling has a temperature or a filter, and raw logprobs of drawn tokens do not say what "
    "they were drawn with",
    "start the server with --logprobs-mode processed_logprobs and declare `logprobs: processed`",
)


@DIALECTS.register("vllm")
class VLLM(Dialect):
    name = "vllm"
    encodes = decodes = True
    seed_bits = 53  # what JSON carries exactly everywhere

    def meet(
        self, transport: Transport, served: str | None, known: Server | None = None
    ) -> Server | None:
        ours = transport.maybe("/servanda/describe")
        version = (ours or transport.maybe("/version") or Part({}, "", "", "")).get("version")
        if version is None and ours is None:
            return None
        name, model = only_model(transport, served)
        length = model.get("max_model_len")
        server = Server(
            served=name,
            version=version.text() if version else "",
            # scoring asks for one token more, since a request without one is refused
            context=length.whole() - 1 if length else None,
            scores=("prefill",),
        )
        if ours is not None:
            return _announced(server, ours)
        top = known.top if known is not None else self._top(transport, name)
        defaults = known.defaults if known is not None else _defaults(transport, name)
        stated = {f"{DEFAULT}{key}": f"{value:g}" for key, value in (defaults or {}).items()}
        # what the metrics page tells of the cache that may change a number
        metrics = (transport.text("/metrics") or "").splitlines()
        cache = next((m for m in metrics if m.startswith("vllm:cache_config_info{")), "")
        facts = {**dict(_CACHE.findall(cache)), **stated}
        return replace(server, top=top, defaults=defaults, facts=facts)

    def _top(self, transport: Transport, served: str) -> int:
        """How many top-k tokens of a prompt's rows the server gives."""
        sequence = SequenceRequest((0, 0), 1, NEUTRAL, 0, best=TOP)
        try:
            endpoint, body = openai.request(
                sequence, Server(served), logprobs=None, prompt_logprobs=TOP
            )
            transport.ask(endpoint, body)
        except StatusError as refused:
            allowed = _ALLOWED.search(refused.text)
            if allowed is None:
                raise
            return min(TOP, int(allowed[1]))
        return TOP

    def serving(self, transport: Transport, server: Server) -> Serving:
        """What it makes of chats before it runs them; versions without that endpoint do not say."""
        chat = {"model": server.served, **CHAT}
        plain, tools = _made(transport, chat), _made(transport, {**chat, "tools": [_TOOL]})
        return Serving(
            limit=_limit(plain, server) if plain is not None else None,
            masks=tools is not None
            and tools["sampling_params"].get("structured_outputs") is not None,
        )

    def refusal(self, sampling: Sampling, meaning: Meaning) -> tuple[str, str] | None:
        if neutral(sampling):
            return None
        if meaning == "raw":
            return RAW
        if sampling.min_p > 0.0 and sampling.top_p < 1.0:
            return (
                "vLLM applies min-p before top-p, and the workload's sampling has it after",
                "declare one of the two filters, not both",
            )
        return None

    def draw(self, sequence: SequenceRequest, server: Server, meaning: Meaning) -> Request:
        more = {} if sequence.salt is None else {"cache_salt": sequence.salt}
        return openai.request(sequence, server, **more)

    def drawn(self, reply: Part, sequence: SequenceRequest, server: Server) -> Answer:
        choice = openai.only_choice(reply)
        same_prompt(choice["prompt_token_ids"], sequence.prompt)
        tokens = choice["token_ids"].tokens(server.vocab_size)
        openai.ended(choice, tokens, sequence, server)
        answer = openai.answer(choice, tokens, sequence, server)
        reason = choice.get("stop_reason")
        if reason is not None and isinstance(reason.value, int):
            answer = with_end(answer, reason.token(server.vocab_size), sequence.width)
        # vLLM says it where it was started with --enable-prompt-tokens-details
        details = reply["usage"].get("prompt_tokens_details") if sequence.salt else None
        cached = details.get("cached_tokens") if details is not None else None
        answer = answer if cached is None else replace(answer, cached=cached.whole())
        return _routed(answer, choice, len(sequence.prompt))

    def score(self, sequence: SequenceRequest, server: Server, path: Path) -> Request:
        if path == "decode":
            return openai.request(sequence, server, trace_decode_token_ids=list(sequence.given))
        endpoint, body = openai.request(sequence, server)
        changes = {
            "prompt": [*sequence.prompt, *sequence.given],
            "max_tokens": 1,
            "logprobs": None,
            "prompt_logprobs": sequence.best,
            # a prefix that was computed before would be read, and not computed
            "cache_salt": sequence.salt or secrets.token_hex(16),
        }
        return endpoint, {**body, **changes}

    def scored(self, reply: Part, sequence: SequenceRequest, server: Server, path: Path) -> Answer:
        choice = openai.only_choice(reply)
        if path == "decode":
            same_prompt(choice["prompt_token_ids"], sequence.prompt)
            tokens = choice["token_ids"].tokens(server.vocab_size)
            answer = openai.answer(choice, tokens, sequence, server)
            answer = openai.replayed(answer, sequence.given, choice)
            return _routed(answer, choice, len(sequence.prompt))
        same_prompt(choice["prompt_token_ids"], (*sequence.prompt, *sequence.given))
        answer = openai.rows(choice, sequence, server)
        return _routed(answer, choice, len(sequence.prompt), more=1)  # it drew a token besides

    def event(self, event: Part, before: int) -> tuple[int, bool]:
        return openai.streamed(event, before)

    def encode(self, text: str, server: Server) -> Request:
        body = {"model": server.served, "prompt": text, "add_special_tokens": False}
        return "/tokenize", body

    def decode(self, ids: Ids, server: Server) -> Request:
        return "/detokenize", {"model": server.served, "tokens": list(ids)}

    def decoded(self, reply: Part) -> str:
        return reply["prompt"].text()


def _routed(answer: Answer, choice: Part, prompt: int, more: int = 0) -> Answer:
    """The answer with its experts, of a server that was started to return them.

    Args:
        more: tokens that were drawn after those of the answer.
    """
    part = choice.get("routed_experts")
    if part is None:
        return answer
    tokens = len(answer.tokens)
    fed = prompt + tokens + more - 1
    return replace(
        answer,
        routes=routed_experts.answered(routed_experts.as_npy(part), part, prompt, tokens, fed),
    )


def _defaults(transport: Transport, served: str) -> dict[str, float] | None:
    """What a request gets that names no sampling (of the model's generation_config.json, say).

    As the server itself completes such a request; versions without that endpoint do not say.
    """
    try:
        body = {"model": served, "prompt": [0], "max_tokens": 1}
        (made,) = transport.ask("/v1/completions/render", body).items()
        params = made["sampling_params"]
        parts = {name: params.get(name) for name in DECIDING}
        return {name: part.number() for name, part in parts.items() if part is not None}
    except (StatusError, MeasurementError, ValueError):
        return None


def _made(transport: Transport, chat: Mapping[str, Any]) -> Part | None:
    """A chat as the server completes and renders it; None where it does not."""
    try:
        made = transport.ask("/v1/chat/completions/render", chat)
        return made if made.get("sampling_params") else None
    except (StatusError, MeasurementError):
        return None


def _limit(made: Part, server: Server) -> int | None:
    """New tokens of a chat that names no number, where they are fewer than there is room for."""
    most = made["sampling_params"].get("max_tokens")
    room = (server.context or 0) + 1 - len(made["token_ids"].items())
    return most.whole() if most is not None and most.whole() < room else None


def _announced(server: Server, ours: Part) -> Server:
    """What a servanda server knows of its kernel besides."""

    def text(key: str) -> str:
        part = ours.get(key)
        return part.text() if part is not None else ""

    scores, eos, defaults = (ours.get(key) for key in ("scores", "eos", "sampling_defaults"))
    size, facts = ours.get("vocab_size"), ours.get("fingerprint")
    logits, most = ours.get("full_logits"), ours.get("max_logprobs")
    paths: tuple[Path, ...] = ("prefill", "decode")
    named = [part.text() for part in scores.items()] if scores else ["prefill"]
    vocab_size = size.whole() if size else 0
    top = min(TOP, most.whole() if most else TOP, vocab_size or TOP)
    return Server(
        served=server.served,
        version=server.version,
        context=server.context,
        vocab_size=vocab_size,
        tokens=text("tokens"),
        eos=eos.tokens(0) if eos else (),
        weights=text("weights"),
        scores=tuple(path for path in paths if path in named),
        top=top if logits is None or logits.value is True else 0,
        meaning="processed" if text("logprobs") == "processed" else None,
        defaults={k: v.number() for k, v in defaults.fields()} if defaults is not None else None,
        facts={f"kernel.{key}": part.text() for key, part in (facts.fields() if facts else ())},
    )
