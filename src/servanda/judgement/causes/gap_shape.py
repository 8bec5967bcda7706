# The transforms of logprobs that may explain a gap, and the shape of a gap along an ordered field.
#
# A transform is fitted to the tokens of some sequences, and judged on those of others: by what it
# leaves of their gap.  Two kinds: a transform that predicts the other side's logprob leaves the gap
# of its residual; a setting of the sampler, whose effect depends on probabilities that no record
# has, leaves the gap to the nearest pair of logprobs that is possible under it.  Much is possible,
# so what such a setting leaves is compared with what it leaves of the same gap with signs at
# random, as noise has them.
#
# Axes: K tokens, Q sequences, A candidates of a parameter, B bins.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from servanda.judgement.causes.token_table import Array, TokenTable, gap

ENOUGH = 200  # fewest tokens of a fit, and of its test
_TEMPERATURES = np.exp(np.linspace(math.log(0.3), math.log(3.0), 93))
_FARTHEST = 2.5  # a temperature beyond it does not exist in practice, and much is possible under it
_APART = 0.5  # of its logarithm, from what the moments have
_SPREAD = 1.15  # of temperatures that differ
_BETTER = 0.6  # of what one temperature leaves: several are better
_NEAR = 0.02  # of the gap, above the least that any temperature leaves
_COARSE = np.exp(np.linspace(-0.9, 0.9, 19))  # for single sequences
_ALIKE = 0.03  # of the logarithm of a temperature: smaller changes are none
_LEAST_MASS = 0.3  # that a cut keeps: a top-p or top-k below it does not exist in practice
_OF_MASS = 0.5  # of what weights are below 1
_SURE, _OF_CONSTANT = 0.99, 0.3  # of the gap of sure tokens: what a constant ratio leaves
_LAGS = (1, -1, 2, -2, 3, -3)
_UNITS = {"bits (log2)": math.log(2), "log10": math.log(10)}
_UNIT_APART, _UNIT_ALIKE = 0.05, 0.02
_OTHER_FACTOR = 0.05  # share of the gap that any other factor leaves
_DECIMALS = (1.0, 0.5, 0.25, 0.1, 0.05, 0.01, 0.005, 0.001, *(2.0**-k for k in range(3, 9)))
_ON_GRID = 0.98  # share of the values
_AT_BOUND = 0.002  # share of the tokens with one value, the lowest or the highest
_CONSTANT = 0.005  # share of the tokens with one value that stands for no number
_CONSTANT_EXPLAINS = 0.5
_ALONE = 5.0  # times the tokens of any other value
_PENALTY_Z = 1.0, 3.0  # standard errors of the mean weights of repeated and of other tokens
_MOST_REPEATED = 0.6  # share of the repeated tokens that a penalty moves its way
_UNRELATED = 0.3  # largest correlation of the two sides
_LIKE = 0.3  # of the gap of unrelated tokens: distributions that are alike
_BINS, _PRIOR = 40, 5.0
_OF_KEPT = 5.0  # the mean mass that a cut keeps over the least of any context
_SOME_IDS = 0.3  # share of the tokens
_ONE_WAY = 0.8  # mean sign of the log ratios of what is moved one way
_RARE, _FAR = 0.1, 3.0  # share of the tokens; times the gap that the others reach


class Account(NamedTuple):
    """What a transform explains.

    Args:
        share: of the gap above noise, on tokens that did not choose its parameter, 0 to 1.
        left: mean gap that it leaves.
        text: the transform with its parameter.
    """

    name: str
    share: float
    left: float
    text: str


Fit = Callable[[TokenTable, TokenTable], "tuple[Array, str] | None"]


def accounts(
    chosen: TokenTable, tested: TokenTable, noise: float, fits: Mapping[str, Fit]
) -> list[Account]:
    """What each transform explains, in the given order; those that cannot be fitted are left out.

    Args:
        noise: mean gap of tokens without a fault.
    """
    if min(len(chosen), len(tested)) < ENOUGH:
        return []
    whole = float(tested.gap_K.mean())
    if whole <= noise:
        return []
    tried: list[tuple[str, float, float, str]] = []
    for name, fit in fits.items():
        if (fitted := fit(chosen, tested)) is None:
            continue
        usual = whole
        if fit in _POSSIBLE:
            at_random = fit(_at_random(chosen, 1), _at_random(tested, 2))
            usual = whole if at_random is None else float(at_random[0].mean())
        tried.append((name, float(fitted[0].mean()), usual, fitted[1]))
    # noise is no more than what the best of them leaves, of which a setting hides about half
    noise = min([noise, *(2 * left for _, left, *_ in tried)])
    found = []
    for name, left, usual, text in tried:
        own = noise * usual / whole  # what noise leaves
        share = 1 - max(left - own, 0.0) / (usual - own) if usual > own else 0.0
        cause = "temperature" if name == _BY_SEQUENCE else name
        found.append(Account(cause, max(share, 0.0), left, text))
    return found


def _at_random(table: TokenTable, seed: int) -> TokenTable:
    """The same tokens, with the sign of each log ratio at random."""
    sign_K = np.random.default_rng(seed).choice([-1.0, 1.0], len(table))
    known_K = np.isfinite(table.log_ratio_K)
    train_K = np.where(known_K, table.infer_K + sign_K * table.log_ratio_K, table.train_K)
    return replace(table, train_K=train_K)


# transforms that predict the other side's logprob


def _constant(_: TokenTable, tested: TokenTable) -> tuple[Array, str] | None:
    """One value, such as -1, -100 or -inf, stands where a side has no number."""
    for side, logp_K in (("engine", tested.infer_K), ("trainer", tested.train_K)):
        value, n = np.unique(logp_K[~np.isnan(logp_K)], return_counts=True)
        if not len(n) or n.max() < _CONSTANT * len(tested):
            continue
        most = float(value[n.argmax()])
        others = n[(value != most) & (value != 0)]  # a sure token has 0
        if n.max() < _ALONE * others.max(initial=0):
            continue
        share = 100 * n.max() / len(tested)
        percent = f"{share:.0f}" if share >= 10 else f"{share:.1f}"
        text = f"the {side}'s logprob is {most:g} at {percent} % of these tokens"
        left_K = np.where(logp_K == most, 0.0, tested.gap_K)
        if left_K.mean() < (1 - _CONSTANT_EXPLAINS) * tested.gap_K.mean():
            return left_K, text
    return None


def _shift(chosen: TokenTable, tested: TokenTable) -> tuple[Array, str] | None:
    best = min(_LAGS, key=lambda lag: _lagged(chosen, lag).mean())
    return _lagged(tested, best), f"each token has the engine's logprob of the token {best:+d}"


def _lagged(table: TokenTable, lag: int) -> Array:
    """The gap to the engine's logprob of another token of the sequence; else what these have."""
    at_K = np.arange(len(table)) + lag
    inside_K = (at_K >= 0) & (at_K < len(table))
    at_K = np.where(inside_K, at_K, 0)
    inside_K &= table.sequence_K[at_K] == table.sequence_K
    if 2 * inside_K.sum() < len(table):  # tokens without their neighbours
        return table.gap_K
    left_K = gap(table.train_K - table.infer_K[at_K])
    return np.where(inside_K, left_K, left_K[inside_K].mean())


def _unit(chosen: TokenTable, tested: TokenTable) -> tuple[Array, str] | None:
    some_K = (np.abs(chosen.infer_K) > 0.1) & np.isfinite(chosen.train_K)
    if some_K.sum() < ENOUGH:
        return None
    factor = float(np.median(chosen.train_K[some_K] / chosen.infer_K[some_K]))
    if factor < 0:
        return gap(tested.train_K + tested.infer_K), "one side has the other sign, as losses have"
    if not factor or abs(math.log(factor)) < _UNIT_APART:
        return None
    text = ""
    for name, of in _UNITS.items():
        for side, known in (("engine", of), ("trainer", 1 / of)):
            if abs(math.log(factor / known)) < _UNIT_ALIKE:
                factor, text = known, f"the {side} writes {name} instead of nats"
    left_K = gap(tested.train_K - factor * tested.infer_K)
    if not text:
        if left_K.mean() > _OTHER_FACTOR * tested.gap_K.mean():
            return None
        text = f"the trainer's logprobs are {factor:.4g} times the engine's"
    return left_K, text


def _rounding(chosen: TokenTable, tested: TokenTable) -> tuple[Array, str] | None:
    for side, who in (("infer", "engine"), ("train", "trainer")):
        logp_K = getattr(chosen, f"{side}_K")
        other_K = tested.train_K if side == "infer" else tested.infer_K
        for form in ("logprobs", "probabilities"):
            of = (lambda x: x) if form == "logprobs" else np.exp
            value_K = of(logp_K[np.isfinite(logp_K)])
            for step in _DECIMALS:
                if (np.abs(value_K / step - np.rint(value_K / step)) < 1e-4).mean() < _ON_GRID:
                    continue
                own_K = of(getattr(tested, f"{side}_K"))
                low_K, high_K = own_K - step / 2, own_K + step / 2
                if form == "probabilities":
                    low_K, high_K = np.log(np.maximum(low_K, 1e-45)), np.log(high_K)
                text = f"the {who}'s {form} are multiples of {step:g}"
                return gap(np.maximum(np.maximum(low_K - other_K, other_K - high_K), 0.0)), text
    return None


def _clamp(chosen: TokenTable, tested: TokenTable) -> tuple[Array, str] | None:
    best: tuple[float, str, Callable[[TokenTable], Array]] | None = None
    for side in ("infer", "train"):
        who = "engine" if side == "infer" else "trainer"
        logp_K = getattr(chosen, f"{side}_K")
        other = "train_K" if side == "infer" else "infer_K"
        known_K = logp_K[np.isfinite(logp_K)]
        if not len(known_K):
            continue
        for way, bound in (("below", float(known_K.min())), ("above", float(known_K.max()))):
            if (known_K == bound).mean() < _AT_BOUND or bound == 0:
                continue

            def left(
                of: TokenTable,
                side: str = side,
                other: str = other,
                at: float = bound,
                way: str = way,
            ) -> Array:
                cut_K = getattr(of, f"{side}_K") == at
                beyond_K = getattr(of, other)
                cut_K &= beyond_K <= at if way == "below" else beyond_K >= at
                return np.where(cut_K, 0.0, of.gap_K)

            mean = float(left(chosen).mean())
            if best is None or mean < best[0]:
                text = f"the {who}'s logprobs {way} {bound:.4g} are written as {bound:.4g}"
                best = mean, text, left
    return None if best is None else (best[2](tested), best[1])


def _other_tokens(_: TokenTable, tested: TokenTable) -> tuple[Array, str] | None:
    """Of other tokens: a pair is as far apart as two that were put together at random."""
    known_K = np.isfinite(tested.train_K)
    if known_K.sum() < ENOUGH:
        return None
    train_K, infer_K = tested.train_K[known_K], tested.infer_K[known_K]
    if not (train_K.std() and infer_K.std()):
        return None
    order = np.random.default_rng(0).permutation(len(train_K))
    drawn = float(gap(train_K - infer_K[order]).mean())
    # both are logprobs of tokens of one model, so that their distributions agree
    apart = float(gap(np.sort(train_K) - np.sort(infer_K)).mean())
    r = float(np.corrcoef(train_K, infer_K)[0, 1])
    if not drawn or apart > _LIKE * drawn or r > _UNRELATED:
        return None
    share = min(float(tested.gap_K.mean()) / drawn, 1.0)  # of the gap of a random pair
    text = f"the two sides are as far apart as on unrelated tokens (correlation {r:.2f})"
    return tested.gap_K * (1 - share), text


# settings of the sampler, whose effect depends on the probabilities of the other tokens


def _beyond(power: float | Array, table: TokenTable, size: int) -> Array:
    """The gap to the nearest log ratio that a temperature can give, [..., K].

    Under it p_train(v) is q(v)^a / S of the engine's probabilities q, and S = sum of q^a has
    bounds: the other tokens share the mass 1 - q(token) in some way.

    Args:
        power: a, the engine's temperature over the trainer's; broadcasts against [K].
    """
    x_K = table.infer_K
    q_K, rest_K = np.exp(x_K), np.maximum(-np.expm1(x_K), 1e-12)
    one = q_K**power + rest_K**power  # one other token has all of the rest
    even = q_K**power + rest_K**power * float(max(size - 1, 1)) ** (1 - power)
    ends = np.log(one), np.log(even)
    center = (power - 1) * x_K
    low, high = center - np.maximum(*ends), center - np.minimum(*ends)
    d_K = table.log_ratio_K
    return gap(np.maximum(np.maximum(low - d_K, d_K - high), 0.0))


def _size(*tables: TokenTable) -> int:
    return max(int(table.token_K.max(initial=0)) for table in tables) + 1


def _temperature(chosen: TokenTable, tested: TokenTable) -> tuple[Array, str] | None:
    """One that the moments, which are of all tokens, do not contradict."""
    a, moment = _power(chosen)
    away = abs(math.log(a) - math.log(moment))
    return None if away > _APART * abs(math.log(a)) else _at_power(a, chosen, tested)


def _any_temperature(chosen: TokenTable, tested: TokenTable) -> tuple[Array, str] | None:
    """One that the ratios allow, whatever the moments are: those of few tokens are uncertain."""
    return _at_power(_power(chosen)[0], chosen, tested)


def _power(chosen: TokenTable) -> tuple[float, float]:
    """The engine's temperature over the trainer's that leaves the least; and by the moments."""
    size = _size(chosen)
    some = chosen if len(chosen) <= 20_000 else chosen.taken(np.arange(len(chosen)) % 8 == 0)
    powers = [moment := _moment(chosen), *_TEMPERATURES]
    lefts = [float(_beyond(a, some, size).mean()) for a in powers]
    near = lefts[0] <= min(lefts) + _NEAR * float(some.gap_K.mean())
    return float(powers[0 if near else int(np.argmin(lefts))]), moment


def _at_power(a: float, chosen: TokenTable, tested: TokenTable) -> tuple[Array, str] | None:
    if abs(math.log(a)) < _ALIKE:
        return None
    left_K = _beyond(a, tested, _size(chosen, tested))
    return left_K, f"the engine's is about {a:.2f} times the trainer's"


def _moment(table: TokenTable) -> float:
    """The engine's temperature over the trainer's, T, as the moments have it; 1 if unknown.

    With x = log p_infer, the log ratio d is (T - 1)(x + the entropy of the context) to first
    order, and tokens come from the engine, so that its variance over its covariance with x is
    T - 1, however the entropies of contexts vary.
    """
    known_K = np.isfinite(table.log_ratio_K)
    x_K, d_K = table.infer_K[known_K], table.log_ratio_K[known_K]
    if len(x_K) < ENOUGH or not (covariance := float(np.cov(x_K, d_K)[0, 1])):
        return 1.0
    moment = 1 + float(d_K.var()) / covariance
    return moment if 1 / _FARTHEST < moment < _FARTHEST else 1.0


def _temperatures(chosen: TokenTable, tested: TokenTable) -> tuple[Array, str] | None:
    """One of each sequence: every other token chooses, the rest are judged."""
    first_K = np.arange(len(tested)) % 2 == 0
    half, other = tested.taken(first_K), tested.taken(~first_K)
    size, sequences = _size(chosen, tested), int(tested.sequence_K.max()) + 1
    left_AQ = np.stack(
        [np.bincount(half.sequence_K, _beyond(a, half, size), sequences) for a in _COARSE]
    )
    at_Q = left_AQ.argmin(axis=0)
    a_Q = _COARSE[at_Q]
    left_K = _beyond(a_Q[other.sequence_K], other, size)
    one = min(float(_beyond(a, other, size).mean()) for a in _COARSE)
    if not len(other) or left_K.mean() > _BETTER * one:  # one temperature does nearly as well
        return None
    low, high = np.quantile(a_Q[np.unique(tested.sequence_K)], [0.1, 0.9])
    if high < _SPREAD * low:
        return None
    text = f"it differs by sequence: {low:.2f} to {high:.2f} times the trainer's"
    return left_K, text


def _cut(_: TokenTable, tested: TokenTable) -> tuple[Array, str] | None:
    """A cut takes mass away and multiplies the rest alike: log p - log q = log(mass kept) <= 0.

    The mass kept is that of a context: where the engine is sure, no constant is the ratio.
    """
    d_K = tested.log_ratio_K
    sure_K = np.maximum(d_K[tested.infer_K > math.log(_SURE)], math.log(_LEAST_MASS))
    if len(sure_K) and gap(sure_K - np.median(sure_K)).mean() < _OF_CONSTANT * gap(sure_K).mean():
        return None
    over_K = np.expm1(np.minimum(d_K, 300.0))
    mass, below = -float(over_K.mean()), float(np.maximum(-over_K, 0.0).mean())
    if not mass > _OF_MASS * below:  # of a cut alone, all that is below 1 is the mass that it takes
        return None
    text = (
        f"the engine cannot sample {100 * mass:.2g} % of the trainer's mass and renormalises the "
        f"rest: a top-p of at most {_rest(mass)}, a top-k or a min-p"
    )
    least = math.log(min(_LEAST_MASS, (1 - mass) / _OF_KEPT))
    return gap(np.maximum(np.maximum(d_K, least - d_K), 0.0)), text


def _rest(mass: float) -> str:
    """1 - x, with enough digits to differ from 1.

    >>> _rest(0.1), _rest(0.003), _rest(3e-6)
    ('0.9', '0.997', '0.999997')
    """
    digits = max(1, 1 - math.floor(math.log10(mass)))
    return f"{1 - mass:.{digits}f}".rstrip("0")


def _penalty(chosen: TokenTable, tested: TokenTable) -> tuple[Array, str] | None:
    """Tokens that were sampled before lose mass to all others, or take it from them.

    The mean weight p/q of tokens whose set is known before they are drawn is P(set)/Q(set).
    """
    again_K = chosen.repeated_K
    if min(again_K.sum(), (~again_K).sum()) < ENOUGH / 4:
        return None
    (again, again_z), (other, other_z) = (_mean_weight(chosen, of) for of in (again_K, ~again_K))
    sign = 1.0 if again > 1 else -1.0
    if sign * again_z < _PENALTY_Z[0] or -sign * other_z < _PENALTY_Z[1]:
        return None
    d_K, least = sign * tested.log_ratio_K, math.log(_LEAST_MASS)
    if (d_K[tested.repeated_K] > 0).sum() < _MOST_REPEATED * tested.repeated_K.sum():
        return None
    left_K = np.where(tested.repeated_K, 0.0, gap(np.maximum(np.maximum(d_K, least - d_K), 0.0)))
    way = "less" if sign > 0 else "more"
    text = (
        f"the engine draws tokens that a response repeats {way} often than the trainer would "
        f"(mean weight {again:.3f}), and all others {'more' if sign > 0 else 'less'} ({other:.3f})"
    )
    return left_K, text


def _mean_weight(table: TokenTable, of_K: Array) -> tuple[float, float]:
    """Mean of p_train / p_infer, cut at 5, and its distance from 1 in standard errors."""
    weight_K = np.exp(np.minimum(table.log_ratio_K[of_K], math.log(5.0)))
    error = float(weight_K.std()) / math.sqrt(len(weight_K))
    return float(weight_K.mean()), float(weight_K.mean() - 1) / max(error, 1e-9)


# transforms with many parameters


def _means(code_K: Array, value_K: Array, size: int) -> Array:
    n = np.bincount(code_K, minlength=size)
    return np.bincount(code_K, value_K, size) / (n + _PRIOR)


def _of_logp(chosen: TokenTable, tested: TokenTable) -> tuple[Array, str] | None:
    edges = np.unique(np.quantile(chosen.infer_K, np.arange(1, _BINS) / _BINS))
    ratio_K = np.clip(chosen.log_ratio_K, -5.0, 5.0)
    mean_B = _means(np.searchsorted(edges, chosen.infer_K), ratio_K, _BINS)
    left_K = gap(tested.log_ratio_K - mean_B[np.searchsorted(edges, tested.infer_K)])
    return left_K, "the log ratio is a function of the logprob"


def _of_ids(chosen: TokenTable, tested: TokenTable) -> tuple[Array, str] | None:
    if (chosen.token_K < 0).all():
        return None
    size = _size(chosen, tested)
    ratio_K = np.clip(chosen.log_ratio_K, -5.0, 5.0)
    mean_V = _means(np.maximum(chosen.token_K, 0), ratio_K, size)
    left_K = gap(tested.log_ratio_K - mean_V[np.maximum(tested.token_K, 0)])
    return left_K, "each token id has its own log ratio"


def _some_ids(chosen: TokenTable, tested: TokenTable) -> tuple[Array, str] | None:
    """Some token ids with most of the gap, and few of the tokens.

    Where these have their mass moved one way, as a bias on them does, the others give or get it.
    """
    if (chosen.token_K < 0).all():
        return None
    size, whole = _size(chosen, tested), float(chosen.gap_K.mean())
    mean_V = _means(np.maximum(chosen.token_K, 0), chosen.gap_K - whole, size) + whole
    odd_K = (mean_V > _FAR * whole)[np.maximum(tested.token_K, 0)]
    if not 0 < odd_K.mean() <= _SOME_IDS:
        return None
    ids = np.unique(tested.token_K[odd_K])
    text = (
        f"{len(ids)} token ids, such as {ids[0]}, have it, {100 * odd_K.mean():.2g} % of the tokens"
    )
    d_K, way = tested.log_ratio_K, float(np.sign(tested.log_ratio_K[odd_K]).mean())
    others_K = 2 * gap(np.maximum(math.copysign(1.0, way) * d_K, 0.0))  # noise: half each way
    return np.where(odd_K, 0.0, others_K if abs(way) > _ONE_WAY else tested.gap_K), text


def _few(chosen: TokenTable, tested: TokenTable) -> tuple[Array, str] | None:
    """Few tokens anywhere with most of the gap, beyond what the body of the others reaches."""
    far = _FAR * float(np.quantile(chosen.gap_K, 1 - _RARE))
    few_K = tested.gap_K > far
    share = float(few_K.mean())
    near = float((tested.gap_K > far / 2).mean()) - share
    if not 0 < share <= _RARE or near > share:  # a tail, and no second population
        return None
    text = f"{100 * share:.2g} % of the tokens, in all sequences and places, have it"
    return np.where(few_K, 0.0, tested.gap_K), text


EXACT: Mapping[str, Fit] = {
    "shift": _shift,
    "unit": _unit,
    "rounding": _rounding,
    "clamp": _clamp,
    "missing_data": _constant,
    "other_tokens": _other_tokens,
}
SETTINGS: Mapping[str, Fit] = {
    "top_p": _cut,
    "temperature": _temperature,
    "penalty": _penalty,
}
_BY_SEQUENCE = "temperature by sequence"
# of an engine that is known to have one of them
RAW_SETTINGS: Mapping[str, Fit] = {
    "top_p": _cut,
    "temperature": _any_temperature,
    _BY_SEQUENCE: _temperatures,
}
_POSSIBLE = (*SETTINGS.values(), *RAW_SETTINGS.values())
TRANSFORMS: Mapping[str, Fit] = EXACT | SETTINGS | {_BY_SEQUENCE: _temperatures}
FLEXIBLE: Mapping[str, Fit] = {
    "softcap": _of_logp,
    "head": _of_ids,
    "vocabulary": _some_ids,
    "routing": _few,
}


# The shape of a gap along an ordered field: the step, a position, an age.


_MOST_BINS = 12
_FEW = 30  # fewest tokens of a bin
_CLEAR = 6.0  # of the squared errors, between a jump and a ramp
_LEVEL, _LEVEL_ERRORS = 0.3, 3.0  # of the height of a shape, and errors: bins that are far from it


@dataclass(frozen=True)
class Shape:
    """How the rate of a gap runs along a field.

    A rate is the gap of some tokens over that of all tokens of about the same logprob.

    Args:
        kind: flat, a jump at one value, or a ramp; "unclear" where both fit alike, or a jump fits
            better and its sides are not level.
        above: whether the larger rate comes after a jump.
        times: the larger rate of the shape over the smaller.
        start: rate at the beginning over that at the end.
        z: of the ramp, in standard errors; steady: whether no rate is far below one before it.
    """

    kind: Literal["flat", "jump", "ramp", "unclear"]
    above: bool
    times: float
    start: float
    z: float
    steady: bool


def shape_of(table: TokenTable, column_K: Array, of_K: Array | None = None) -> Shape | None:
    """The shape along a column of numbers; None with fewer than three values.

    Args:
        of_K: mask of the tokens that are examined.
    """
    known_K = ~np.isnan(column_K)
    if of_K is not None:
        known_K &= of_K
    base_K = table.expected(known_K) if known_K.any() else table.gap_K
    bins = [*_binned(table, column_K, known_K, base_K)]
    if len(bins) < 3:
        return None
    at, rate, error = (np.array(column) for column in zip(*bins, strict=True))
    weight = 1 / np.maximum(error, 1e-3 * max(rate.max(), 1e-9)) ** 2

    def rest(fitted: Array) -> float:
        return float((weight * (rate - fitted) ** 2).sum())

    mean = float((weight * rate).sum() / weight.sum())
    flat = rest(np.full(len(rate), mean))
    center = float((weight * at).sum() / weight.sum())
    spread = float((weight * (at - center) ** 2).sum())
    slope = float((weight * (at - center) * rate).sum() / spread) if spread else 0.0
    line = mean + slope * (at - center)
    ramp, z = rest(line), slope * math.sqrt(spread)
    levels = min(_jumps(rate, weight), key=rest)
    jump = rest(levels)
    uneven = _apart(rate, levels, error)
    if len(np.unique(column_K[known_K])) > len(rate):  # the edge may be within a bin
        beside = np.flatnonzero(np.diff(levels))[:, None] + [0, 1]
        uneven[beside] &= bool(uneven[beside].all())
    ends = max(float(line[0]), 1e-9), max(float(line[-1]), 1e-9)
    stepped = float(levels[-1]), float(levels[0])
    kind: Literal["flat", "jump", "ramp", "unclear"]
    if flat - min(ramp, jump) < 9.0:
        kind = "flat"
    elif abs(ramp - jump) < _CLEAR or (jump < ramp and uneven.any()):
        kind = "unclear"
    else:
        kind = "ramp" if ramp < jump else "jump"
    pair = stepped if kind == "jump" else (ends[1], ends[0])
    times = max(pair) / max(min(pair), 1e-3 * max(pair))
    steady = not _apart(rate, np.maximum.accumulate(rate), error).any()
    return Shape(kind, stepped[0] > stepped[1], times, ends[0] / ends[1], z, steady)


def _apart(rate: Array, fitted: Array, error: Array) -> Array:
    """The bins that are far from a fitted shape, beside its height and beside their errors."""
    least = np.maximum(_LEVEL * float(np.ptp(fitted)), _LEVEL_ERRORS * error)
    return np.asarray(np.abs(rate - fitted) > least)


def _jumps(rate: Array, weight: Array) -> Iterator[Array]:
    """Two levels, [B], parted at each bin."""
    for edge in range(1, len(rate)):
        parts = slice(None, edge), slice(edge, None)
        low, high = (float((weight[p] * rate[p]).sum() / weight[p].sum()) for p in parts)
        yield np.where(np.arange(len(rate)) < edge, low, high)


def _binned(
    table: TokenTable, column_K: Array, of_K: Array, base_K: Array
) -> Iterator[tuple[float, float, float]]:
    """Value, rate and its standard error over sequences, of each bin."""
    value = np.unique(column_K[of_K])
    if len(value) <= _MOST_BINS:
        edges = value[1:]
    else:
        edges = np.unique(np.quantile(column_K[of_K], np.arange(1, _MOST_BINS) / _MOST_BINS))
    bin_K = np.searchsorted(edges, column_K, side="right")
    for b in range(len(edges) + 1):
        own_K = of_K & (bin_K == b)
        if own_K.sum() < _FEW:
            continue
        rate, error = rate_of(table, base_K, own_K)
        yield float(column_K[own_K].mean() if len(value) > _MOST_BINS else value[b]), rate, error


def rate_of(table: TokenTable, base_K: Array, of_K: Array) -> tuple[float, float]:
    """The gap of some tokens over the expected one, and its standard error over sequences."""
    _, code_M = np.unique(table.sequence_K[of_K], return_inverse=True)
    x_Q = np.bincount(code_M, table.gap_K[of_K])
    b_Q = np.bincount(code_M, base_K[of_K])
    whole = max(float(b_Q.sum()), 1e-300)
    rate = float(x_Q.sum()) / whole
    few = len(x_Q) / max(len(x_Q) - 1, 1)
    error = math.sqrt(few * float(((x_Q - rate * b_Q) ** 2).sum())) / whole
    return rate, error if len(x_Q) > 1 else rate
