# Drift localisation: the bin edge of a token profile that separates tokens best.
#
# Only fields known before sampling are searched: on sampled outcomes the metric is biased, for
# example zero on rare tokens that lose mass.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from servanda.judgement.token_profile import EDGES, Portrait, Sums

FIELDS = ("prompt_tokens", "position", "entropy_nats")
_RATIO = 2.0  # a smaller ratio is not reported
_LEAST = 50  # fewest tokens on either side
# Threshold of the deviance: independent tokens without separation exceed half of it at any of the
# ~40 edges with probability below 0.001; doubled because tokens of a prompt are dependent.
_DEVIANCE = 40.0
_ALIKE = 4.0  # noise with a ratio up to this factor smaller is separated alike


@dataclass(frozen=True)
class Contrast:
    """Tokens with more drift than the others, separated at one edge of one field.

    Args:
        above: whether the tokens at and above the edge drift.
        inside, outside: sums over the drifting tokens, and over the others.
        deviance: 2 × log likelihood of two means against one, of (1 - w)^+.
    """

    field: str
    edge: float
    above: bool
    inside: Sums
    outside: Sums
    deviance: float

    @property
    def ratio(self) -> float:
        """Mean TV inside over mean TV outside; inf if that is 0."""
        return _mean(self.inside) / _mean(self.outside) if self.outside.tv else math.inf

    @property
    def words(self) -> str:
        """The drifting tokens as text, such as "prompts of about 256 tokens and more"."""
        more, less = _WORDS[self.field]
        return (more if self.above else less).format(self.edge)


_WORDS: Mapping[str, tuple[str, str]] = {
    "prompt_tokens": (
        "prompts of about {:g} tokens and more",
        "prompts of fewer than about {:g} tokens",
    ),
    "position": ("tokens from position {:g} on", "tokens before position {:g}"),
    "entropy_nats": (
        "tokens where infer is unsure (entropy ≥ {:g} nats)",
        "tokens where infer is sure (entropy < {:g} nats)",
    ),
}


def contrast(portrait: Portrait) -> Contrast | None:
    """The edge with the largest deviance, or None if no edge separates tokens.

    The sum of (1 - w)^+ over n tokens is compared as a count would be: each term lies in
    [0, 1], so its variance is at most its mean, and the deviance of a Poisson count never
    overstates that of independent tokens.

    Args:
        portrait: token profile of the workload or of the golden texts.

    Source:
        P. McCullagh and J. Nelder, Generalized Linear Models, 1989, §6.2 (the deviance).
    """
    contrasts = [c for name in FIELDS for c in _of_field(name, portrait.by.get(name, ()))]
    contrasts = [c for c in contrasts if c.ratio >= _RATIO and c.deviance >= _DEVIANCE]
    # edges without tokens between them are equivalent: take the one nearest to the drifting tokens
    return max(contrasts, key=lambda c: (c.deviance, c.edge if c.above else -c.edge), default=None)


def parted(portrait: Portrait, like: Contrast) -> float | None:
    """Mean TV inside over mean TV outside of other tokens, separated at a contrast's edge.

    None if either side has no token, or the outside has no drift.
    """
    bins = portrait.by.get(like.field, ())
    at = EDGES[like.field].index(like.edge) + 1
    below, above = sum(bins[:at], Sums()), sum(bins[at:], Sums())
    inside, outside = (above, below) if like.above else (below, above)
    return _mean(inside) / _mean(outside) if inside.n and outside.tv else None


def explains(noise: float, sharpest: Contrast) -> bool:
    """Whether noise with this ratio (see `parted`) explains the drift."""
    return noise >= sharpest.ratio / _ALIKE


def _of_field(name: str, bins: Sequence[Sums]) -> list[Contrast]:
    contrasts = []
    for i in range(1, len(bins)):
        below, above = sum(bins[:i], Sums()), sum(bins[i:], Sums())
        if min(below.n, above.n) < _LEAST or not below.tv + above.tv:
            continue
        up = _mean(above) > _mean(below)
        inside, outside = (above, below) if up else (below, above)
        mean = (below.tv + above.tv) / (below.n + above.n)
        logs = (s.tv * math.log(_mean(s) / mean) for s in (below, above) if s.tv)
        deviance = 2 * math.fsum(logs)
        contrasts.append(Contrast(name, EDGES[name][i - 1], up, inside, outside, deviance))
    return contrasts


def _mean(sums: Sums) -> float:
    return sums.tv / sums.n
