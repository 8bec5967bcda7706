# The derivation: clauses for a budget, sufficient numbers, and the needed sample size.
#
# Enforced is the clause that certifies the budget itself.  Sufficient clauses further up the chain
# are monitored, and so is the tail, which suffices if every token keeps it: both react sooner and
# localise a fault, but a kernel may exceed them within the budget, so they fail no contract.

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from servanda.authoring.derive.budget import Request, refuse_nonsense
from servanda.authoring.derive.sizes import Requirement, RunSize
from servanda.contract.model import Kernel
from servanda.contract.objective import GroupAdvantage
from servanda.contract.workload import WorkloadSampling
from servanda.errors import ContractError
from servanda.judgement.clauses.chain_metrics import CHAIN
from servanda.judgement.contract_text import Parts, completed
from servanda.theory.bounds.drift import osc_from_rounding, rounding_eps
from servanda.theory.bounds.sequence import osc_for_reward_drift, sequence_tv_gaussian
from servanda.theory.divergence.precision import CAPTURES, TYPICAL_NATS, eta

# The derived contract as text, with the reason of every limit beside it.


_WIDTH = 100
_SEED = 7
_NAMES = {
    "reward_drift": "the drift of any reward",
    "reward_gap": "the gap of your reward",
    "policy_gradient_bias": "the bias of the policy gradient",
    "ratio_budget": "the share of the clip range",
    "tv": "the mean TV of a token",
    "abs_log_ratio_nats": "the log-ratio of 99 % of the tokens",
    "logit_osc_nats": "the drift of golden logits",
}
# the first two lines are those of a preset, which the completion omits
_TEMPLATE = """\
# derived
#
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata:
  name: derived
  version: 1.0.0
  description: {description}

kernels:

workload:

golden:

{declared}

confidence: {confidence}
claim: population

numerical:
{numerical}
statistical:
{statistical}
observability:
  record: [fingerprint, token_ids, processed_logprobs, sampling, path, batch_size]
  clauses:
    # log-ratios see the numerics; whether tokens follow the reported distribution they do not
    - {{id: fidelity, metric: sampler_fidelity}}
    - {{id: finite, metric: valid_ratio, at_least: 0.999}}
# prompt groups: the first evaluation, and the limit; a run stops when all is decided.  Nine of ten
# runs of a kernel at half of its budget are decided after about {expected:,}.
promotion:
"""


@dataclass(frozen=True)
class DerivedClause:
    """A clause with its reason."""

    id: str
    metric: str
    limit: float
    why: str
    aggregate: str = ""
    monitor: bool = False

    @property
    def words(self) -> str:
        unit = " nats" if self.metric.endswith("_nats") else ""
        return f"{self.id}: {_NAMES[self.metric]} at most {self.limit:g}{unit}"

    def lines(self) -> Iterator[str]:
        mode = ", mode: monitor" if self.monitor else ""
        aggregate = f", aggregate: {self.aggregate}" if self.aggregate else ""
        yield from _comment(self.why)
        yield (
            f"  - {{id: {self.id}, metric: {self.metric}{aggregate}, "
            f"at_most: {_number(self.limit)}{mode}, slices: [all]}}"
        )


def contract_text(
    request: Request,
    statistical: Sequence[DerivedClause],
    drift: DerivedClause | None,
    why_not: str,
    expected: int,
    offline: tuple[int, int],
) -> str:
    enforced = [line for line in statistical if not line.monitor]
    monitored = [line for line in statistical if line.monitor]
    head = ["  # enforced: the budget, certified itself"]
    rows = [*head, *(row for line in enforced for row in line.lines())]
    if monitored:
        rows.append("  # monitored: none is needed to keep the budget, so none fails the contract")
        rows += [row for line in monitored for row in line.lines()]
    template = _TEMPLATE.format(
        description=json.dumps(f"Derived from {' and '.join(_budgets(request))}."),
        declared="\n".join(_declared(request)),
        confidence=f"{request.confidence:g}",
        numerical="\n".join(drift.lines()) if drift else "",
        statistical="\n".join(rows),
        expected=expected,
    )
    reason = "\n# ".join(textwrap.wrap(f"no numerical clauses: {why_not}", _WIDTH - 4))
    parts = Parts(
        name=request.name,
        train=request.train,
        infer=request.infer,
        prompts=request.prompts,
        sampling=WorkloadSampling(  # type: ignore[call-arg]
            max_new_tokens=request.tokens, seed=_SEED
        ),
        sizes=offline,
        claim=request.claim,
        golden=request.golden if drift else None,
        no_golden=reason.removeprefix("no numerical clauses: "),
        head=(
            "Derived by `servanda contract derive`: budgets become limits, each with its reason.",
        ),
    )
    return completed(template, parts).replace("\n\n\n", "\n\n")


def _budgets(request: Request) -> Iterator[str]:
    if request.reward_drift is not None:
        what = "gap" if request.reward_gap else "drift"
        budget, tokens = request.reward_drift, request.tokens
        yield f"a reward {what} of at most {budget:g} over {tokens:,} new tokens"
    if request.bias is not None:
        yield f"a policy gradient bias of at most {request.bias:g}"
    if request.ratio_share is not None:
        yield f"{request.ratio_share:g} of the clip range"


def _declared(request: Request) -> Iterator[str]:
    """The trainer's declarations, which are not measured."""
    if request.reward_drift is not None:
        low, high = request.reward_range
        of = f", of: {json.dumps(request.reward_of)}" if request.reward_of else ""
        yield f"reward: {{range: [{_number(low)}, {_number(high)}]{of}}}"
    declared = []
    if request.bias is not None:
        advantage = request.advantage
        if isinstance(advantage, GroupAdvantage):
            declared.append(f"advantage: {{group_size: {advantage.group_size}}}")
        else:
            declared.append(f"advantage: {_number(advantage or 0.0)}")
        norm = request.score_norm
        declared.append(f"score_norm: {norm if isinstance(norm, str) else _number(norm or 0.0)}")
        if request.weighting is None:
            declared.append("weighting: naive")
        else:
            ((name, value),) = request.weighting.given.items()
            values = value if isinstance(value, tuple) else (value,)
            value_text = ", ".join(map(_number, values))
            value_text = f"[{value_text}]" if isinstance(value, tuple) else value_text
            declared.append(f"weighting: {{{name}: {value_text}}}")
        declared.append(f"loss: {request.loss}")
    if request.clip_range is not None:
        low, high = request.clip_range
        declared.append(f"clip_range: [{_number(low)}, {_number(high)}], ratio: bypass")
    if declared:
        yield "# declared, not measured"
        yield f"gradient: {{{', '.join(declared)}}}"


def _comment(text: str) -> Iterator[str]:
    yield from textwrap.wrap(
        text,
        _WIDTH - 4,
        initial_indent="  # ",
        subsequent_indent="  # ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _number(value: float) -> str:
    """A number as YAML text, exact."""
    return repr(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)


# Infeasible budgets: below the precision of the record, or of a run's size; and responses so long
# that existing stacks exceed the budget.


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


_LOGITS = 16.0  # nats: the largest logits of language models lie in [16, 32)
_WEIGHTS = 0.1  # standard deviation of weights around 1, for sizes only
_REWARDS = 0.5  # standard deviation of the difference of two rewards, as a share of their range
_SHARE = 0.01  # share of tokens beyond p99
_UNSURE = (
    " An estimate where the claim is realised: the TV of the tokens measured is that of other "
    "answers only about."
)
_TOKENS = ("sampler", "order", "same_tokens")


@dataclass(frozen=True)
class Derivation:
    """A derived contract with its description.

    Args:
        text: text of the contract.
        enforced, monitored: its clauses, as text.
        left_out: the reasons for omitted clauses.
        expected: prompt groups that decide a kernel at half of the budget, a projection.
        offline: the first evaluation and the limit.
    """

    text: str
    enforced: tuple[str, ...]
    monitored: tuple[str, ...]
    left_out: tuple[str, ...]
    expected: int
    offline: tuple[int, int]


def derive(request: Request) -> Derivation:
    """Derive the contract for the budgets.

    Raises:
        ContractError: a budget that no run can certify, or with missing declarations.
    """
    refuse_nonsense(request)
    if request.reward_drift is not None and not request.reward_gap:
        refuse_horizon(request)
    refuse_unresolved(request)
    enforced, requirements = zip(*_enforced(request), strict=True)
    size = RunSize(
        (1 - request.confidence) / 2, request.claim, request.tokens, request.lines, request.most
    )
    cells = len(requirements) + 1  # the fidelity check also has a share of alpha
    needs = [size.groups(requirement, cells) for requirement in requirements]
    for line, requirement, needed in zip(enforced, requirements, needs, strict=True):
        if needed > request.most:
            raise too_many(line, requirement, needed, size, cells)
    monitored = [*_monitored(request)]
    drift, why_not = _logit_route(request)
    offline = size.offline(math.ceil(max(needs)))
    expected = max(math.ceil(max(needs)), offline[0])  # nothing holds before the first evaluation
    return Derivation(
        text=contract_text(request, [*enforced, *monitored], drift, why_not, expected, offline),
        enforced=tuple(line.words for line in enforced),
        monitored=tuple(line.words for line in [*monitored, *([drift] if drift else [])]),
        left_out=(f"the logits' drift: {why_not}",) if why_not else (),
        expected=expected,
        offline=offline,
    )


# enforced clauses


def _enforced(request: Request) -> Iterator[tuple[DerivedClause, Requirement]]:
    independent = ["independent"] if request.claim == "population" else []
    drawn = ", ".join([*_TOKENS, *independent])
    low, high = request.reward_range
    if request.reward_gap:
        assert request.reward_drift is not None
        yield (
            DerivedClause(
                "reward",
                "reward_gap",
                request.reward_drift,
                "The budget itself: the expectation of your own reward, in "
                f"[{low:g}, {high:g}], differs by at most {request.reward_drift:g} where both "
                "kernels answer the same prompts. No logprob enters. Assumes: order, independent.",
            ),
            replace(Requirement.of(request.share, (-1.0, 1.0), "sequence", _REWARDS), sides=2),
        )
    elif request.reward_drift is not None:
        yield (
            DerivedClause(
                "reward",
                "reward_drift",
                request.reward_drift,
                f"The budget itself: no reward in [{low:g}, {high:g}] has an expectation that "
                f"differs by more than {request.reward_drift:g}. Certified from sampled answers: "
                "the mean of (1 - W)^+ is their TV (sequence_estimators), and the range times "
                f"that bounds the drift (reward_drift_from_tv). Assumes: {drawn}, "
                f"{_assumes(request, 'reward_drift')}.",
            ),
            Requirement.of(request.share, (0.0, 1.0), "sequence"),
        )
    if request.bias is not None:
        yield (
            DerivedClause(
                "bias",
                "policy_gradient_bias",
                request.bias,
                f"The budget itself: the token-level policy gradient is off by at most "
                f"{request.bias:g}. That is a gap of weights of {request.gap:.3g} after "
                f"{request.psi.name} (weight_gap), times an advantage and a score norm of together "
                f"{request.factor:.3g} (policy_gradient_bias), loss {request.loss}. Assumes: "
                f"{drawn}, {_assumes(request, 'policy_gradient_bias')}.",
            ),
            _gap_requirement(request),
        )
    if request.clip_range is not None and request.ratio_share is not None:
        yield (
            DerivedClause(
                "ratio",
                "ratio_budget",
                request.ratio_share,
                f"The budget itself: all but 1 % of the tokens leave {1 - request.ratio_share:.0%} "
                "of their side of the clip range to the policy's own update (ratio_budget). "
                f"Assumes: {drawn}, one_ratio.".replace("%", " %").replace("  ", " "),
                aggregate="p99",
            ),
            Requirement(_SHARE, 0.0, "token"),
        )


def _gap_requirement(request: Request) -> Requirement:
    """The requirement per token, or per longest response with weighted tokens."""
    most, scatter = request.counted
    low, high = request.psi.span
    each = "token" if request.loss == "token_mean" else "sequence"
    return Requirement.of(request.gap, (low * most, high * most), each, _WEIGHTS * scatter)


def _assumes(request: Request, metric: str) -> str:
    """The additional assumptions of the clause."""
    return ", ".join(CHAIN[metric].under(request.declared).assumes)


# sufficient clauses


def _monitored(request: Request) -> Iterator[DerivedClause]:
    if request.reward_drift is not None and not request.reward_gap:
        yield DerivedClause(
            "tv",
            "tv",
            _down(request.share / request.tokens),
            f"Would suffice: {request.share:g} over {request.tokens:,} tokens, the union bound "
            "(sequence_tv_from_token_tv). Not needed: the drifts of tokens partly cancel."
            f"{_UNSURE if request.claim == 'realised' else ''}",
            aggregate="mean",
            monitor=True,
        )
        yield _tail(
            "tail",
            -math.log1p(-request.share) / request.tokens,
            f"Would suffice if every token kept it: log-ratios of {request.tokens:,} tokens then "
            "add up to what the budget leaves. p99 looks at all but 1 %, so it does not suffice.",
        )
    if request.bias is not None and request.psi.name == "naive":
        yield DerivedClause(
            "tv-gradient",
            "tv",
            _down(request.gap / 2 / (1 if request.loss == "token_mean" else request.tokens)),
            "Would suffice: without a correction the gap of weights is twice the TV "
            "(weight_gap_from_tv).",
            aggregate="mean",
            monitor=True,
        )
        yield _tail(
            "tail-gradient",
            2 * math.atanh(request.gap / 2),
            "Would suffice if every token kept it (weight_gap_from_log_ratio). p99 looks at all "
            "but 1 %.",
        )
    elif request.bias is not None and (rho := _untouched(request)) > 0:
        yield _tail(
            "tail-gradient",
            rho,
            f"Would suffice if every token kept it: {request.psi.name} then leaves nothing "
            "uncorrected (weight_gap_from_log_ratio). p99 looks at all but 1 %, so it does not "
            "suffice.",
        )
    if request.ratio_share is not None:
        yield _tail(
            "tail-ratio",
            request.rho,
            "Would suffice: the same share of the narrower side of the clip range, for ratios up "
            "and down alike (ratio_budget).",
        )


def _tail(name: str, limit: float, why: str) -> DerivedClause:
    """A monitored clause on the log-ratio of all but 1 % of the tokens."""
    return DerivedClause(name, "abs_log_ratio_nats", _down(limit), why, "p99", monitor=True)


def _untouched(request: Request) -> float:
    """The largest |log w| within which the weighting is exact, nats."""
    bends = [abs(math.log(bend)) for bend in request.psi.bends if bend > 0]
    exact = request.psi.name in ("tis", "mis", "icepop", "clip")
    return min(bends, default=0.0) if exact else 0.0


def _logit_route(request: Request) -> tuple[DerivedClause | None, str]:
    """The clause on golden texts that suffices for every budget, or why there is none."""
    if request.golden is None:
        return None, "no golden texts were given"
    ways = [*_oscs(request)]
    budgets = (request.reward_drift, request.bias, request.ratio_share)
    if len(ways) < sum(budget is not None for budget in budgets):
        return None, f"no drift of logits suffices for {'every' if ways else 'this'} budget"
    osc, theorem = min(ways)
    rounding = sum(_rounding(kernel.dtype) for kernel in (request.train, request.infer))
    if osc <= rounding:
        coarse = min((request.train.dtype, request.infer.dtype), key=lambda dtype: CAPTURES[dtype])
        return None, (
            f"{osc:.2g} nats would suffice ({theorem}), and rounding logits of {_LOGITS:g} to "
            f"{2 * _LOGITS:g} to {coarse} alone drifts by {rounding:.3g} (osc_from_rounding)"
        )
    return (
        DerivedClause(
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


def _oscs(request: Request) -> Iterator[tuple[float, str]]:
    """The drift of logits that suffices for each budget, by which theorem."""
    if request.reward_drift is not None and not request.reward_gap:
        osc = osc_for_reward_drift(request.reward_drift, request.tokens, *request.reward_range)
        yield float(osc), f"osc_for_reward_drift, answers of {request.tokens:,} tokens"
    if request.bias is not None and request.psi.name == "naive":
        # 2 TV <= gap, and TV <= tanh(osc / 4)
        yield (
            4 * math.atanh(request.gap / request.counted[0] / 2),
            "tv_from_osc, weight_gap_from_tv",
        )
    elif request.bias is not None and _untouched(request) > 0:
        yield _untouched(request), "abs_log_ratio_from_osc, weight_gap_from_log_ratio"
    if request.ratio_share is not None:
        yield request.rho, "abs_log_ratio_from_osc, ratio_budget"


def _rounding(dtype: str) -> float:
    """The drift of logits in this format; float32 and wider are not rounded further."""
    return float(osc_from_rounding(_LOGITS, CAPTURES[dtype])) if CAPTURES[dtype] < 24 else 0.0


def _down(limit: float) -> float:
    """Three digits, rounded down, so that the number still suffices."""
    unit = 10.0 ** (math.floor(math.log10(limit)) - 2)
    return float(f"{math.floor(limit / unit * (1 + 1e-12)) * unit:.3g}")
