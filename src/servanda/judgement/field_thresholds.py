# Thresholds of other projects: the usual metrics of the field on the same tokens.
#
# Names, limits and sources are the projects' own; the glossary maps the names.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from servanda.judgement.token_profile import Portrait


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
