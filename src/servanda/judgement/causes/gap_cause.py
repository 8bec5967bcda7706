# An explanation of a gap: cause, evidence, slices, and the next experiment as a command.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from shlex import quote
from statistics import NormalDist
from typing import Any

import numpy as np

from servanda.contract.clause import SliceRule
from servanda.judgement.breakdown import Advice, CorrectionForecast, Estimate, SliceAdvice
from servanda.judgement.causes.catalogue import CAUSES, REMEDIES, UNEXPLAINED, Cause
from servanda.judgement.causes.gap_shape import WORST, Signatures, signatures_of
from servanda.judgement.causes.slice_search import (
    FoundSlice,
    OddSequences,
    find_sequences,
    find_slices,
    mask_of,
    measured,
)
from servanda.judgement.causes.token_table import Array, TokenTable
from servanda.judgement.contract_text import slice_text
from servanda.judgement.slices.rules import LABEL, modulo
from servanda.theory.bounds.corrections import CORRECTIONS, Correction, token_errors
from servanda.theory.bounds.sequence import shortfall
from servanda.theory.stats.block_bootstrap import student_t

# The case that rules decide on: signatures, slices, failed checks; and the registry of the rules.


MOST_OF_IT = 0.5  # least share that a cause explains
_MOST_IDS = 0.5  # of the tokens
_OF_THE_GAP = 0.2  # least share of the gap above other tokens in the main slice
GROWS, SURE_Z = 1.5, 3.0
FEW_ZEROS = 0.5  # share of the gap in logprobs of 0: with more they were written, not drawn


@dataclass(frozen=True)
class Case:
    """What a decision is made from.

    Args:
        limit: of the mean gap.
        problems: names of the data quality checks that failed.
    """

    signatures: Signatures
    slices: tuple[FoundSlice, ...] = ()
    sequences: OddSequences | None = None
    limit: float = 0.0
    problems: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def main(self) -> FoundSlice | None:
        """The slice that explains most of the excess, if one does."""
        best = max(self.slices, key=lambda s: s.share, default=None)
        if best is None or best.share < MOST_OF_IT:
            return None
        # a slice may have all that is uneven, and next to nothing of the gap
        own = best.tokens * (best.inside - best.outside)
        return best if own >= _OF_THE_GAP * self.signatures.gap else None

    @property
    def placed(self) -> bool:
        """Whether the gap is in one place, and not everywhere."""
        return self.main is not None or self.sequences is not None

    @property
    def of_most_ids(self) -> bool:
        """Whether the main slice is of most of the sampled ids: the tails that a cut leaves out."""
        ids = self.sliced("outcome.token_id")
        return ids is not None and ids.tokens > _MOST_IDS

    def sliced(self, *bases: str) -> FoundSlice | None:
        """The main slice, if its first condition is on one of these fields."""
        main = self.main
        if main is None:
            return None
        return main if modulo(main.first[0])[0] in bases else None


Rule = Callable[[Case], str]
RULES: dict[str, Rule] = {}


def rule(name: str) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        RULES[name] = function
        return function

    return add


def explains(found: FoundSlice | None) -> str:
    """How much of the excess lies there; "" without a slice."""
    if found is None:
        return ""
    return (
        f"{100 * found.share:.0f} % of the excess over the other tokens lies there "
        f"({found.inside:.2g} against {found.outside:.2g})"
    )


def grows(s: Signatures) -> bool:
    return (s.growth or 0.0) >= GROWS and (s.growth_z or 0.0) >= SURE_Z


# Rules about a place: a slice, some sequences, or a failed check.


INFRASTRUCTURE = ("replica", "rank", "engine")
_START = 3.0
_SOME = 0.6  # concentration of a gap at the start of some responses, not of all
_OLD = 2.0
_END = 0.2  # share of the tokens that are the end of their responses
_JUMP = 3.0  # of the gap at one length; what grows along the context has less
_FEW_SEQUENCES = 0.75  # of concentration: stale caches .93, FP8 .39, a lost adapter .51


def _problem(*names: str) -> Rule:
    return lambda case: next((case.problems[n] for n in names if n in case.problems), "")


_missing = _problem("coverage", "values", "zeros")


@rule("missing_data")
def _(case: Case) -> str:
    s = case.signatures
    # a cut that leaves one token has a logprob of 0 as well, and moves all other tokens
    cut = s.cut_share >= MOST_OF_IT and s.zeros <= FEW_ZEROS
    return "" if cut and {*case.problems} <= {"zeros"} else _missing(case)


RULES["shift"] = _problem("line_up")
RULES["replay"] = _problem("replay", "routes")
RULES["raw_logprobs"] = _problem("coherence")


@rule("stale_replica")
def _(case: Case) -> str:
    found = _of_engine(case)
    if found is None or not grows(case.signatures):
        return ""
    return f"its gap grows x{case.signatures.growth:.2g}; {explains(found)}"


RULES["one_engine"] = lambda case: explains(_of_engine(case))


@rule("one_kind")
def _(case: Case) -> str:
    main = case.main
    if main is None or not main.first[0].startswith(LABEL) or _of_engine(case):
        return ""
    return explains(main)


def _of_engine(case: Case) -> FoundSlice | None:
    """The main slice, if it is of one part of the infrastructure."""
    return case.sliced(*(LABEL + name for name in INFRASTRUCTURE))


@rule("old_weights")
def _(case: Case) -> str:
    found, stale = case.sliced("outcome.staleness"), case.signatures.stale
    if stale is None or stale < _OLD or (found is None and case.main is not None):
        return ""
    more = f"; {explains(found)}" if found else ""
    return f"tokens of older weights have x{stale:.2g} the gap of the others{more}"


@rule("retokenised")
def _(case: Case) -> str:
    found = case.sliced("context.turn", "context.turn_position")
    times = case.signatures.turn_start
    if found is None or times is None or times < _START:
        return ""
    return explains(found)


RULES["vocabulary"] = lambda case: explains(case.sliced("outcome.token_id"))


@rule("end_of_answer")
def _(case: Case) -> str:
    found = case.sliced("outcome.from_end")
    if found is None:  # or the last few positions of the responses
        late = case.sliced("context.position")
        if late is not None and "gte" in late.first[1] and late.tokens <= _END:
            found = late
    return explains(found)


@rule("blocks")
def _(case: Case) -> str:
    main = case.main
    if main is None or not any(
        modulo(name)[1] is not None and not name.startswith("context.row") for name in main.match
    ):
        return ""
    return explains(main)


RULES["batch"] = lambda case: explains(case.sliced("context.row"))


@rule("attention_window")
def _(case: Case) -> str:
    found = case.sliced("context.length", "context.position")
    if found is None or "gte" not in found.first[1] or found.outside > found.inside / _JUMP:
        return ""
    edge = found.first[1]["gte"]
    return f"from about {edge:g} tokens on; {explains(found)}"


@rule("padding")
def _(case: Case) -> str:
    found = case.sliced("request.prompt_tokens", "context.length")
    if found is None or "lt" not in found.first[1] or _early(case) is not None:
        return ""
    return explains(found)


@rule("packing")
def _(case: Case) -> str:
    s, found = case.signatures, _early(case)
    if found is None or s.concentration < _SOME:
        return ""
    return f"the first tokens of some responses, x{s.start or math.nan:.2g}; {explains(found)}"


@rule("template")
def _(case: Case) -> str:
    found = _early(case)
    return f"the first tokens of all responses; {explains(found)}" if found else ""


def _early(case: Case) -> FoundSlice | None:
    """The main slice, if it is of the first tokens of responses or turns."""
    for name, conditions in (case.main.match if case.main else {}).items():
        early = "lt" in conditions or conditions.get("in") == [0]
        if name in ("context.position", "context.turn_position") and early:
            return case.main
    return None


@rule("stale_cache")
def _(case: Case) -> str:
    s = case.signatures
    if not grows(s) or s.concentration < _FEW_SEQUENCES:
        return ""
    return (
        f"drift that grows, x{s.growth:.2g}, in few sequences ({100 * s.concentration:.0f} % of "
        f"it in {100 * WORST:.0f} % of the tokens)"
    )


@rule("odd_sequences")
def _(case: Case) -> str:
    odd = case.sequences
    if odd is None or grows(case.signatures):  # of a gap that grows, they are those of late steps
        return ""
    places = f", such as {', '.join(odd.worst)}" if odd.worst else ""
    return (
        f"{100 * odd.sequences:.2g} % of the sequences have {100 * odd.share:.0f} % of the "
        f"excess{places}"
    )


# Rules about the shape of a gap, wherever it is.


_AT_START = 0.35  # a first step below this share of the last: nothing was wrong before an update
_CURVE = 0.35  # share of the variance that a function of the logprob has
_TAIL = 0.35  # share of the gap in a hundredth of the tokens
_IDS = 0.35
_PENALTY_Z, _PENALTY_SHARE = 3.0, 0.03
_LENGTH, _LATER = 1.5, 1.2  # of the rate over context lengths; the second with a slice
_LINEAR = 0.4  # share of the variance that a temperature explains
_UNEVEN = 2.0  # largest over smallest rate of steps that are alike
_SPREAD = 0.62  # concentration of sequences that are alike, as real texts have it


@rule("top_p")
def _(case: Case) -> str:
    s = case.signatures
    if s.cut_share < MOST_OF_IT or s.zeros > FEW_ZEROS or (case.placed and not case.of_most_ids):
        return ""
    return (
        f"the engine cannot sample {100 * s.cut:.2g} % of the trainer's mass and renormalises "
        f"the rest: a top-p of at most {_rest(s.cut)}, a top-k or a min-p that the trainer does "
        f"not apply; it explains {100 * s.cut_share:.0f} % of the difference"
    )


@rule("temperature")
def _(case: Case) -> str:
    s = case.signatures
    if s.temperature_share < _LINEAR or case.placed:
        return ""
    return (
        f"the engine sampled at about {s.temperature:.2f} times the trainer's; the log ratio "
        f"follows log p, which explains at least {100 * s.temperature_share:.0f} % of its variance"
    )


@rule("penalty")
def _(case: Case) -> str:
    s = case.signatures
    share = s.repeated_share or 0.0
    if s.repeated is None or abs(s.repeated) < _PENALTY_Z or share < _PENALTY_SHARE:
        return ""
    way = "less" if s.repeated > 0 else "more"
    return f"tokens that a response repeats are {way} likely to the engine, {s.repeated:+.0f} σ"


@rule("positions")
def _(case: Case) -> str:
    s, found = case.signatures, case.sliced("context.length", "context.position")
    later = found is not None and "gte" in found.first[1]
    grown = s.length is not None and s.length >= _LENGTH and (s.length_z or 0.0) >= SURE_Z
    if s.length is None or not (grown or (later and s.length >= _LATER)):
        return ""
    return f"the rate grows x{s.length:.2g} from the shortest contexts to the longest"


@rule("precision_drift")
def _(case: Case) -> str:
    s = case.signatures
    if not grows(s) or s.first is None or s.first < _AT_START:
        return ""
    if not (s.first_step <= 1 and (s.first_gap or 0.0) > 0):
        return ""  # a lost update can explain every step
    return (
        f"drift that grows, x{s.growth:.2g}, in all sequences alike; step {s.first_step}, before "
        f"most updates, has {100 * s.first:.0f} % of the gap already"
    )


@rule("stale_weights")
def _(case: Case) -> str:
    s = case.signatures
    if not grows(s) or s.first is None or s.first >= _AT_START:
        return ""
    return (
        f"drift that grows, x{s.growth:.2g}, in all sequences alike, from "
        f"{100 * s.first:.0f} % of it at step {s.first_step}"
    )


@rule("routing")
def _(case: Case) -> str:
    s = case.signatures
    if s.tail < _TAIL or case.main is not None or s.ids is None or s.ids >= _IDS:
        return ""
    return f"{100 * s.tail:.0f} % of the gap lies in 1 % of the tokens, in all sequences and places"


@rule("head")
def _(case: Case) -> str:
    s = case.signatures
    if s.ids is None or s.ids < _IDS or grows(s):
        return ""
    return f"the id of a token explains {100 * s.ids:.0f} % of the variance of the log ratio"


@rule("softcap")
def _(case: Case) -> str:
    s = case.signatures
    if s.curve < _CURVE or grows(s):
        return ""
    return f"{100 * s.curve:.0f} % of the variance of the log ratio is a function of log p"


@rule("numerics")
def _(case: Case) -> str:
    s = case.signatures
    if grows(s) or case.main is not None or case.sequences is not None or s.tail > _TAIL:
        return ""
    if s.concentration > _SPREAD or (s.uneven or 1.0) > _UNEVEN:
        return ""
    return (
        f"all sequences, positions and steps alike, {s.rms:.2g} nats a token, as of "
        f"{_ladder(s.rms)}"
    )


def _ladder(rms: float) -> str:
    """The usual size of a format's noise; an order of magnitude, not a measurement."""
    for most, name in ((1e-4, "float32"), (0.04, "bfloat16"), (0.12, "8 bits")):
        if rms <= most:
            return name
    return "4 bits, or of other weights"


def _rest(mass: float) -> str:
    """1 - x, with enough digits to differ from 1.

    >>> _rest(0.1), _rest(0.003), _rest(3e-6)
    ('0.9', '0.997', '0.999997')
    """
    digits = max(1, 1 - math.floor(math.log10(mass)))
    return f"{1 - mass:.{digits}f}".rstrip("0")


# The decision: from signatures and slices to a cause, or to none.
#
# The first rule that fits names the cause: a failed check comes first, then a place or a transform,
# then what only fits the shape.  Each rule returns its evidence, with numbers, or "".  The
# thresholds were chosen on some models and strengths and tested on others (benchmarks/causes.py).


ORDER = (
    *("missing_data", "shift", "replay", "raw_logprobs"),
    *("stale_replica", "one_engine", "one_kind", "old_weights", "retokenised"),
    *("top_p", "temperature", "penalty"),
    *("vocabulary", "end_of_answer", "blocks", "stale_cache", "batch", "attention_window"),
    *("padding", "packing", "template", "odd_sequences", "precision_drift", "stale_weights"),
    *("positions", "routing", "softcap", "head", "numerics"),
)


def causes_of(case: Case) -> list[tuple[Cause, str]]:
    """The causes that fit, most likely first, with their evidence; `unexplained` if none does."""
    found = [(CAUSES[name], text) for name in ORDER if (text := RULES[name](case))]
    if found:
        return found
    s = case.signatures
    grown = f", x{s.growth:.2g} over the steps" if s.growth is not None else ""
    text = (
        f"{100 * s.tail:.0f} % of the gap in 1 % of the tokens, {100 * s.concentration:.0f} % in "
        f"the sequences with {100 * WORST:.0f} % of them{grown}; no signature fits"
    )
    return [(CAUSES[UNEXPLAINED], text)]


@dataclass(frozen=True)
class Explanation:
    """The likely cause of a gap.

    Args:
        cause, rival: names of the two most likely causes; `unexplained` where no signature fits.
        evidence: the measured numbers that suggest it.
        experiment, command: what separates the two.
        case: the signatures, slices and failed checks that it was decided on.
    """

    cause: str
    rival: str
    evidence: str
    experiment: str
    command: str
    case: Case

    @property
    def named(self) -> bool:
        return self.cause != UNEXPLAINED

    @property
    def text(self) -> str:
        """The cause and its evidence in one line."""
        words = CAUSES[self.cause].words.replace("{where}", self._where)
        return f"{words}; {self.evidence}"

    @property
    def _where(self) -> str:
        """The label of the main slice, such as "env math"."""
        for name, conditions in (self.case.main.match if self.case.main else {}).items():
            if name.startswith(LABEL):
                return f"{name.removeprefix(LABEL)} {conditions['in'][0]}"
        return "one label"

    @property
    def rules(self) -> list[SliceRule]:
        """The slices as a contract has them."""
        return [
            SliceRule(name=f"found-{number}", match=found.match)  # type: ignore[call-arg]
            for number, found in enumerate(self.case.slices, 1)
        ]


def explain(
    table: TokenTable,
    limit: float = 0.0,
    problems: Mapping[str, str] | None = None,
    place: str = "DIR",
    violated: Sequence[Mapping[str, Mapping[str, Any]]] = (),
) -> Explanation:
    """The likely cause of a gap.

    Args:
        limit: of the mean of |p - q| / (p + q), which a slice has to exceed.
        violated: conditions of slices that a contract has and that are violated, which count
            where the search finds none.
        problems: failed data quality checks, by name, with what they found.
        place: of the data, for commands.
    """
    slices = find_slices(table, limit)
    slices = slices or tuple(filter(None, (measured(table, match) for match in violated)))
    most = max((found.share for found in slices), default=0.0)
    sequences = None if most >= 0.5 else find_sequences(table, limit)
    signatures = signatures_of(table)
    return explained(Case(signatures, slices, sequences, limit, problems or {}), place)


def explained(case: Case, place: str = "DIR") -> Explanation:
    """The likely cause of a case; `place` is that of the data, for commands."""
    (cause, evidence), *_ = causes_of(case)
    command = cause.command.replace("{dir}", quote(place))
    command = command.replace("{step}", str(case.signatures.first_step))
    return Explanation(cause.name, cause.rival, evidence, cause.experiment, command, case)


# The advice on an explained gap, with the effects that its tokens predict.  Intervals are those
# of a bootstrap over prompt groups.
#
# Axes: R resamples, G prompt groups, K tokens, S sequences.


CONFIDENCE = 0.95
_RESAMPLES, _FEWEST_RESAMPLES = 1000, 200
_COUNTS = 4_000_000  # of groups in resamples; beyond it there are fewer resamples
_FEWEST = 5  # prompt groups for an interval
_SEED = 0


def advise(
    table: TokenTable,
    explanation: Explanation,
    update_tokens: int,
    command: Callable[[str], str] | None = None,
) -> Advice:
    """The advice on an explained gap.

    Args:
        update_tokens: trained tokens of one update.
        command: name of a cause -> the experiment as a command; "" for that of the explanation.
    """
    resamples = _Resamples(table)
    tv_K = shortfall(table.log_ratio_K)
    slices = []
    for rule, found in zip(explanation.rules, explanation.case.slices, strict=True):
        outside_K = ~mask_of(found.match, table)
        rest = resamples.mean(tv_K, outside_K)
        slices.append(SliceAdvice(slice_text(rule), found.share, found.tokens, rest))
    own = command(explanation.cause) if command is not None else ""
    return Advice(
        explanation.cause,
        explanation.text,
        tuple(slices),
        explanation.experiment,
        own or explanation.command,
        REMEDIES[explanation.cause].switch,
        resamples.mean(tv_K),
        update_tokens,
        _forecasts(table, resamples, max(update_tokens, 1)),
    )


class _Resamples:
    """Resampled prompt groups of a table: how often each of them is in each resample."""

    def __init__(self, table: TokenTable) -> None:
        _, self._group_K = np.unique(table.group_K, return_inverse=True)
        self.groups = int(self._group_K.max(initial=-1)) + 1
        rng = np.random.default_rng(_SEED)
        each = np.full(self.groups, 1 / self.groups)
        resamples = max(_FEWEST_RESAMPLES, min(_RESAMPLES, _COUNTS // max(self.groups, 1)))
        counts_RG = rng.multinomial(self.groups, each, size=resamples)
        # the first row is the sample itself
        self.counts_RG = np.vstack([np.ones((1, self.groups), dtype=np.int64), counts_RG])

    def ratio(self, above_K: Array, below_K: Array) -> Array:
        """Sum of one column over that of another, of the sample and of each resample, [1 + R]."""
        sums = [np.bincount(self._group_K, of, self.groups) for of in (above_K, below_K)]
        above_R, below_R = (self.counts_RG @ sum_G for sum_G in sums)
        return np.divide(above_R, below_R, out=np.zeros_like(above_R), where=below_R > 0)

    def mean(self, value_K: Array, of_K: Array | None = None) -> Estimate:
        """The mean over some tokens."""
        of_K = np.ones(len(value_K)) if of_K is None else of_K * 1.0
        return self.estimate(self.ratio(value_K * of_K, of_K))

    def estimate(self, value_R: Array) -> Estimate:
        """The sample's value, and expanded percentiles of the resamples."""
        n = self.groups
        if n < _FEWEST:
            return Estimate(float(value_R[0]))
        reach = math.sqrt(n / (n - 1)) * student_t((1 + CONFIDENCE) / 2, n - 1)
        out = NormalDist().cdf(-reach)
        low, high = np.quantile(value_R[1:], [out, 1 - out])
        return Estimate(float(value_R[0]), float(low), float(high))


def _forecasts(
    table: TokenTable, resamples: _Resamples, update_tokens: int
) -> tuple[CorrectionForecast, ...]:
    """What each correction leaves, smallest error first."""
    columns = {
        name: _columns(correction, table, resamples) for name, correction in CORRECTIONS.items()
    }
    errors = {
        name: np.sqrt(np.maximum(bias_R, 0.0) ** 2 + square_R / update_tokens)
        for name, (bias_R, _, square_R, _) in columns.items()
    }
    error_CR = np.stack([*errors.values()])
    least_R = error_CR[:, 1:].min(axis=0)
    best_C = (error_CR[:, 1:] <= least_R).mean(axis=1)
    forecasts = [
        CorrectionForecast(
            name,
            CORRECTIONS[name].text,
            resamples.estimate(np.maximum(bias_R, 0.0)),
            resamples.estimate(np.maximum(response_R, 0.0)),
            resamples.estimate(np.sqrt(square_R)),
            resamples.estimate(errors[name]),
            resamples.estimate(masked_R),
            float(best),
        )
        for (name, (bias_R, response_R, square_R, masked_R)), best in zip(
            columns.items(), best_C, strict=True
        )
    ]
    return tuple(sorted(forecasts, key=lambda one: one.error.value))


def _columns(
    correction: Correction, table: TokenTable, resamples: _Resamples
) -> tuple[Array, Array, Array, Array]:
    """Means of what a correction leaves, of the sample and of each resample, [1 + R]."""
    starts = np.flatnonzero(np.diff(table.sequence_K, prepend=-1))
    length_S = np.diff(np.append(starts, len(table)))
    errors = token_errors(correction, table.log_ratio_K, length_S)
    one_K, first_K = np.ones(len(table)), np.zeros(len(table))
    first_K[starts] = 1.0
    bias, square, masked = (
        resamples.ratio(column_K, one_K)
        for column_K in (errors.surrogate, errors.square, errors.masked)
    )
    at_first_K = np.zeros(len(table))
    at_first_K[starts] = errors.response
    return bias, resamples.ratio(at_first_K, first_K), square, masked
