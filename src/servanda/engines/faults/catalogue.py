# The faults of the catalogue, in its order.

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from servanda.contract.identity import Description, digest_of
from servanda.engines.faults.base import Between, Fault, OneOf, fault
from servanda.registry import Registry
from servanda.theory.sampling import Floats, Ints, Sampling, uniforms
from servanda.traces.trace import Batch, Trace

# Faults of attention and of batches: a query sees other keys than it should, or sees them
# blurred; a sequence's numbers depend on the company it runs in.
# Axes: S rows, C columns that are fed, T columns so far, H heads of keys, D their width.


@fault(
    "mask_contamination",
    "Left padding is attended to, so that a sequence depends on its batch's longest prompt.",
    seen="ml-explore/mlx-lm#1906 and Blaizzy/mlx-vlm#1946: the left-padding mask never "
    "reached attention, in prefill or in decoding",
)
def mask_contamination(base: Any, _: bool) -> Any:
    class Contaminated(base):
        def _attended(self, mask_ST: Any, columns: int) -> Any:
            # positions still count from the first real token; only the mask is lost
            return super()._attended(mask_ST.new_ones(mask_ST.shape), columns)

    return Contaminated


@fault(
    "attention_window",
    "Keys more than `value` - 1 tokens back are not attended to.",
    default=128,
    takes=Between(1, 10_000_000, whole=True),
    seen="vllm-project/vllm#49795: a sliding_window in the config was applied to layers that "
    "are declared full_attention, and prompts beyond it came back degenerate",
    field=512,
    field_source="the sliding_window of Gemma 3 1B",
    strengths=(512, 256, 128),
)
def attention_window(base: Any, value: int) -> Any:
    class Windowed(base):
        def _attended(self, mask_ST: Any, columns: int) -> Any:
            import torch

            if int(mask_ST.sum(dim=-1).max()) <= value:
                return super()._attended(mask_ST, columns)
            at_T = torch.arange(mask_ST.shape[1], device=mask_ST.device)
            back_CT = at_T[-columns:, None] - at_T
            near_CT = (back_CT >= 0) & (back_CT < value)
            # a column of padding sees itself: a row without a key would turn NaN
            seen_SCT = (near_CT & mask_ST[:, None, :].bool()) | (back_CT == 0)
            if self.kernel.attention.startswith("sdpa"):
                return seen_SCT[:, None]
            dtype = self.model.dtype
            return torch.where(seen_SCT, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]

    return Windowed


@fault(
    "kv_cache_int8",
    "Cached keys and values go through int8, with one scale a token, or one a head that the "
    "prompt fixes.",
    default="head",
    takes=OneOf(("token", "head")),
    seen="vllm-project/vllm#11906 and #54705: a quantised KV cache without calibrated scales "
    "clips outliers; the scales may come from the first input a layer sees",
    field="head",
    field_source="scales from the first input",
    strengths=("token", "head"),
)
def kv_cache_int8(base: Any, value: str) -> Any:
    class Int8Cache(base):
        def _cache(self) -> Any:
            cache = super()._cache()
            cache.__class__ = _int8(type(cache), value)
            cache.scales = {}
            return cache

    return Int8Cache


def _int8(base: Any, granularity: str) -> Any:
    """A class of cache whose keys and values come back as whole multiples of a scale."""

    class Int8(base):
        def update(self, keys: Any, values: Any, layer: int, *more: Any, **options: Any) -> Any:
            keys, values = (
                self._rounded(x, (layer, name)) for name, x in (("k", keys), ("v", values))
            )
            return super().update(keys, values, layer, *more, **options)

        def _rounded(self, x_SHTD: Any, key: tuple[int, str]) -> Any:
            x = x_SHTD.float()
            over = (-1,) if granularity == "token" else (2, 3)
            scale = (x.abs().amax(dim=over, keepdim=True) / 127).clamp_min(1e-30)
            if granularity == "head":
                scale = self.scales.setdefault(key, scale)  # the prompt's, from then on
            return ((x / scale).round().clamp(-127, 127) * scale).to(x_SHTD.dtype)

    return Int8


@fault(
    "batch_dependent",
    "A share `value` of each row's logits comes from its neighbour in the batch.",
    default=0.1,
    takes=Between(0, 1),
    seen="ml-explore/mlx-lm#1457: rows of a batched decode step returned corrupted logits; "
    "vllm-project/vllm#9567: logprobs that move with the batch by more than rounding",
    strengths=(0.001, 0.01, 0.1),
)
def batch_dependent(base: Any, value: float) -> Any:
    class Leaky(base):
        def _forward(self, ids_ST: Any, mask_ST: Any, **options: Any) -> Any:
            import torch

            logits = super()._forward(ids_ST, mask_ST, **options)
            if len(logits) == 1:
                return logits
            with torch.inference_mode():
                return logits.lerp(logits.roll(1, dims=0), value)

    return Leaky


# Faults of delivery: some dispatched sequences do not return.


@fault(
    "lost_sequences",
    "A share `value` of the full-length sequences times out; a shorter one less often.",
    default=0.05,
    takes=Between(0, 1),
    seen="NVIDIA-NeMo/RL#4218: what did not come back was read as the logprob 0.0, certainty",
    strengths=(0.001, 0.005, 0.05),
)
def lost_sequences(base: Any, value: float) -> Any:
    class Lossy(base):
        def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Trace:
            trace = super().generate(batch, sampling, seed)
            luck_S = np.array([uniforms(seed, "fault", s, 1)[0] for s in batch.sequence_S])
            lost_S = luck_S < float(value) * trace.length_S / batch.width
            keep_N = np.repeat(~lost_S, trace.length_S)
            return replace(
                trace,
                length_S=np.where(lost_S, 0, trace.length_S),
                lost_S=lost_S,
                token_N=trace.token_N[keep_N],
                columns={name: column[keep_N] for name, column in trace.columns.items()},
            )

    return Lossy


# Faults of arithmetic: weights or intermediate numbers of another precision than is said.


@fault(
    "int4",
    "Weights are quantised to 4 bits in groups of 32, though the kernel says otherwise.",
)
def int4(base: Any, _: bool) -> Any:
    class FourBit(base):
        def _finish(self, quantization: str | None) -> None:
            super()._finish("int4_g32")

    return FourBit


@fault(
    "norm_epsilon",
    "The epsilon of the RMS norms is `value` times that of the config.",
    default=1000.0,  # 100 times the field's, whose 10 no gate sees on a model as small as ours
    takes=Between(0, 1e9),
    seen="ggml-org/llama.cpp#2373: 1e-6 was hard-coded, and LLaMA 2 was trained with 1e-5",
    field=10.0,
    field_source="1e-5 in the place of 1e-6",
    strengths=(10.0, 100.0, 300.0, 1000.0),
)
def norm_epsilon(base: Any, value: float) -> Any:
    class OtherEpsilon(base):
        def _finish(self, quantization: str | None) -> None:
            super()._finish(quantization)
            for module in self.model.modules():
                if hasattr(module, "variance_epsilon"):
                    module.variance_epsilon *= float(value)

    return OtherEpsilon


@fault(
    "corrupted_vocabulary",
    "The head's rows of one slice of the vocabulary, a share `value` at its end, are rounded "
    "to 3 bits.",
    default=0.125,
    takes=Between(0, 1),
    seen="intel/llm-scaler#633 and sgl-project/sglang#35358: single tokens silently wrong with "
    "tensor parallelism, and a quantised head that was never filled",
    strengths=(0.008, 0.03, 0.125),
)
def corrupted_vocabulary(base: Any, value: float) -> Any:
    class Corrupted(base):
        def _finish(self, quantization: str | None) -> None:
            import torch

            super()._finish(quantization)
            rows_RD = untied_head(self.model)
            rows_RD = rows_RD[len(rows_RD) - max(1, round(value * len(rows_RD))) :]
            scale_R1 = rows_RD.abs().amax(dim=-1, keepdim=True).float() / 3
            scale_R1 = scale_R1.clamp_min(torch.finfo(torch.float32).tiny)
            rows_RD.copy_((rows_RD.float() / scale_R1).round() * scale_R1)

    return Corrupted


@fault(
    "bf16_logits",
    "Logits are rounded to bfloat16 before the softmax.",
    side="train",
    seen="MiniMax-M1 (arXiv 2506.13585): probabilities of trainer and engine agreed better once "
    "the output head ran in float32",
)
def bf16_logits(base: Any, _: bool) -> Any:
    class Coarse(base):
        def _forward(self, ids_ST: Any, mask_ST: Any, **options: Any) -> Any:
            import torch

            logits = super()._forward(ids_ST, mask_ST, **options)
            return logits.to(torch.bfloat16).to(logits.dtype)

    return Coarse


def untied_head(model: Any) -> Any:
    """The weight [V, D] of the output head, made the head's own where it was the embedding's."""
    import torch

    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    return head.weight


# Faults of identity: the engine serves something else than the policy in question.


_STALE_SCALE = 2e-3  # about a hundred small optimiser steps


@fault(
    "permuted_ids",
    "Token ids are shifted by `value`, as in an engine that loaded another tokenizer.",
    default=1,
    takes=Between(1, 10_000_000, whole=True),
    seen="vllm-project/vllm#8904: one prompt, other token ids in Transformers and in the server",
    field=1,
    field_source="any shift",
)
def permuted_ids(base: Any, value: int) -> Any:
    class Permuted(base):
        def encode(self, texts: Sequence[str]) -> list[list[int]]:
            size = super().describe().vocab_size
            return [[(i + value) % size for i in ids] for ids in super().encode(texts)]

        def vocabulary(self) -> list[str]:
            tokens = super().vocabulary()
            return [tokens[(i - value) % len(tokens)] for i in range(len(tokens))]

        def describe(self) -> Description:
            return replace(super().describe(), tokens=digest_of(self.vocabulary()))

    return Permuted


def _earlier(tensor: Any, generator: Any, value: float) -> Any:
    """The tensor as it was `value` hundreds of small steps ago: off by seeded noise."""
    import torch

    noise = torch.randn(tensor.shape, generator=generator) * (_STALE_SCALE * value)
    return (tensor.float() + noise).to(tensor.dtype)


@fault(
    "stale_weights",
    "The weights are those of an earlier step: every tensor is off by seeded noise times `value`.",
    default=1.0,
    takes=Between(0, 1000),
    seen="unslothai/unsloth#8701: every rollout came from the base model, the adapter ignored; "
    "huggingface/trl#5312: weights lost at sleep level 2",
    strengths=(0.001, 1.0),
)
def stale_weights(base: Any, value: float) -> Any:
    class Stale(base):
        def _load_state(self) -> dict[str, Any]:
            import torch

            generator = torch.Generator().manual_seed(0)
            state = super()._load_state()
            return {name: _earlier(t, generator, value) for name, t in state.items()}

    return Stale


@fault(
    "stale_tied_head",
    "The output head keeps the weights of an earlier step while the embedding it was tied to "
    "is fresh.",
    default=1.0,
    takes=Between(0, 1000),
    seen="vllm-project/vllm#51665 and PrimeIntellect-ai/prime-rl#2823: an embedding update need "
    "not reach a head that was loaded as a tensor of its own",
    field=0.01,
    field_source="one update behind",
    strengths=(0.01, 0.1, 0.3, 1.0),
)
def stale_tied_head(base: Any, value: float) -> Any:
    class StaleHead(base):
        def _finish(self, quantization: str | None) -> None:
            import torch

            super()._finish(quantization)
            # digests are of the checkpoint, which was received whole: identity is blind here
            weight = untied_head(self.model)
            weight.copy_(_earlier(weight, torch.Generator().manual_seed(0), value))

    return StaleHead


# Faults of position: the kernel believes a token stands elsewhere.


@fault(
    "bf16_positions",
    "Position ids are kept in bfloat16: exact up to 256, then rounded to multiples of 2, 4, ...",
    seen="huggingface/transformers#29285 and EleutherAI/gpt-neox#1003: rotary embeddings "
    "computed in the model's low precision go wrong in long contexts",
)
def bf16_positions(base: Any, _: bool) -> Any:
    class Rounded(base):
        def _positions(self, mask: Any) -> Any:
            import torch

            positions = super()._positions(mask)
            return positions.to(torch.bfloat16).to(positions.dtype)

    return Rounded


@fault(
    "wrong_rope_base",
    "The base of the rotary embedding is `value` times that of the config.",
    default=2.0,
    takes=Between(0, 1e6),
    seen="deepspeedai/DeepSpeed#8345 and Open-Athena/MarinFold#184: rope_theta moved into "
    "rope_parameters, readers of the old key silently fell back to 10000",
    field=0.02,
    field_source="500000 read as 10000",
    strengths=(1.01, 1.1, 1.3, 2.0),
)
def wrong_rope_base(base: Any, value: float) -> Any:
    class OtherBase(base):
        def _finish(self, quantization: str | None) -> None:
            import torch

            super()._finish(quantization)
            for module in self.model.modules():
                if hasattr(module, "inv_freq"):
                    # inv_freq_i = base ** (-i / n), i = 0 .. n - 1
                    steps = torch.arange(len(module.inv_freq)) / len(module.inv_freq)
                    module.inv_freq *= float(value) ** -steps

    return OtherBase


# Faults of the record and of the sampler: the numbers of the right tokens belong to others, or
# tokens are drawn otherwise than the record says.
#
# Log-ratios are blind to those of the sampler: both sides score the tokens that came, and agree.


@fault(
    "off_by_one_shift",
    "Each token carries the logprob of the token `value` places later in its sequence.",
    default=1,
    takes=Between(1, 1000, whole=True),
    seen="AI-Hypercomputer/maxtext#2103 and modelscope/ms-swift#8196: logprobs one position away "
    "from the tokens they are compared on",
    field=1,
    field_source="one place",
)
def off_by_one_shift(base: Any, value: int) -> Any:
    class Shifted(base):
        def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Trace:
            return _shifted(super().generate(batch, sampling, seed), value)

        def score(self, batch: Batch, sampling: Sampling, path: Any) -> Trace:
            return _shifted(super().score(batch, sampling, path), value)

    return Shifted


def _shifted(trace: Trace, value: int) -> Trace:
    """The trace with the whole record moved; the last tokens of a sequence repeat its end."""
    end_N = np.repeat(trace.length_S.cumsum(), trace.length_S) - 1
    from_N = np.minimum(np.arange(len(end_N)) + value, end_N)
    return replace(trace, columns={name: column[from_N] for name, column in trace.columns.items()})


_VLLM_DEFAULTS = (
    "vLLM applies a model's generation_config.json to requests that name no sampling "
    "parameters, and its default logprobs are those before the filters"
)


def _undisclosed(base: Any, change: dict[str, Any]) -> Any:
    class Undisclosed(base):
        def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Trace:
            drawn = super().generate(batch, sampling.model_copy(update=change), seed)
            given = Batch(batch.sequence_S, batch.prompts, batch.width, drawn.continuations)
            # the record is that of the declared transform, on the very same path
            return super().score(given, sampling, "decode")

    return Undisclosed


@fault(
    "undisclosed_top_p",
    "The sampler draws from the nucleus of mass `value` and reports the declared distribution.",
    default=0.9,
    takes=Between(0, 1),
    seen=_VLLM_DEFAULTS,
    field=0.95,
    field_source="the default of llama.cpp's server",
    strengths=(0.99, 0.95, 0.9),
)
def undisclosed_top_p(base: Any, value: float) -> Any:
    return _undisclosed(base, {"top_p": float(value)})


@fault(
    "undisclosed_min_p",
    "The sampler drops tokens less likely than `value` times the best, and does not report it.",
    default=0.1,
    takes=Between(0, 0.999),
    seen=_VLLM_DEFAULTS,
    field=0.05,
    field_source="the default of llama.cpp's server",
    strengths=(0.01, 0.05, 0.1),
)
def undisclosed_min_p(base: Any, value: float) -> Any:
    return _undisclosed(base, {"min_p": float(value)})


@fault(
    "undisclosed_temperature",
    "The sampler draws at temperature `value` and reports the declared one's logprobs.",
    default=0.8,
    takes=Between(0, 2),
    seen=_VLLM_DEFAULTS,
    field=0.8,
    field_source="the default of llama.cpp's server",
    strengths=(0.99, 0.95, 0.9, 0.8),
)
def undisclosed_temperature(base: Any, value: float) -> Any:
    return _undisclosed(base, {"temperature": float(value)})


_COARSE = 2.0**20  # steps of [0, 1): luck is what is left of a uniform below one of them


@fault(
    "lost_top_token",
    "On a share `value` of the steps the most likely token cannot be drawn; no record says so.",
    default=0.02,
    takes=Between(0, 1),
    seen="Anthropic, A postmortem of three recent issues (2025): an approximate top-k, "
    "miscompiled by XLA:TPU, at times dropped the most probable token",
    strengths=(0.002, 0.007, 0.02),
)
def lost_top_token(base: Any, value: float) -> Any:
    class Lossy(base):
        def _draw(self, logp_SV: Floats, uniform_S: Floats) -> Ints:
            # the low digits of a uniform are uniform too, and say nothing of the token: so
            # which steps are unlucky depends on the seed and the sequence, not on the batch
            lost_S = uniform_S * _COARSE % 1.0 < value
            rest_SV = logp_SV.copy()
            rest_SV[np.arange(len(rest_SV)), rest_SV.argmax(axis=-1)] = -np.inf
            lost_S &= np.isfinite(rest_SV).any(axis=-1)  # the only token cannot be lost
            return super()._draw(np.where(lost_S[:, None], rest_SV, logp_SV), uniform_S)

    return Lossy


# Faults of the train side: the trainer's own numbers are not those of the policy.


@fault(
    "dropout_in_train",
    "Attention dropout of `value` is left on while logprobs are computed.",
    side="train",
    default=0.1,
    takes=Between(0, 0.9),
    seen="huggingface/trl#3234: dropout is switched off for GRPO, since with it logprobs are "
    "not reproducible and the first ratios are not 1",
    field=0.1,
    field_source="attn_pdrop of GPT-2",
    strengths=(0.001, 0.01, 0.1),
)
def dropout_in_train(base: Any, value: float) -> Any:
    class Dropping(base):
        def _finish(self, quantization: str | None) -> None:
            super()._finish(quantization)
            for module in self.model.modules():
                if hasattr(module, "attention_dropout"):
                    module.attention_dropout = float(value)
                    module.train()

        def _forward(self, ids_ST: Any, mask_ST: Any, **options: Any) -> Any:
            import torch

            # A fresh mask a forward, as in a trainer: the same sequences in another batch are
            # masked otherwise, which is the side's noise floor.  It is keyed by what is fed, so
            # that a run that is resumed or repeated reads the same numbers.
            fed = ids_ST.numpy().tobytes() + str(tuple(mask_ST.shape)).encode()
            seed = int.from_bytes(hashlib.blake2b(fed, digest_size=7).digest(), "big")
            there = [self._device] if self._device.type == "cuda" else []
            with torch.random.fork_rng(devices=there):
                torch.manual_seed(seed)
                return super()._forward(ids_ST, mask_ST, **options)

    return Dropping


# Faults that depend on the request alone: its prefix was cached, or its length is odd.
#
# They have a registry of their own: most comparisons of two kernels switch caches off and meet
# few lengths, so no power of a contract is measured against them.  `servanda relations` finds them.

_FIRST_TIER = 64  # blocks of the tier that is read without a fault
REQUEST_FAULTS: Registry[Fault] = Registry("fault")


@fault(
    "prefix_hit",
    "A hit of the prefix cache is wrong: blocks of another text before (context), or the last "
    "block one token off, always (offset) or where 64 other blocks were used since (demoted).",
    default="context",
    takes=OneOf(("context", "offset", "demoted")),
    seen="sgl-project/sglang#39830: answers from a tier of the cache are fluent and wrong; "
    "vllm-project/tpu-inference#3412: gsm8k .01 with prefix caching, .97 without",
    strengths=("context", "offset", "demoted"),
    registry=REQUEST_FAULTS,
)
def prefix_hit(base: Any, value: str) -> Any:
    class WrongHit(base):
        def _prefix_key(self, salt: str, text: Sequence[int]) -> Hashable:
            if value != "context":
                return super()._prefix_key(salt, text)
            # a block's own tokens, and not those before it
            size = self.kernel.prefix_cache
            return super()._prefix_key(salt, (len(text), *text[-size:]))

        def _prefix(self, salt: str, prompt: Sequence[int]) -> Any:
            first = self._prefix_key(salt, prompt[: self.kernel.prefix_cache])
            demoted = value == "demoted" and self._prefixes.age(first) >= _FIRST_TIER
            blocks = super()._prefix(salt, prompt)
            # the first token of the block twice, and its last one not at all
            at_T = [max(t - 1, 0) for t in range(self.kernel.prefix_cache or 0)]
            if blocks and (value == "offset" or demoted):
                last = [tuple(x[:, :, at_T] for x in layer) for layer in blocks[-1]]
                blocks = [*blocks[:-1], last]
            return blocks

    return WrongHit


@fault(
    "lost_block",
    "A prompt whose last block of `value` tokens holds one token is answered by that block alone.",
    default=64,
    takes=Between(2, 10_000_000, whole=True),
    seen="vllm-project/vllm#48271: a block size switches at a length, and the numbers with it",
    strengths=(64, 16),
    registry=REQUEST_FAULTS,
)
def lost_block(base: Any, value: int) -> Any:
    class LostBlock(base):
        def _forward(self, ids_ST: Any, mask_ST: Any, **options: Any) -> Any:
            import torch

            prefilled = ids_ST.shape[1] > 1 and options.get("logits_to_keep") == 1
            length_S = mask_ST.sum(dim=-1)
            odd_S = (length_S > value) & (length_S % value == 1)
            logits = super()._forward(ids_ST, mask_ST, **options)
            if not prefilled or not bool(odd_S.any()):
                return logits
            with torch.inference_mode():
                alone = self.model(input_ids=ids_ST[:, -1:], use_cache=False).logits
                return torch.where(odd_S[:, None, None], alone, logits)

    return LostBlock
