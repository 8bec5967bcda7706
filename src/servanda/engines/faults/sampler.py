# Faults of the record and of the sampler: the numbers of the right tokens belong to others, or
# tokens are drawn otherwise than the record says.
#
# Log-ratios are blind to those of the sampler: both sides score the tokens that came, and agree.

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from servanda.engines.faults.base import Between, fault
from servanda.theory.sampling import Floats, Ints, Sampling
from servanda.traces.trace import Batch, Trace


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
