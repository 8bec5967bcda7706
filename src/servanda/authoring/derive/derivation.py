# The derivation: which clauses keep a budget, which numbers would suffice, and what it takes.
#
# Enforced is the clause that certifies the budget itself.  What would suffice for it further
# up the chain is monitored, and so is the tail, which would if every token kept it: both move
# sooner and say where to look, but a kernel may exceed them and still keep the budget, so they
# fail no contract.

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from servanda.authoring.derive.budget import Asked, refuse_nonsense
from servanda.authoring.derive.contract_text import Line, written
from servanda.authoring.derive.horizon import refuse_horizon
from servanda.authoring.derive.infeasible import refuse_unresolved, too_many
from servanda.authoring.derive.sizes import Held, Room
from servanda.judgement.clauses.chain_certificate import ChainCertificate
from servanda.judgement.clauses.chain_metrics import CHAIN
from servanda.theory.bounds.drift import osc_from_rounding
from servanda.theory.bounds.sequence import osc_for_reward_drift
from servanda.theory.divergence.precision import CAPTURES

_LOGITS = 16.0  # nats: the largest logits of language models lie in [16, 32)
_WEIGHTS = 0.1  # how far weights scatter around 1, for sizes only
_REWARDS = 0.5  # how far the difference of two rewards scatters, as a share of their range
_SHARE = 0.01  # of tokens that p99 leaves
_UNSURE = (
    " An estimate where the claim is realised: the TV of the tokens measured is that of other "
    "answers only about."
)
_TOKENS = ("sampler", "order", "same_tokens")


@dataclass(frozen=True)
class Derived:
    """A contract, and what is said of it.

    Args:
        text: of the contract.
        enforced, monitored: its clauses in words.
        left_out: what no clause was written for, and why.
        expected: prompt groups that decide a kernel at half of the budget, a projection.
        offline: the first look and the limit.
    """

    text: str
    enforced: tuple[str, ...]
    monitored: tuple[str, ...]
    left_out: tuple[str, ...]
    expected: int
    offline: tuple[int, int]


def derive(asked: Asked) -> Derived:
    """The contract that keeps the budgets.

    Raises:
        ContractError: a budget that no run can certify, or that lacks what it is made of.
    """
    refuse_nonsense(asked)
    if asked.reward_drift is not None and not asked.reward_gap:
        refuse_horizon(asked)
    refuse_unresolved(asked)
    enforced, held = zip(*_enforced(asked), strict=True)
    room = Room((1 - asked.confidence) / 2, asked.claim, asked.tokens, asked.lines, asked.most)
    cells = len(held) + 1  # the fidelity guard has its share of alpha, too
    needs = [room.groups(one, cells) for one in held]
    for line, one, needed in zip(enforced, held, needs, strict=True):
        if needed > asked.most:
            raise too_many(line, one, needed, room, cells)
    monitored = [*_monitored(asked)]
    drift, why_not = _logit_route(asked)
    offline = room.offline(math.ceil(max(needs)))
    expected = max(math.ceil(max(needs)), offline[0])  # nothing holds before the first look
    return Derived(
        text=written(asked, [*enforced, *monitored], drift, why_not, expected, offline),
        enforced=tuple(line.words for line in enforced),
        monitored=tuple(line.words for line in [*monitored, *([drift] if drift else [])]),
        left_out=(f"the logits' drift: {why_not}",) if why_not else (),
        expected=expected,
        offline=offline,
    )


# what is enforced


def _enforced(asked: Asked) -> Iterator[tuple[Line, Held]]:
    drawn = _drawn(asked)
    low, high = asked.reward_range
    if asked.reward_gap:
        assert asked.reward_drift is not None
        yield (
            Line(
                "reward",
                "reward_gap",
                asked.reward_drift,
                "The budget itself: the expectation of your own reward, in "
                f"[{low:g}, {high:g}], differs by at most {asked.reward_drift:g} where both "
                "kernels answer the same prompts. No logprob enters. Assumes: order, independent.",
            ),
            replace(
                Held.of(asked.reward_drift / asked.span, (-1.0, 1.0), "sequence", _REWARDS),
                sides=2,
            ),
        )
    elif asked.reward_drift is not None:
        yield (
            Line(
                "reward",
                "reward_drift",
                asked.reward_drift,
                f"The budget itself: no reward in [{low:g}, {high:g}] has an expectation that "
                f"differs by more than {asked.reward_drift:g}. Certified from sampled answers: "
                "the mean of (1 - W)^+ is their TV (sequence_estimators), and the range times "
                f"that bounds the drift (reward_drift_from_tv). Assumes: {drawn}, "
                f"{_assumes(asked, 'reward_drift')}.",
            ),
            Held.of(asked.share, (0.0, 1.0), "sequence"),
        )
    if asked.bias is not None:
        yield (
            Line(
                "bias",
                "policy_gradient_bias",
                asked.bias,
                f"The budget itself: the token-level policy gradient is off by at most "
                f"{asked.bias:g}. That is a gap of weights of {asked.gap:.3g} after "
                f"{asked.psi.name} (weight_gap), times an advantage and a score norm of together "
                f"{asked.factor:.3g} (policy_gradient_bias), loss {asked.loss}. Assumes: {drawn}, "
                f"{_assumes(asked, 'policy_gradient_bias')}.",
            ),
            _held_gap(asked),
        )
    if asked.clip_range is not None and asked.ratio_share is not None:
        yield (
            Line(
                "ratio",
                "ratio_budget",
                asked.ratio_share,
                f"The budget itself: all but 1 % of the tokens leave {1 - asked.ratio_share:.0%} "
                "of their side of the clip range to the policy's own update (ratio_budget). "
                f"Assumes: {drawn}, one_ratio.".replace("%", " %").replace("  ", " "),
                aggregate="p99",
            ),
            Held(_SHARE, 0.0, "token"),
        )


def _held_gap(asked: Asked) -> Held:
    """Of a token, or of the longest answer, whose tokens count for more than one."""
    most, scatter = asked.counted
    low, high = asked.psi.span
    each = "token" if asked.loss == "token_mean" else "sequence"
    return Held.of(asked.gap, (low * most, high * most), each, _WEIGHTS * scatter)


def _assumes(asked: Asked, metric: str) -> str:
    """What the clause rests on besides what every number from sampled tokens does."""
    kind = CHAIN[metric].under(asked.declared)
    assert issubclass(kind, ChainCertificate)
    return ", ".join(kind.assumes)


def _drawn(asked: Asked) -> str:
    return ", ".join((*_TOKENS, *(("independent",) if asked.claim == "population" else ())))


# what would suffice


def _monitored(asked: Asked) -> Iterator[Line]:
    if asked.reward_drift is not None and not asked.reward_gap:
        yield Line(
            "tv",
            "tv",
            _down(asked.share / asked.tokens),
            f"Would suffice: {asked.share:g} over {asked.tokens:,} tokens, the union bound "
            "(sequence_tv_from_token_tv). Not needed: the drifts of tokens partly cancel."
            f"{_UNSURE if asked.claim == 'realised' else ''}",
            aggregate="mean",
            monitor=True,
        )
        yield Line(
            "tail",
            "abs_log_ratio_nats",
            _down(-math.log1p(-asked.share) / asked.tokens),
            f"Would suffice if every token kept it: log-ratios of {asked.tokens:,} tokens then add "
            "up to what the budget leaves. p99 looks at all but 1 %, so it does not suffice.",
            aggregate="p99",
            monitor=True,
        )
    if asked.bias is not None and asked.psi.name == "naive":
        yield Line(
            "tv-gradient",
            "tv",
            _down(asked.gap / 2 / (1 if asked.loss == "token_mean" else asked.tokens)),
            "Would suffice: without a correction the gap of weights is twice the TV "
            "(weight_gap_from_tv).",
            aggregate="mean",
            monitor=True,
        )
        rho = 2 * math.atanh(asked.gap / 2)
        yield Line(
            "tail-gradient",
            "abs_log_ratio_nats",
            _down(rho),
            "Would suffice if every token kept it (weight_gap_from_log_ratio). p99 looks at all "
            "but 1 %.",
            aggregate="p99",
            monitor=True,
        )
    elif asked.bias is not None and (rho := _untouched(asked)) > 0:
        yield Line(
            "tail-gradient",
            "abs_log_ratio_nats",
            _down(rho),
            f"Would suffice if every token kept it: {asked.psi.name} then leaves nothing "
            "uncorrected (weight_gap_from_log_ratio). p99 looks at all but 1 %, so it does not "
            "suffice.",
            aggregate="p99",
            monitor=True,
        )
    if asked.ratio_share is not None:
        yield Line(
            "tail-ratio",
            "abs_log_ratio_nats",
            _down(asked.rho),
            "Would suffice: the same share of the narrower side of the clip range, for ratios up "
            "and down alike (ratio_budget).",
            aggregate="p99",
            monitor=True,
        )


def _untouched(asked: Asked) -> float:
    """The largest |log w| within which the weighting is exact, nats."""
    bends = [abs(math.log(bend)) for bend in asked.psi.bends if bend > 0]
    exact = asked.psi.name in ("tis", "mis", "icepop", "clip")
    return min(bends, default=0.0) if exact else 0.0


def _logit_route(asked: Asked) -> tuple[Line | None, str]:
    """The clause on golden texts that would suffice for every budget, or why there is none."""
    if asked.golden is None:
        return None, "no golden texts were given"
    ways = [*_oscs(asked)]
    budgets = (asked.reward_drift, asked.bias, asked.ratio_share)
    if len(ways) < sum(budget is not None for budget in budgets):
        return None, f"no drift of logits suffices for {'every' if ways else 'this'} budget"
    osc, theorem = min(ways)
    rounding = sum(_rounding(kernel.dtype) for kernel in (asked.train, asked.infer))
    if osc <= rounding:
        coarse = min((asked.train.dtype, asked.infer.dtype), key=lambda dtype: CAPTURES[dtype])
        return None, (
            f"{osc:.2g} nats would suffice ({theorem}), and rounding logits of {_LOGITS:g} to "
            f"{2 * _LOGITS:g} to {coarse} alone drifts by {rounding:.3g} (osc_from_rounding)"
        )
    return (
        Line(
            "drift",
            "logit_osc_nats",
            _down(osc),
            f"Would suffice if it were so at every context, and not only at golden ones "
            f"({theorem}). Assumes: same_filters, every_context.",
            aggregate="max",
            monitor=True,
        ),
        "",
    )


def _oscs(asked: Asked) -> Iterator[tuple[float, str]]:
    """The drift of logits that suffices for each budget, by which theorem."""
    if asked.reward_drift is not None and not asked.reward_gap:
        osc = osc_for_reward_drift(asked.reward_drift, asked.tokens, *asked.reward_range)
        yield float(osc), f"osc_for_reward_drift, answers of {asked.tokens:,} tokens"
    if asked.bias is not None and asked.psi.name == "naive":
        # 2 TV <= gap, and TV <= tanh(osc / 4)
        yield 4 * math.atanh(asked.gap / asked.counted[0] / 2), "tv_from_osc, weight_gap_from_tv"
    elif asked.bias is not None and _untouched(asked) > 0:
        yield _untouched(asked), "abs_log_ratio_from_osc, weight_gap_from_log_ratio"
    if asked.ratio_share is not None:
        yield asked.rho, "abs_log_ratio_from_osc, ratio_budget"


def _rounding(dtype: str) -> float:
    """What logits in this format drift by; those of float32 and wider are not rounded further."""
    return float(osc_from_rounding(_LOGITS, CAPTURES[dtype])) if CAPTURES[dtype] < 24 else 0.0


def _down(limit: float) -> float:
    """Three digits, rounded down: what would suffice still does."""
    unit = 10.0 ** (math.floor(math.log10(limit)) - 2)
    return float(f"{math.floor(limit / unit * (1 + 1e-12)) * unit:.3g}")
