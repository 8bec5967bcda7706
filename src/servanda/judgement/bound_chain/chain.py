# The bound chain: paths from a clause's number to all its consequences.
#
# Only the whole traffic has whole responses, so clauses on other slices start no path.

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from servanda.contract.clause import WHOLE, Clause, Section, printed_metric
from servanda.contract.model import Contract
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.clauses.chain_metrics import CHAIN, ChainMetric, chain_metric
from servanda.judgement.clauses.gradient import (
    advantage_bound,
    bias_assumes,
    has_turns,
    loss_of,
    psi_of,
    score_norm_of,
)
from servanda.judgement.clauses.scope import slices_of
from servanda.judgement.verdict import Verdict
from servanda.theory.bounds.assumptions import ASSUMPTIONS
from servanda.theory.bounds.sequence import is_vacuous
from servanda.theory.bounds.theorem import THEOREMS, Standing
from servanda.theory.bounds.third_kernel import STEEP
from servanda.theory.sampling import Sampling

# Steps of the chain: a number, its theorem, and its assumptions.


# from the strongest to the weakest guarantee
STANDINGS: tuple[Standing, ...] = (
    "certificate",
    "fact",
    "conditional bound",
    "estimate",
    "diagnostic",
)


@dataclass(frozen=True)
class Step:
    """One number of the chain: `what` is at most `number`.

    Args:
        clause: the start of its path; level: number of steps from there.
        theorem: a name in THEOREMS; "" for the clause's own number.
        standing: weakest guarantee on the path; assumes: names in ASSUMPTIONS, of the whole path.
        enforced: whether the clause at its start is enforced.
        vacuous: whether the number is no smaller than the range of the quantity.
    """

    clause: str
    level: int
    what: str
    number: float
    unit: str = ""
    theorem: str = ""
    standing: Standing = "certificate"
    assumes: tuple[str, ...] = ()
    enforced: bool = True
    vacuous: bool = False


@dataclass(frozen=True)
class Further:
    """A consequence that needs one more number, which no contract declares.

    Args:
        clause: the start of the path; what: the quantity; theorem: a name in THEOREMS.
        bound: its bound as a formula, with the number of the path and a name for the other.
    """

    clause: str
    what: str
    bound: str
    theorem: str


@dataclass(frozen=True)
class Chain:
    """The implications of a contract's numbers.

    Args:
        shown: whether they start from a verdict's upper bounds instead of limits.
        tokens: most tokens of a whole response; None: unknown, so that no bound for one exists.
        steps: path by path, each number after its premise.
        rests: all assumptions of the steps.
        left_out: (clause, reason why no or no further consequence follows).
        further: consequences of one more number.
    """

    contract: str
    shown: bool
    tokens: int | None
    steps: tuple[Step, ...]
    rests: tuple[Rest, ...]
    left_out: tuple[tuple[str, str], ...]
    further: tuple[Further, ...] = ()

    @property
    def vacuous(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.vacuous)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; a vacuous number is null."""
        data = asdict(self)
        for step in (*data["steps"], *data["further"]):
            theorem = step.pop("theorem")
            law = THEOREMS[theorem] if theorem else None
            step["theorem"] = law and {
                "name": law.name,
                "statement": law.statement,
                "source": law.source,
                "sharp": law.sharp,
            }
        for step in data["steps"]:
            step["number"] = None if step["vacuous"] else step["number"]
        data["left_out"] = [{"clause": c, "reason": reason} for c, reason in self.left_out]
        return data


def follow(
    start: Step,
    theorem: str,
    what: str,
    *inputs: float,
    unit: str = "",
    most: float = math.inf,
    adds: tuple[str, ...] = (),
) -> Step:
    """The step that a theorem adds to its premises.

    Args:
        most: the largest value of the quantity; a bound of at least this is vacuous.
        adds: assumptions of the path beyond the theorem's own.
    """
    law = THEOREMS[theorem]
    number = float(law.function(*inputs))
    return replace(
        start,
        level=start.level + 1,
        what=what,
        number=number,
        unit=unit,
        theorem=theorem,
        standing=weakest(start.standing, law.standing),
        assumes=joined(start.assumes, (*law.assumes, *adds)),
        vacuous=is_vacuous(number, most),
    )


def weakest(*standings: Standing) -> Standing:
    """The weakest of several guarantee types."""
    return max(standings, key=STANDINGS.index)


def joined(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    """The union in order."""
    return tuple(dict.fromkeys((*first, *second)))


# The assumptions of a chain, and the state of each.  A test can only reject.


State = Literal["kept", "not rejected", "rejected", "open", "declared", "untested", "not testable"]

_DECLARED = ("reward_range", "advantage", "score_norm")
_BY_DEFAULT = "sampler_fidelity"  # a validity check in every plan with sampled tokens


@dataclass(frozen=True)
class Rest:
    """An assumption of the chain with its state.

    Args:
        said: the state as text, with its tests and their sample sizes.
    """

    name: str
    text: str
    state: State
    said: str


def rest(name: str, contract: Contract, verdict: Verdict | None) -> Rest:
    """The state of an assumption for a contract or a run of it."""
    text = ASSUMPTIONS[name].text
    return Rest(name, text, *_state(name, contract, verdict))


def _state(name: str, contract: Contract, verdict: Verdict | None) -> tuple[State, str]:
    assumption = ASSUMPTIONS[name]
    if assumption.kept_by:
        if any(w.source == "trainer" for w in contract.all_workloads.values()):
            return "untested", "a trainer samples the tokens, and nothing here tests it"
        return "kept", f"kept by construction: {assumption.kept_by}"
    if name == "same_filters":
        return _filters(contract)
    if name == "same_reward" and contract.reward is not None and contract.reward.of is not None:
        of = contract.reward.of
        return "kept", f"kept by construction for {of}: one function for both kernels' responses"
    if name == "reward_range" and contract.reward is None:
        return "untested", "no range is declared: read the drift as a share of it"
    if name == "one_ratio":
        if contract.gradient is not None and contract.gradient.ratio == "bypass":
            return "declared", "declared, not tested"
        return "untested", "not declared: write gradient: {ratio: bypass} where it is so"
    if assumption.tested_by:
        tested = _tested(assumption.tested_by, contract, verdict)
        if tested is not None:
            return tested
        if name in _DECLARED:
            return "declared", "declared, not tested"
        return (
            "untested",
            f"not tested; {' or '.join(map(printed_metric, assumption.tested_by))} could reject it",
        )
    if name in _DECLARED:
        return "declared", "declared, not tested"
    return "not testable", "not testable by any run"


def _filters(contract: Contract) -> tuple[State, str]:
    kernels = contract.kernels
    own = [k.sampling for k in (kernels.train, kernels.infer) if k.sampling is not None]
    given = [*own, *(workload.sampling for workload in contract.all_workloads.values())]
    if not any(sampling.filters for sampling in given):
        if any(w.source == "trainer" for w in contract.all_workloads.values()):
            return "declared", "declared: nothing is filtered, and a trainer samples the tokens"
        return "kept", "kept by construction: the contract filters nothing"
    if kernels.train.mask == "replayed":
        return "declared", "declared: the train kernel reuses the tokens that the infer kernel kept"
    return "untested", "not tested: each side keeps its own tokens; mask: replayed shares them"


def _tested(
    by: tuple[str, ...], contract: Contract, verdict: Verdict | None
) -> tuple[State, str] | None:
    """The results of the metrics that can reject it; None without such a metric."""
    if verdict is None:
        metrics = {clause.metric for _, _, clause in contract.clauses()}
        if contract.statistical:
            metrics.add(_BY_DEFAULT)
        there = [printed_metric(name) for name in by if name in metrics]
        return ("open", f"tested by {' and '.join(there)} as it runs") if there else None
    cells = [cell for cell in verdict.cells if cell.metric in by and cell.place == WHOLE]
    cells = [cell for cell in cells if cell.outcome != "not applicable"]
    for cell in cells:
        # a measured reward outside its range is an error; a large gap breaks no assumption
        rejecting = ("error",) if cell.metric == "reward_gap" else ("violated", "error")
        if cell.outcome in rejecting:
            return "rejected", f"REJECTED by {printed_metric(cell.metric)}"
    tried = [cell for cell in cells if cell.outcome in ("holds", "violated")]
    if tried:
        counts = (f"{cell.n:,} {cell.units}, by {printed_metric(cell.metric)}" for cell in tried)
        return "not rejected", f"not rejected on {' and on '.join(counts)}"
    return ("open", f"{printed_metric(cells[0].metric)} has not decided yet") if cells else None


# The start of a path of the chain: the clause's number and its assumptions.
#
# Without a verdict it is the limit; with one it is the certified upper bound.


_RAW = Sampling.model_validate({})  # raw logits, if nothing is sampled
_SAMPLED = ("sampler", "order", "same_tokens")


class LeaveOut(Exception):  # noqa: N818 - a reason, not an error
    """No (further) consequence follows from a clause, with the reason."""


def tokens_of(contract: Contract, workload: str) -> int | None:
    """Most tokens of a response, including the end-of-text step; None if unknown."""
    declared = contract.all_workloads.get(workload)
    if declared is None:
        return None
    written = "max_new_tokens" in declared.sampling.model_fields_set
    return declared.sampling.max_new_tokens if written or declared.source == "prompts" else None


_EVERYWHERE = "every_context"
# display names of clauses at the end of the chain
_ITSELF = {
    "policy_gradient_bias": "bias of the policy gradient",
    "ratio_budget": "share of the clip range used",
    "reward_gap": "gap of your own reward, up or down",
}
_NEXT_TV = "TV of the next token"
_GAP = "gap of the token weights"
_BIAS = _ITSELF["policy_gradient_bias"]
_ALL = 1.0  # of the clip range: all of it is used


def chain(contract: Contract, verdict: Verdict | None = None) -> Chain:
    """Every number of a contract, or of a verdict on it, with its consequences.

    Args:
        verdict: a verdict on this contract; its certified upper bounds replace the limits.
    """
    steps: list[Step] = []
    left_out: list[tuple[str, str]] = []
    for section, _, clause in contract.clauses():
        if section in ("runtime", "observability"):
            continue
        try:
            for step in _Path(contract, section, clause, verdict).steps():
                steps.append(step)  # noqa: PERF402 - what came before a path ends stays
        except LeaveOut as reason:
            left_out.append((clause.id, str(reason)))
    names = dict.fromkeys(name for step in steps for name in step.assumes)
    widths = [tokens_of(contract, name) for name in contract.all_workloads]
    return Chain(
        contract=contract.metadata.name,
        shown=verdict is not None,
        tokens=widths[0] if widths else None,
        steps=tuple(steps),
        rests=tuple(rest(name, contract, verdict) for name in names),
        left_out=tuple(left_out),
        further=tuple(_further(contract, [step for step in steps if not step.vacuous])),
    )


_COSINE = 0.9  # of an angle of 26 degrees


def _further(contract: Contract, steps: list[Step]) -> Iterator[Further]:
    """The consequences of the smallest number of each quantity and of one more number."""

    def least(what: str) -> Step | None:
        found = [step for step in steps if step.what.startswith(what)]
        return min(found, key=lambda step: step.number, default=None)

    tv, gap, bias = least(_NEXT_TV), least(_GAP), least(_BIAS)
    if contract.kernels.train.routes == "replayed" and tv is not None:
        what, bound = f"{tv.what}, with train's own routes", "TV(own routes, replayed routes)"
        yield Further(tv.clause, what, f"{tv.number:.3g} + {bound}", "tv_with_own_routes")
    psi, mean = psi_of(contract), loss_of(contract) == "token_mean"
    lags = contract.weights.changes == "every_step" and mean  # else tokens count by their place
    if lags and gap is not None and psi.name in STEEP:
        what, bound = f"{gap.what}, of stale tokens", "TV(train now, train as it sampled)"
        bound = f"{gap.number:.3g} + {STEEP[psi.name]:g} x {bound}"
        yield Further(gap.clause, what, bound, "weight_gap_with_lag")
    if bias is None or bias.number <= 0:
        return
    gradient, clause, number = contract.gradient, bias.clause, f"{bias.number:.3g}"
    if gradient is not None and gradient.ratio == "decoupled" and gradient.clip_range is not None:
        bound = f"{number} x max({1.0 + gradient.clip_range[1]:g}, dual clip)"
        yield Further(clause, f"{_BIAS}, clipped, every epoch", bound, "clipped_gradient_bias")
    if advantage := advantage_bound(contract):
        bound = f"{number} x (1 + beta x clip x tokens / {advantage:.3g})"
        yield Further(clause, f"{_BIAS}, with a KL penalty", bound, "kl_penalty_bias")
    from_ = bias.number / math.sqrt(1.0 - _COSINE**2)
    bound = f"sqrt(1 - ({number} / norm)^2), so {_COSINE:g} from a norm of {from_:.3g} on"
    what = "cosine of the expected gradients, at least"
    yield Further(clause, what, bound, "gradient_direction")


@dataclass(frozen=True)
class _Path:
    """A clause of a contract with its cell on the whole traffic."""

    contract: Contract
    section: Section
    clause: Clause
    verdict: Verdict | None

    def cell(self) -> CellVerdict | None:
        """The cell of the whole traffic; None without a verdict."""
        if self.verdict is None:
            return None
        mine = (self.clause.id, self.section, WHOLE)
        of = (c for c in self.verdict.cells if (c.clause, c.section, c.place) == mine)
        cell = next(of, None)
        if cell is None:
            raise LeaveOut("the verdict has no such cell")
        failed = [
            guard.clause
            for guard in self.verdict.cells
            if guard.section == "observability" and guard.enforced
            if guard.workload == cell.workload and guard.outcome in ("violated", "error")
        ]
        if failed and self.section == "statistical":
            raise LeaveOut(f"a precondition failed ({', '.join(failed)}), so it shows nothing")
        if cell.outcome == "not applicable" or (cell.interval is None and cell.value is None):
            raise LeaveOut(cell.note or "nothing was measured")
        if cell.outcome == "error":
            raise LeaveOut(f"it is in error, so it shows nothing: {cell.note}".rstrip(": "))
        if cell.interval is None and self.section != "numerical":
            raise LeaveOut("it has an estimate and no interval, so it shows no upper end")
        if cell.interval is not None and cell.interval[0] > cell.interval[1]:
            raise LeaveOut("its interval is empty, so it shows no upper end")
        return cell

    def start(self, what: str, unit: str = "", most: float = math.inf) -> Step:
        """The limit, or the certified upper bound."""
        cell, clause = self.cell(), self.clause
        if cell is not None:
            number = cell.interval[1] if cell.interval else cell.value
        elif isinstance(clause.at_most, float):
            number = clause.at_most
            if clause.percentile is not None and self.section == "statistical":
                number = round((100.0 - clause.percentile) / 100.0, 12)
        else:
            raise LeaveOut("its limit is known once it is measured: give the run directory")
        if number is None or not math.isfinite(number):
            raise LeaveOut("it has no upper end")
        return Step(
            clause.id,
            0,
            what,
            number,
            unit,
            standing=self.standing(cell),
            assumes=joined(self.assumes(), cell.assumptions if cell else ()),
            enforced=clause.enforced,
            vacuous=is_vacuous(number, most),
        )

    def standing(self, cell: CellVerdict | None) -> Standing:
        """The guarantee type of the clause's number."""
        if self.section == "numerical":
            return "fact"
        for standing in STANDINGS:
            if cell is not None and cell.kind == standing:
                return standing
        in_chain = self.clause.metric in CHAIN
        return CHAIN[self.clause.metric].standing if in_chain else "certificate"

    def assumes(self) -> tuple[str, ...]:
        """The assumptions of the clause's number."""
        if self.section == "numerical":
            return ()
        drawn = ("independent",) if self.claim == "population" else ()
        if self.clause.metric == "reward_gap":
            return ("order", *drawn)  # no logprob is used
        own = self.metric.assumes if self.clause.metric in CHAIN else ()
        return joined((*_SAMPLED, *drawn), own)

    @property
    def claim(self) -> str:
        """Its scope: population or observed sample."""
        return self.clause.claim or self.contract.claim

    @property
    def metric(self) -> type[ChainMetric]:
        """The metric of the chain under this contract."""
        return chain_metric(self.contract, self.clause)

    @property
    def most(self) -> float:
        """The largest value that the clause's own metric can have."""
        if not isinstance(self.clause.at_most, float):
            return math.inf
        return self.metric.of(self.contract, self.clause).most

    @property
    def transforms(self) -> tuple[Sampling, Sampling]:
        """The transforms of infer's and train's logits before sampling."""
        workload = self.contract.all_workloads.get(self.contract.workload_of(self.clause))
        infer = workload.sampling.transform if workload else _RAW
        return infer, self.contract.kernels.train.sampling or infer

    @property
    def raw(self) -> bool:
        """Whether both kernels sample from raw logits."""
        return self.transforms == (_RAW, _RAW)

    @property
    def tokens(self) -> int | None:
        """Most tokens of a response of its workload."""
        return tokens_of(self.contract, self.contract.workload_of(self.clause))

    def steps(self) -> Iterator[Step]:
        """Yield the steps of the path.

        Raises:
            LeaveOut: the path ends early.
        """
        if WHOLE not in slices_of(self.contract, self.section, self.clause):
            raise LeaveOut("it covers parts of the traffic; the chain is for the whole")
        metric = self.clause.metric
        if self.section == "numerical":
            path = {"logit_osc_nats": self._from_osc, "tv": self._from_golden_tv}.get(metric)
            if path is not None and (self.clause.aggregate or "max") != "max":
                raise LeaveOut("only a maximum bounds every position")
        else:
            path = {
                "tv": self._from_tv,
                "abs_log_ratio_nats": self._from_log_ratio,
                "reward_drift": self._from_reward_drift,
                "weight_gap": self._from_weight_gap,
            }.get(metric, self._from_itself if metric in CHAIN else None)
        if path is None:
            raise LeaveOut(f"no bound of the chain starts from {metric}")
        yield from path()

    # from exact values on golden texts

    def _from_osc(self) -> Iterator[Step]:
        osc = self.start("osc of the drift of logits, golden texts", "nats")
        yield osc
        infer, train = self.transforms
        temperature = infer.temperature
        if train.temperature != temperature:
            raise LeaveOut(
                "beyond golden logits: the kernels sample at temperatures "
                f"{train.temperature:g} and {temperature:g}, which differ by more than a drift"
            )
        replayed = self.contract.kernels.train.mask == "replayed"
        if train != infer and not replayed:
            raise LeaveOut(
                "beyond golden logits: each kernel filters its tokens with its own logits"
            )
        if temperature != 1.0:
            what = f"osc at temperature {temperature:g}, golden texts"
            inputs = (osc.number, temperature)
            osc = follow(osc, "osc_at_temperature", what, *inputs, unit="nats")
            yield osc
        if infer.filters or train.filters:
            # on golden rows only if both kernels keep the same tokens
            osc = replace(osc, standing=weakest(osc.standing, "conditional bound"))
        yield follow(osc, "tv_from_osc", f"{_NEXT_TV}, golden texts", osc.number, most=1.0)
        yield follow(osc, "kl_from_osc", "KL of the next token, golden texts", osc.number)
        everywhere = (_EVERYWHERE,)
        tv = follow(
            osc,
            "tv_from_osc",
            f"{_NEXT_TV}, every context",
            osc.number,
            most=1.0,
            adds=everywhere,
        )
        tv = replace(tv, standing=weakest(tv.standing, "conditional bound"))
        yield tv
        if tokens := self.tokens:
            # affinities of steps multiply, which is tighter than adding TV
            inputs = (osc.number, float(tokens))
            yield from self._answers(tv, "sequence_tv_from_osc", tokens, *inputs)
        yield from self._uncorrected(tv)
        ratio = follow(
            osc,
            "abs_log_ratio_from_osc",
            "|log-ratio|, every token and context",
            osc.number,
            unit="nats",
            adds=everywhere,
        )
        used = [*self._clip(replace(ratio, standing=tv.standing), "")]
        if used:
            yield replace(ratio, standing=tv.standing)
            yield from used

    def _from_golden_tv(self) -> Iterator[Step]:
        tv = self.start(f"{_NEXT_TV}, golden texts", most=1.0)
        yield tv
        if not self.raw:
            raise LeaveOut(
                "beyond golden texts: their tv is of raw logits, and tokens are sampled after a "
                "temperature or a filter; logit_osc_nats goes on through a temperature"
            )
        everywhere = replace(
            tv,
            level=1,
            what=f"{_NEXT_TV}, every context",
            standing="conditional bound",
            assumes=joined(tv.assumes, (_EVERYWHERE,)),
        )
        yield everywhere
        yield from self._over_answers(everywhere)
        yield from self._uncorrected(everywhere)

    # from promises about sampled tokens

    def _from_tv(self) -> Iterator[Step]:
        if self.clause.aggregate != "mean":
            raise LeaveOut("a percentile of the sampled tv hardly bounds its mean")
        tv = self.start(f"{_NEXT_TV}, on average", most=1.0)
        yield tv
        yield from self._after_mean(tv)

    def _from_log_ratio(self) -> Iterator[Step]:
        beyond = self.clause.at_most
        if self.clause.percentile is None or not isinstance(beyond, float):
            raise LeaveOut("only a percentile with a number for a limit bounds a mean")
        what_share = f"share of tokens beyond {beyond:g} nats of log-ratio"
        share = self.start(what_share, most=1.0)
        yield share
        inputs = (beyond, min(share.number, 1.0))
        what = f"{_NEXT_TV}, on average"
        tv = follow(share, "tv_from_exceedance", what, *inputs, most=1.0)
        yield tv
        yield from self._after_mean(tv)
        if share.vacuous:
            return
        rest = replace(share, number=beyond)
        yield from self._clip(rest, f", all but {100 * share.number:.2g} % of tokens")

    def _from_reward_drift(self) -> Iterator[Step]:
        what, most = self._reward()
        yield self.start(what, most=most)

    def _from_weight_gap(self) -> Iterator[Step]:
        psi = psi_of(self.contract)
        named = "uncorrected" if psi.name == "naive" else f"after {psi.name}"
        most = self.most
        gap = self.start(f"{_GAP}, {named}", self.metric.metric_unit, most)
        yield gap
        yield from self._bias(gap, most)

    def _from_itself(self) -> Iterator[Step]:
        """The path of a clause that certifies the budget directly."""
        metric, clause = self.clause.metric, self.clause
        what, most = _ITSELF.get(metric, metric.replace("_", " ")), self.most
        if clause.percentile is not None and isinstance(clause.at_most, float):
            what = f"share of tokens that use over {clause.at_most:g} of the clip range"
            yield self.start(what, most=1.0)
            return
        if metric == "support_mass":
            cap = getattr(self.metric.of(self.contract, clause), "cap", math.inf)
            what = f"train mass that infer cannot sample, or over {cap:g} times its own"
        if metric == "ratio_budget":
            most = min(most, _ALL)
        start = self.start(what, self.metric.metric_unit, most)
        cell = self.cell()
        if metric == "reward_gap" and cell is not None and cell.interval:
            # a gap may have either sign
            number = max(map(abs, cell.interval))
            start = replace(start, number=number, vacuous=is_vacuous(number, most))
        yield start

    # consequences

    def _after_mean(self, tv: Step) -> Iterator[Step]:
        """From the mean TV of a token, over contexts sampled by infer."""
        over = tv
        if self.claim == "realised":
            # over the sampled prefixes only
            over = replace(tv, standing=weakest(tv.standing, "estimate"))
        yield from self._over_answers(over)
        yield from self._uncorrected(tv)

    def _over_answers(self, tv: Step) -> Iterator[Step]:
        if tokens := self.tokens:
            inputs = (min(tv.number, 1.0), float(tokens))
            of = "conversation" if has_turns(self.contract) else "sequence"
            yield from self._answers(tv, f"{of}_tv_from_token_tv", tokens, *inputs)

    def _answers(self, tv: Step, theorem: str, tokens: int, *inputs: float) -> Iterator[Step]:
        answers, adds = f"TV of whole responses, up to {tokens:,} tokens", ()
        if has_turns(self.contract):
            answers, adds = f"{answers} in all turns", ("same_environment",)
        whole = follow(tv, theorem, answers, *inputs, most=1.0, adds=adds)
        yield whole
        what, most = self._reward()
        low, high = self.contract.reward.range if self.contract.reward else (0.0, 1.0)
        yield follow(whole, "reward_drift_from_tv", what, whole.number, low, high, most=most)

    def _reward(self) -> tuple[str, float]:
        """The name and the largest value of the reward drift."""
        if self.contract.reward is None:
            return "drift of any reward, as a share of its range", 1.0
        low, high = self.contract.reward.range
        return f"drift of any reward in [{low:g}, {high:g}]", high - low

    def _uncorrected(self, tv: Step) -> Iterator[Step]:
        """A trainer without token weights has a gap of twice the TV."""
        psi = psi_of(self.contract)
        if psi.name != "naive" or loss_of(self.contract) != "token_mean":
            return  # the other losses weight the gap of a token by its response
        what = f"{_GAP}, uncorrected"
        gap = follow(tv, "weight_gap_from_tv", what, min(tv.number, 1.0), most=psi.span[1])
        yield gap
        yield from self._bias(gap, psi.span[1])

    def _bias(self, gap: Step, most: float) -> Iterator[Step]:
        advantage, norm = advantage_bound(self.contract), score_norm_of(self.contract)
        if advantage is None or norm is None:
            return
        factors = (advantage, norm)
        # the upper bound of a signed value may be below 0
        inputs = (max(gap.number, 0.0), *factors)
        yield follow(
            gap,
            "policy_gradient_bias",
            _BIAS,
            *inputs,
            unit=gap.unit,
            most=most * math.prod(factors),
            adds=bias_assumes(loss_of(self.contract)),
        )

    def _clip(self, ratio: Step, of: str) -> Iterator[Step]:
        """The share of the clip range that log-ratios up to a number use."""
        gradient = self.contract.gradient
        if gradient is None or gradient.clip_range is None or gradient.ratio == "decoupled":
            return
        if min(gradient.clip_range) <= 0:
            return
        law = THEOREMS["ratio_budget"]
        budget = law.function(ratio.number, *gradient.clip_range)
        used = max(float(budget.used_up), float(budget.used_down))
        yield replace(
            ratio,
            level=ratio.level + 1,
            what=f"{_ITSELF['ratio_budget']}{of}",
            number=used,
            vacuous=is_vacuous(used, _ALL),
            unit="",
            theorem=law.name,
            standing=weakest(ratio.standing, law.standing),
            # for tokens within the ratio it holds without other contexts
            assumes=joined(ratio.assumes, ("one_ratio",)),
        )
