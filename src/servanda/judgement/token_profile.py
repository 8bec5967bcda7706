# The token profile (portrait) of a run: statistics of its tokens, independent of clauses.
#
# Sums over fixed bins, so that profiles of rounds are additive and of constant size. Descriptive
# only, without guarantees.

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from servanda.judgement.slices.atoms import SliceCodes
from servanda.theory.divergence.base import sampled
from servanda.traces.trace import Trace, TracePair

Array = NDArray[Any]

# Right ends of bins are open: bin i holds edges[i-1] <= x < edges[i].
EDGES: Mapping[str, tuple[float, ...]] = {
    "position": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    "prompt_tokens": (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    "entropy_nats": (0.01, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    "probability": (1e-4, 1e-3, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99),
}
# of |log ratio|, nats, eight per decade
RATIO_EDGES: tuple[float, ...] = tuple(float(e) for e in np.geomspace(1e-6, 10.0, 57))
# of |log ratio|, nats: quantiles have a relative error of FINE / 2, from LEAST on
LEAST, FINE = 1e-3, 0.02
# of -logp on either side, nats: bin width of `joint`, and number of bins
JOINT, JOINT_BINS = 0.25, 64
KEPT = 12  # worst tokens kept
CONTEXT = 16  # token ids kept before a worst token


@dataclass(frozen=True)
class Sums:
    """Sums over tokens with usable logprobs on both sides; means are properties.

    Args:
        n: tokens; tv: of (1 - w)^+; abs_log_ratio, k1, k3: nats; exp_abs: of exp |log ratio|;
        prob_diff: of |p_train - p_infer|; flips: different top-1 token, over `flips_n` tokens;
        nll_train, nll_infer: of -logp, nats.
    """

    n: int = 0
    tv: float = 0.0
    abs_log_ratio: float = 0.0
    exp_abs: float = 0.0
    k1: float = 0.0
    k3: float = 0.0
    prob_diff: float = 0.0
    flips: float = 0.0
    flips_n: int = 0
    nll_train: float = 0.0
    nll_infer: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        mine, theirs = vars(self), vars(other)
        return Sums(**{name: mine[name] + theirs[name] for name in mine})

    def mean(self, name: str) -> float | None:
        """Mean of one of the sums over its tokens; None without tokens."""
        n = self.flips_n if name == "flips" else self.n
        return getattr(self, name) / n if n else None


@dataclass(frozen=True)
class Worst:
    """One of the tokens with the largest difference.

    Args:
        row: line of the corpus; context: ids before the token, nearest last; with texts if text is
            allowed.
    """

    abs_log_ratio: float
    sequence: int
    row: int
    position: int
    prompt_tokens: int
    token: int
    p_train: float
    p_infer: float
    entropy_nats: float | None
    rank: float | None
    context: tuple[int, ...] = ()
    text: str | None = None
    context_text: str | None = None


@dataclass(frozen=True)
class Portrait:
    """The token profile of a run: sums over all tokens, by bins of each field of EDGES, by slice.

    Args:
        ratios: counts of |log ratio| in the bins of RATIO_EDGES, first for tokens with less mass
            under train than under infer, then for the others.
        fine: counts of |log ratio| by exponent k of the bin start LEAST * (1 + FINE)^k.
        joint: counts of tokens by "i,j", the bins of JOINT nats that hold -logp of infer, of train.
    """

    total: Sums = Sums()
    by: Mapping[str, tuple[Sums, ...]] = field(default_factory=dict)
    slices: Mapping[str, Sums] = field(default_factory=dict)
    ratios: tuple[tuple[int, ...], tuple[int, ...]] = (
        (0,) * (len(RATIO_EDGES) + 1),
        (0,) * (len(RATIO_EDGES) + 1),
    )
    worst: tuple[Worst, ...] = ()
    fine: Mapping[str, int] = field(default_factory=dict)
    joint: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Portrait) -> Portrait:
        below, above = (
            tuple(a + b for a, b in zip(mine, theirs, strict=True))
            for mine, theirs in zip(self.ratios, other.ratios, strict=True)
        )
        return Portrait(
            self.total + other.total,
            {name: _added(self.by.get(name), other.by.get(name)) for name in EDGES},
            {
                name: self.slices.get(name, Sums()) + other.slices.get(name, Sums())
                for name in {**self.slices, **other.slices}
            },
            (below, above),
            _largest([*self.worst, *other.worst]),
            _counted(self.fine, other.fine),
            _counted(self.joint, other.joint),
        )

    def quantile(self, share: float) -> tuple[float, float] | None:
        """Lower and upper bound, nats, of the `share` quantile of |log ratio|.

        Their relative distance is FINE; below LEAST, and without fine counts, that of RATIO_EDGES.
        """
        counts = np.add(*map(np.array, self.ratios))
        total = int(counts.sum())
        if not total:
            return None
        want = max(math.ceil(share * total), 1)
        fine = sorted((int(key), n) for key, n in self.fine.items())
        below = total - sum(n for _, n in fine)
        if fine and want > below:
            at = int(np.searchsorted(np.cumsum([n for _, n in fine]), want - below))
            low = LEAST * (1 + FINE) ** fine[at][0]
            return low, low * (1 + FINE)
        at = int(np.searchsorted(counts.cumsum(), want))
        edges = (0.0, *RATIO_EDGES, math.inf)
        return edges[at], edges[at + 1]


def _counted(mine: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {key: mine.get(key, 0) + other.get(key, 0) for key in {**mine, **other}}


def _added(mine: Sequence[Sums] | None, theirs: Sequence[Sums] | None) -> tuple[Sums, ...]:
    if not mine or not theirs:
        return tuple(mine or theirs or ())
    return tuple(a + b for a, b in zip(mine, theirs, strict=True))


def _largest(worst: Sequence[Worst]) -> tuple[Worst, ...]:
    # ties by sequence, so that the order of adding rounds does not matter
    key = lambda w: (w.abs_log_ratio, -w.sequence, -w.position)  # noqa: E731
    return tuple(heapq.nlargest(KEPT, worst, key=key))


_Key = TypeVar("_Key")


def added(mine: Mapping[_Key, Portrait], theirs: Mapping[_Key, Portrait]) -> dict[_Key, Portrait]:
    """Token profiles of disjoint rounds, added by key."""
    both = {key: mine[key] + theirs[key] for key in mine.keys() & theirs.keys()}
    return {**mine, **theirs, **both}


def portray(pair: TracePair, slices: SliceCodes, rows: Sequence[int]) -> Portrait:
    """The token profile of one round.

    Args:
        slices: of its tokens.
        rows: line of the corpus of each sequence.
    """
    usable_N = pair.usable_N
    infer, train = pair.infer.columns, pair.train.columns
    train_U, infer_U = train["logp"][usable_N], infer["logp"][usable_N]
    p_infer_U = np.exp(infer_U)
    logp = {"logp_train": train_U, "logp_infer": infer_U}
    values = {
        "tv": sampled("tv", logp),
        "abs_log_ratio": sampled("abs_log_ratio_nats", logp),
        "k3": sampled("k3_nats", logp),
        "nll_train": -train_U,
        "nll_infer": -infer_U,
    }
    values["k1"] = values["nll_train"] - values["nll_infer"]
    with np.errstate(over="ignore"):
        values["exp_abs"] = np.exp(values["abs_log_ratio"])
    values["prob_diff"] = np.abs(np.exp(train_U) - p_infer_U)
    if "top1" in train and "top1" in infer:
        top1 = {"top1_train": train["top1"][usable_N], "top1_infer": infer["top1"][usable_N]}
        values["flips"] = sampled("top1_flip", top1)
    total, by = _by_fields(values, _bins(pair, usable_N, p_infer_U))
    code_U = slices.code_N[usable_N]
    of_codes = _sums(values, code_U, slices.inside_CA.shape[1])
    inside = (
        {name: sums_A[inside_A].sum() for name, sums_A in of_codes.items()}
        for inside_A in slices.inside_CA
    )
    size = len(RATIO_EDGES) + 1
    bin_N = np.searchsorted(RATIO_EDGES, values["abs_log_ratio"], side="right")
    bin_N += np.where(values["k1"] > 0, 0, size)
    ratios = np.bincount(bin_N, minlength=2 * size).tolist()
    return Portrait(
        total=total,
        by=by,
        slices=dict(zip(slices.names, map(_as_sums, inside), strict=True)),
        ratios=(tuple(ratios[:size]), tuple(ratios[size:])),
        worst=_worst(pair, usable_N, values["abs_log_ratio"], rows),
        fine=_fine(values["abs_log_ratio"]),
        joint=_joint(values["nll_infer"], values["nll_train"]),
    )


def _sums(values: Mapping[str, Array], code_U: Array, size: int) -> dict[str, Array]:
    """The sums of the tokens with each of `size` codes, by name of the sum, [size]."""
    sums = {"n": np.bincount(code_U, minlength=size)}
    for name, values_U in values.items():
        if name == "flips":  # NaN where a best token was not recorded
            known_U = ~np.isnan(values_U)
            sums[name] = np.bincount(code_U[known_U], values_U[known_U], minlength=size)
            sums["flips_n"] = np.bincount(code_U[known_U], minlength=size)
        else:
            sums[name] = np.bincount(code_U, values_U, minlength=size)
    return sums


def _as_sums(sums: Mapping[str, Any]) -> Sums:
    counts = {name: int(sums[name]) for name in ("n", "flips_n") if name in sums}
    return Sums(**({name: float(value) for name, value in sums.items()} | counts))  # type: ignore[arg-type]


def _by_fields(
    values: Mapping[str, Array], bins: Mapping[str, Array]
) -> tuple[Sums, dict[str, tuple[Sums, ...]]]:
    """The sums of all tokens, and by the bins of each field: each token is added up once."""
    shape = tuple(len(EDGES[name]) + 1 for name in bins)
    code_U = np.ravel_multi_index(tuple(bins.values()), shape)
    sums = _sums(values, code_U, math.prod(shape))
    met_C = np.flatnonzero(sums["n"])
    cells = {name: sums_C[met_C] for name, sums_C in sums.items()}
    by = {}
    for name, bin_C, size in zip(bins, np.unravel_index(met_C, shape), shape, strict=True):
        of = [np.bincount(bin_C, cells_C, minlength=size).tolist() for cells_C in cells.values()]
        rows = zip(*of, strict=True)
        by[name] = tuple(_as_sums(dict(zip(cells, row, strict=True))) for row in rows)
    return _as_sums({name: cells_C.sum() for name, cells_C in cells.items()}), by


def _bins(pair: TracePair, usable_N: Array, p_infer_U: Array) -> dict[str, Array]:
    """The bin of each usable token, by field."""
    trace = pair.infer
    prompt_S = np.searchsorted(EDGES["prompt_tokens"], trace.prompt_tokens_S, side="right")
    # positions are whole numbers, so their bins are looked up
    longest = np.arange(int(trace.length_S.max(initial=0)) + 1)
    of_position = np.searchsorted(EDGES["position"], longest, side="right")
    bins = {
        "position": of_position.take(pair.position_N[usable_N]),
        "prompt_tokens": np.repeat(prompt_S, trace.length_S)[usable_N],
        "probability": np.searchsorted(EDGES["probability"], p_infer_U, side="right"),
    }
    if "entropy_nats" in trace.columns:
        entropy_U = trace.columns["entropy_nats"][usable_N]
        bins["entropy_nats"] = np.searchsorted(EDGES["entropy_nats"], entropy_U, side="right")
    return bins


def _fine(abs_N: Array) -> dict[str, int]:
    large_K = abs_N[(abs_N >= LEAST) & np.isfinite(abs_N)]
    power_K = (np.log(large_K / LEAST) / math.log1p(FINE)).astype(np.int64)
    # a value at an edge may be rounded into the lower bin
    starts = LEAST * (1 + FINE) ** np.arange(int(power_K.max(initial=0)) + 2)
    power_K += large_K >= starts[power_K + 1]
    power_K -= large_K < starts[power_K]
    n = np.bincount(power_K)
    return {str(power): int(n[power]) for power in np.flatnonzero(n).tolist()}


def _joint(infer_N: Array, train_N: Array) -> dict[str, int]:
    """Counts by bins of both sides' -logp; the last bin has all larger values and infinity."""
    top = JOINT_BINS - 1
    i_N, j_N = (np.clip(x_N / JOINT, 0, top).astype(np.int64) for x_N in (infer_N, train_N))
    n = np.bincount(i_N * JOINT_BINS + j_N)
    return {f"{c // JOINT_BINS},{c % JOINT_BINS}": int(n[c]) for c in np.flatnonzero(n).tolist()}


def _worst(
    pair: TracePair,
    usable_N: Array,
    abs_U: Array,
    rows: Sequence[int],
) -> tuple[Worst, ...]:
    trace = pair.infer
    at_U = np.flatnonzero(usable_N)
    candidates = np.arange(len(abs_U))
    if len(abs_U) > KEPT:
        least = np.partition(abs_U, -KEPT)[-KEPT]
        candidates = np.flatnonzero(abs_U >= least)
    largest = candidates[np.argsort(-abs_U[candidates], kind="stable")[:KEPT]]
    starts_S = np.cumsum(trace.length_S) - trace.length_S
    tokens = []
    for u in largest.tolist():
        at = int(at_U[u])
        # the last sequence that starts here or before; earlier ones may be empty
        s = int(np.searchsorted(starts_S, at, side="right")) - 1
        drawn = trace.token_N[starts_S[s] : at].tolist()
        tokens.append(
            Worst(
                abs_log_ratio=float(abs_U[u]),
                sequence=int(trace.sequence_S[s]),
                row=int(rows[s]),
                position=at - int(starts_S[s]),
                prompt_tokens=int(trace.prompt_tokens_S[s]),
                token=int(trace.token_N[at]),
                p_train=math.exp(pair.train.columns["logp"][at]),
                p_infer=math.exp(trace.columns["logp"][at]),
                entropy_nats=_recorded(trace, "entropy_nats", at),
                rank=_recorded(trace, "rank", at),
                context=tuple(drawn[-CONTEXT:]),
            )
        )
    return _largest(tokens)


def _recorded(trace: Trace, name: str, at: int) -> float | None:
    return float(trace.columns[name][at]) if name in trace.columns else None


# Thresholds of other projects: the usual metrics of the field on the same tokens.
#
# Names, limits and sources are the projects' own; the glossary maps the names.


@dataclass(frozen=True)
class Gate:
    """One threshold of another project, with its result.

    Args:
        name: with limit and source; passes: None without a number.
    """

    name: str
    value: float | None
    text: str
    passes: bool | None


# (name, source, sum of the portrait, limit)
_MEANS = (
    ("mean KL (k3)", "prime-rl", "k3", 0.015),
    ("mean |Δ logp|", "slime", "abs_log_ratio", 0.1),
    ("token_mult_prob_error", "NeMo-RL", "exp_abs", 1.05),
    ("mean |Δ probability|", "verl", "prob_diff", 0.01),
)
_P99 = 0.2
_FLIPS = 0.02
_PERPLEXITY = 0.01


def gates(portraits: Mapping[str, Portrait]) -> tuple[Gate, ...]:
    """Thresholds of other projects on portraits: "infer", and "golden" for perplexity."""
    infer, golden = portraits.get("infer", Portrait()), portraits.get("golden", Portrait())
    # infer's own samples favour infer; used only without fixed texts
    fixed = golden.total.n > 0
    name = "perplexity, ±1 %" if fixed else "perplexity of the drawn tokens, ±1 %"
    thresholds = [_perplexity(name, golden if fixed else infer)]
    for name, source, column, limit in _MEANS:
        value = infer.total.mean(column)
        text = "" if value is None else f"{value:.4g}"
        thresholds.append(_at_most(f"{name} ≤ {limit:g} ({source})", value, text, limit))
    ends = infer.quantile(0.99)
    p99 = quantile_text(ends) if ends is not None else (None, "")
    thresholds.append(_at_most(f"p99 |Δ logp| ≤ {_P99:g}", *p99, _P99))
    flips = infer.total.mean("flips")
    agreement = None if flips is None else 1 - flips
    text = "not measured" if agreement is None else f"{100 * agreement:.2f} %"
    passes = None if flips is None else flips <= _FLIPS
    return (*thresholds, Gate("top-1 agreement ≥ 98 %", agreement, text, passes))


def _perplexity(name: str, portrait: Portrait) -> Gate:
    train, infer = portrait.total.mean("nll_train"), portrait.total.mean("nll_infer")
    if train is None or infer is None or not math.isfinite(train - infer):
        return Gate(name, None, "not measured", None)
    change = math.expm1(infer - train)
    change_text = f"{100 * change:+.2f} %" if change <= 1 else f"{1 + change:.3g} times"
    text = f"{math.exp(train):.4g} → {math.exp(infer):.4g} ({change_text})"
    return Gate(name, change, text, abs(change) <= _PERPLEXITY)


def quantile_text(ends: tuple[float, float]) -> tuple[float, str]:
    """A quantile between two bounds: its midpoint and its text.

    >>> quantile_text((0.1, 0.102)), quantile_text((0.0, 1e-6)), quantile_text((10.0, math.inf))
    ((0.10..., '0.101 ±1 %'), (1e-06, '≤ 1e-06'), (inf, '> 10'))
    """
    low, high = ends
    if math.isinf(high):
        return high, f"> {low:g}"
    if not low or high / low > 1.1:
        return high, f"≤ {high:.3g}"
    middle = math.sqrt(low * high)
    return middle, f"{middle:.3g} ±{100 * (high / middle - 1):.0f} %"


def _at_most(name: str, value: float | None, text: str, limit: float) -> Gate:
    passes = None if value is None else value <= limit
    return Gate(name, value, text or "not measured", passes)
