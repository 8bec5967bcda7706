# Infeasible budgets: below the precision of the record, or of a run's size; and responses so long
# that existing stacks exceed the budget.

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

from servanda.authoring.derive.budget import Request
from servanda.authoring.derive.contract_text import DerivedClause
from servanda.authoring.derive.sizes import Requirement, RunSize
from servanda.contract.model import Kernel
from servanda.errors import ContractError
from servanda.theory.bounds.drift import rounding_eps
from servanda.theory.bounds.sequence import osc_for_reward_drift, sequence_tv_gaussian
from servanda.theory.divergence.precision import CAPTURES, TYPICAL_NATS, eta

_STEPS = 14  # of a bisection: to a thousandth
_LONGEST = 1e9  # largest sensible number of prompt groups


def refuse_unresolved(request: Request) -> None:
    """Refuse a budget below the effect of rounding: of the record, or of a kernel's logits.

    Raises:
        ContractError: names the budget, and a feasible one.
    """
    error = eta(request.capture)
    bias = 2 * error * request.factor * request.counted[0] if request.bias is not None else 0.0
    floors = (
        (request.reward_drift, "reward drift", request.tokens * error * request.span),
        (request.bias, "bias", bias),
    )
    for budget, name, floor in floors:
        if budget is None or (name == "reward drift" and request.reward_gap) or budget > floor:
            continue
        raise ContractError(
            f"a {name} of {budget:g} lies under the precision of the record: logprobs in "
            f"{request.capture} are off by up to {error:.1e} nats (tokens of about "
            f"{TYPICAL_NATS:g} nats), which alone may read as {floor:.2g}",
            hint=f"let the engines record float32, or give a budget above {floor:.2g}",
        )
    if request.ratio_share is not None and request.rho <= error:
        raise ContractError(
            f"{request.ratio_share:g} of the clip range is a log-ratio of {request.rho:.1e} nats, "
            f"and logprobs in {request.capture} are off by up to {error:.1e}",
            hint="let the engines record float32, or give a larger share",
        )
    coarse = min((request.train.dtype, request.infer.dtype), key=lambda dtype: CAPTURES[dtype])
    rounding = float(rounding_eps(1.0, CAPTURES[coarse]))
    if request.ratio_share is not None and request.rho <= rounding:
        raise ContractError(
            f"{request.ratio_share:g} of the clip range is a log-ratio of {request.rho:.1e} nats, "
            f"and rounding a single logit between 1 and 2 to {coarse} moves it by up to "
            f"{rounding:.1e}: no such kernel keeps 99 % of its tokens within that",
            hint="give a larger share; of kernels that are equal bit by bit promise logit_osc_nats "
            "at_most 0 on golden texts",
        )


def too_many(
    line: DerivedClause, requirement: Requirement, needed: float, size: RunSize, cells: int
) -> ContractError:
    """The error for a budget that is too small for a run, with a feasible one."""
    hints = []
    if line.aggregate != "p99":  # a share of tokens needs the same run whatever its threshold
        enough = _enough(line.limit, requirement, size, cells)
        if enough is None:
            hints.append(f"no budget is decided by {size.most:,}")
        else:
            hints.append(f"{size.most:,} decide a budget of {enough:g}")
    if needed <= _LONGEST:
        unit = 10 ** max(math.floor(math.log10(needed)) - 2, 0)
        hints.append(f"--most {math.ceil(needed / unit) * unit} gives a run that is long enough")
    counted = f"about {needed:,.0f}" if math.isfinite(needed) else "more than 10^12"
    return ContractError(
        f"no run of {size.most:,} prompt groups can certify {line.metric} at most "
        f"{line.limit:g}: a kernel at half of it would take {counted}",
        hint="; ".join(hints),
    )


def _enough(limit: float, requirement: Requirement, size: RunSize, cells: int) -> float | None:
    """The smallest two-digit budget that a run decides; None: none below the range."""
    over_best = requirement.limit - requirement.best
    most = (1.0 - requirement.best) / over_best

    def decided(factor: float) -> bool:
        wider = replace(requirement, limit=requirement.best + factor * over_best)
        return factor < most and size.groups(wider, cells) <= size.most

    # a violation of a limit near the top takes long, too: begin below
    tops = (most * tenths / 10 for tenths in range(9, 0, -1))
    low, high = 1.0, next((top for top in tops if top > 1 and decided(top)), None)
    if high is None:
        return None
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if decided(middle) else (middle, high)
    for digits in (2, 3, 4):
        unit = 10.0 ** (math.floor(math.log10(high * limit)) + 1 - digits)
        budget = float(f"{math.ceil(high * limit / unit) * unit:.{digits}g}")
        if decided(budget / limit):
            return budget
    return None


# dense bf16 rollouts against their trainers, per token
_FIELD_KL = 6.4e-4  # Qwen3-8B, SGLang against Megatron: arXiv 2510.11370
_FIELD_NATS = 0.011  # mean |dlogp|, Qwen3-4B, vLLM against Megatron: vllm-project/vime#64
# kernels that were aligned operation by operation, mean |dlogp|: blog.vllm.ai, IsoExec
_ALIGNED_NATS = 3.24e-5
_VACUOUS = 0.99  # TV of whole responses that allows a reward nearly its whole range


def refuse_horizon(request: Request) -> None:
    """Refuse responses over which 16-bit kernels of the field exceed the budget.

    Raises:
        ContractError: names the needed bound per token, and an alternative clause.
    """
    if request.aligned or not (_rounded(request.train) or _rounded(request.infer)):
        return
    # the mean TV of a token is half the mean |dlogp| where log-ratios are small and even
    if request.tokens * _FIELD_NATS / 2 < 1:
        return
    typical = float(sequence_tv_gaussian(request.tokens * _FIELD_KL))
    needed = nats_for(request.share, request.tokens)
    # the two figures are of different stacks: compare with the smaller one
    if request.share >= typical or needed >= _FIELD_NATS:
        return
    everywhere = float(
        osc_for_reward_drift(request.reward_drift or 0.0, request.tokens, *request.reward_range)
    )
    vacuous = ": vacuous" if typical >= _VACUOUS else ""
    raise ContractError(
        f"over answers of up to {request.tokens:,} tokens a reward drift of "
        f"{request.reward_drift:g} takes a mean |dlogp| of about {needed:.1g} nats a token (or "
        f"logits within {everywhere:.1g} at every context), and that lies below what dense 16-bit "
        "stacks show. Two public figures, of two different stacks: a mean |dlogp| of "
        f"{_FIELD_NATS:g} nats (Qwen3-4B, vLLM against Megatron, vllm-project/vime#64); and a KL "
        f"of {_FIELD_KL:g} nats a token (Qwen3-8B, SGLang against Megatron, arXiv 2510.11370), "
        f"which over such answers is a TV of about {typical:.2g}{vacuous}",
        hint="--reward-gap OF promises your own reward, both kernels sampling; or give shorter "
        "answers; or --aligned, for kernels that agree operation by operation (such stacks show "
        f"{_ALIGNED_NATS:g})",
    )


def nats_for(tv: float, tokens: int) -> float:
    """The mean |dlogp| of a token at which responses have this TV, by `sequence_tv_gaussian`.

    >>> round(nats_for(0.02, 8192), 5)
    0.00044
    """
    # TV = erf(sqrt(KL) / 2), a token has KL sigma^2 / 2, and E|x| is sigma sqrt(2 / pi)
    kl = 2 * NormalDist().inv_cdf((1 + tv) / 2) ** 2
    return math.sqrt(2 * kl / tokens) * math.sqrt(2 / math.pi)


def _rounded(kernel: Kernel) -> bool:
    return kernel.dtype in ("bfloat16", "float16") or kernel.quantization is not None
