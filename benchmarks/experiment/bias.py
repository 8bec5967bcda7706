# The true bias on the page: against its bound, as a share, and in its order.

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from benchmarks.experiment.alarms import cases_of, chosen
from benchmarks.experiment.pictures import NOTHING, WEIGHTINGS, Point, called
from benchmarks.experiment.record import Run
from benchmarks.experiment.seeds import Spread
from benchmarks.experiment.tables import markdown


def bound_table(points: Sequence[Point]) -> str:
    """How near the bound the true bias comes, by weighting."""
    rows = []
    for weighting, name in WEIGHTINGS.items():
        found = [p for p in points if p.weighting == weighting]
        shares = [p.bias / p.bound for p in found if p.bound > NOTHING]
        above, none = sum(p.bias > p.bound for p in found), len(found) - len(shares)
        ends = (f"{median(shares):.2f}", f"{max(shares):.2f}") if shares else ("-", "-")
        rows.append((name, f"{len(found)}", f"{above}", f"{none}", *ends))
    head = (
        "weighting",
        "checkpoints",
        "above the bound",
        "both 0",
        "median bias / bound",
        "largest bias / bound",
    )
    return markdown(head, rows)


def crossed(runs: Sequence[Run], points: Sequence[Point]) -> str:
    """Whether a bound was crossed: the one by logits, and the one with a measured G."""
    above = sum(p.bias > p.bound for p in points)
    found = "No bias is above its bound." if not above else f"**{above} are above their bound.**"
    pairs = [
        (at["parameter_bias"][name][0], at["parameter_bound"][name])
        for run in runs
        if not run.same_as
        for at in run.checkpoints
        for name in WEIGHTINGS
        if at["parameter_bound"][name] > NOTHING
    ]
    over = sum(bias > bound for bias, bound in pairs)
    largest = max(bias / bound for bias, bound in pairs)
    return (
        f"{found} For the gradient by all parameters, no G is known in advance. With the largest "
        f"score norm of a dozen sampled tokens in its place, {over} of {len(pairs)} biases are "
        f"above A × G × D, and the largest ratio is {largest:.2f}: a measured G gives an estimate, "
        "not a bound."
    )


def bias_table(runs: Sequence[Run]) -> str:
    """Bias over signal at the last checkpoint of the uncorrected runs, by weighting."""
    rows = []
    for case in cases_of(runs):
        found = [run.checkpoints[-1] for run in chosen(runs, case, "none") if run.checkpoints]
        if not found:
            continue
        shares = (
            Spread(tuple(at["logit_bias"][name] / at["signal"] for at in found))
            for name in WEIGHTINGS
        )
        steps = sorted({at["step"] for at in found})
        rows.append((called(case), " ".join(map(str, steps)), *(x.told() for x in shares)))
    return markdown(("case", "updates", *WEIGHTINGS.values()), rows)


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Spearman's, ties at their mean rank; None where one of them never changes.

    >>> rank_correlation([1.0, 2.0, 3.0], [1.0, 4.0, 9.0])
    1.0
    """
    if len(set(xs)) < 2 or len(set(ys)) < 2:
        return None
    ranks = [_ranks(np.asarray(values)) for values in (xs, ys)]
    return round(float(np.corrcoef(*ranks)[0, 1]), 12)


def _ranks(values_N: np.ndarray) -> np.ndarray:
    below_N = (values_N[:, None] > values_N[None, :]).sum(axis=1)
    equal_N = (values_N[:, None] == values_N[None, :]).sum(axis=1)
    return below_N + (equal_N - 1) / 2


def order_table(points: Sequence[Point]) -> str:
    """How well each statistic ranks the checkpoints by their true bias."""
    plain = [p for p in points if p.weighting == "none" and p.arm == "none" and p.seen]
    bias = [p.bias for p in plain]
    names = (
        ("`gap_none`, mean D of the sampled tokens", "gap_none"),
        ("mean |d|", "abs_d_mean"),
        ("mean k3", "k3"),
        ("mean exp |d|", "tme"),
        ("mean |p - q|", "probs_diff_mean"),
        ("mean -d", "k1"),
        ("largest |d|", "abs_d_max"),
        ("ESS of token weights truncated at 2, sign reversed", "ess"),
    )
    rows = []
    for shown, name in names:
        if all(name in p.seen for p in plain):
            sign = -1 if name == "ess" else 1
            found = rank_correlation([sign * p.seen[name] for p in plain], bias)
            rows.append((shown, "-" if found is None else f"{found:.2f}"))
    return markdown(("statistic of the step", "rank correlation with the true bias"), rows)


def unseen(runs: Sequence[Run]) -> str:
    """Mass of the responses that were not enumerated, over both kernels and all checkpoints."""
    rest = [
        at[name]
        for run in runs
        if not run.same_as
        for at in run.checkpoints
        for name in ("rest_p", "rest_q")
    ]
    return f"{100 * median(rest):.1f} % (median) and at most {100 * max(rest):.0f} %"
