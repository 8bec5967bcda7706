# Where the drift sits: the one edge of a portrait's bins that parts tokens best.
#
# Only fields that are known before a token is drawn are searched.  What was sampled is an
# outcome: a kernel that moves mass away from rare tokens reads zero on them.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from servanda.judgement.token_profile import EDGES, Portrait, Sums

FIELDS = ("prompt_tokens", "position", "entropy_nats")
_RATIO = 2.0  # a smaller step is not worth a sentence
_LEAST = 50  # tokens on either side
# Of the deviance, which would exceed this with odds below 1 : 1000 at any of the ~40 edges if
# tokens were independent and nothing separated them.  Tokens of a prompt are not: so twice.
_DEVIANCE = 40.0
_ALIKE = 4.0  # noise that is parted by this much less is parted alike


@dataclass(frozen=True)
class Contrast:
    """Tokens with more drift against all others, parted at one edge of one field.

    Args:
        above: whether it is the tokens at and above the edge that drift.
        inside, outside: sums over the tokens that drift, and over the rest.
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
        """Mean TV inside over mean TV outside; inf where there is none outside."""
        return _mean(self.inside) / _mean(self.outside) if self.outside.tv else math.inf

    @property
    def words(self) -> str:
        """Which tokens drift, such as "prompts of 256 tokens and more"."""
        more, less = _WORDS[self.field]
        return (more if self.above else less).format(self.edge)


_WORDS: Mapping[str, tuple[str, str]] = {
    "prompt_tokens": ("prompts of {:g} tokens and more", "prompts of fewer than {:g} tokens"),
    "position": ("tokens from position {:g} on", "tokens before position {:g}"),
    "entropy_nats": (
        "tokens where infer is unsure (entropy ≥ {:g} nats)",
        "tokens where infer is sure (entropy < {:g} nats)",
    ),
}


def contrast(portrait: Portrait) -> Contrast | None:
    """The edge with the largest deviance, or None where nothing separates tokens.

    The sum of (1 - w)^+ over n tokens is compared as a count would be: each term lies in
    [0, 1], so its variance is at most its mean, and the deviance of a Poisson count never
    overstates what independent tokens would show.

    Args:
        portrait: of the workload, or of the golden texts.

    Source:
        P. McCullagh and J. Nelder, Generalized Linear Models, 1989, §6.2 (the deviance).
    """
    contrasts = [c for name in FIELDS for c in _of_field(name, portrait.by.get(name, ()))]
    contrasts = [c for c in contrasts if c.ratio >= _RATIO and c.deviance >= _DEVIANCE]
    # edges with no token between them tell the same: the one nearest to those that drift
    return max(contrasts, key=lambda c: (c.deviance, c.edge if c.above else -c.edge), default=None)


def parted(portrait: Portrait, like: Contrast) -> float | None:
    """Mean TV inside over mean TV outside, of other tokens parted as a contrast parts its own.

    None where either side has no token, or none outside drifts.
    """
    bins = portrait.by.get(like.field, ())
    at = EDGES[like.field].index(like.edge) + 1
    below, above = sum(bins[:at], Sums()), sum(bins[at:], Sums())
    inside, outside = (above, below) if like.above else (below, above)
    return _mean(inside) / _mean(outside) if inside.n and outside.tv else None


def explains(noise: float, sharpest: Contrast) -> bool:
    """Whether noise that is parted so, as `parted` has it, looks like the drift itself."""
    return noise >= sharpest.ratio / _ALIKE


def _of_field(name: str, bins: Sequence[Sums]) -> list[Contrast]:
    contrasts = []
    for i in range(1, len(bins)):
        below, above = sum(bins[:i], Sums()), sum(bins[i:], Sums())
        if min(below.n, above.n) < _LEAST or not below.tv + above.tv:
            continue
        up = _mean(above) > _mean(below)
        inside, outside = (above, below) if up else (below, above)
        contrasts.append(
            Contrast(name, EDGES[name][i - 1], up, inside, outside, _deviance(below, above))
        )
    return contrasts


def _deviance(a: Sums, b: Sums) -> float:
    mean = (a.tv + b.tv) / (a.n + b.n)
    return 2 * math.fsum(s.tv * math.log(_mean(s) / mean) for s in (a, b) if s.tv)


def _mean(sums: Sums) -> float:
    return sums.tv / sums.n
