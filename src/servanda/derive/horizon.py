# The horizon: answers so long that the chain says nothing of the stacks that there are.

from __future__ import annotations

import math
from statistics import NormalDist

from servanda.bounds import osc_for_reward_drift, sequence_tv_gaussian
from servanda.contract import Kernel
from servanda.derive.asked import Asked
from servanda.errors import ContractError

# dense bf16 rollouts against their trainers, per token
_FIELD_KL = 6.4e-4  # Qwen3-8B, SGLang against Megatron: arXiv 2510.11370
_FIELD_NATS = 0.011  # mean |dlogp|, Qwen3-4B, vLLM against Megatron: vllm-project/vime#64
# kernels that were aligned operation by operation, mean |dlogp|: blog.vllm.ai, IsoExec
_ALIGNED_NATS = 3.24e-5


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
    if asked.share >= typical:
        return
    needed = nats_for(asked.share, asked.tokens)
    everywhere = float(
        osc_for_reward_drift(asked.reward_drift or 0.0, asked.tokens, *asked.reward_range)
    )
    raise ContractError(
        f"over answers of up to {asked.tokens:,} tokens a reward drift of {asked.reward_drift:g} "
        f"takes a mean |dlogp| of about {needed:.1g} nats a token (or logits within "
        f"{everywhere:.1g} at every context), and no dense 16-bit stack in the field is there: "
        f"they show {_FIELD_NATS:g} (vllm-project/vime#64) and a KL of {_FIELD_KL:g} (arXiv "
        f"2510.11370), which over such answers is a TV of about {typical:.2g}. The chain is "
        "vacuous at this length",
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
