# The horizon: answers so long that the stacks that there are spend more than the budget.

from __future__ import annotations

import math
from statistics import NormalDist

from servanda.authoring.derive.budget import Asked
from servanda.contract.model import Kernel
from servanda.errors import ContractError
from servanda.theory.bounds.sequence import osc_for_reward_drift, sequence_tv_gaussian

# dense bf16 rollouts against their trainers, per token
_FIELD_KL = 6.4e-4  # Qwen3-8B, SGLang against Megatron: arXiv 2510.11370
_FIELD_NATS = 0.011  # mean |dlogp|, Qwen3-4B, vLLM against Megatron: vllm-project/vime#64
# kernels that were aligned operation by operation, mean |dlogp|: blog.vllm.ai, IsoExec
_ALIGNED_NATS = 3.24e-5
_VACUOUS = 0.99  # TV of whole answers that leaves a reward nearly its whole range


def refuse_horizon(asked: Asked) -> None:
    """Answers over which 16-bit kernels of the field spend more than the budget.

    Raises:
        ContractError: what a token would have to keep to, and what to promise instead.
    """
    if asked.aligned or not (_rounded(asked.train) or _rounded(asked.infer)):
        return
    # the mean TV of a token is half the mean |dlogp| where log-ratios are small and even
    if asked.tokens * _FIELD_NATS / 2 < 1:
        return
    typical = float(sequence_tv_gaussian(asked.tokens * _FIELD_KL))
    needed = nats_for(asked.share, asked.tokens)
    # the two figures are of different stacks: below one of them is not below the field
    if asked.share >= typical or needed >= _FIELD_NATS:
        return
    everywhere = float(
        osc_for_reward_drift(asked.reward_drift or 0.0, asked.tokens, *asked.reward_range)
    )
    vacuous = ": vacuous" if typical >= _VACUOUS else ""
    raise ContractError(
        f"over answers of up to {asked.tokens:,} tokens a reward drift of {asked.reward_drift:g} "
        f"takes a mean |dlogp| of about {needed:.1g} nats a token (or logits within "
        f"{everywhere:.1g} at every context), and that lies below what dense 16-bit stacks show. "
        "Two public figures, of two different stacks: a mean |dlogp| of "
        f"{_FIELD_NATS:g} nats (Qwen3-4B, vLLM against Megatron, vllm-project/vime#64); and a KL "
        f"of {_FIELD_KL:g} nats a token (Qwen3-8B, SGLang against Megatron, arXiv 2510.11370), "
        f"which over such answers is a TV of about {typical:.2g}{vacuous}",
        hint="--reward-gap OF promises your own reward, both kernels sampling; or give shorter "
        "answers; or --aligned, for kernels that agree operation by operation (such stacks show "
        f"{_ALIGNED_NATS:g})",
    )


def nats_for(tv: float, tokens: int) -> float:
    """The mean |dlogp| of a token at which answers have this TV, by `sequence_tv_gaussian`.

    >>> round(nats_for(0.02, 8192), 5)
    0.00044
    """
    # TV = erf(sqrt(KL) / 2), a token has KL sigma^2 / 2, and E|x| is sigma sqrt(2 / pi)
    kl = 2 * NormalDist().inv_cdf((1 + tv) / 2) ** 2
    return math.sqrt(2 * kl / tokens) * math.sqrt(2 / math.pi)


def _rounded(kernel: Kernel) -> bool:
    return kernel.dtype in ("bfloat16", "float16") or kernel.quantization is not None
