# Causes: what the shape of the red slices fits.  An estimate: it names what to look at first.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from servanda.dumps.steps import Trend

GROWS, DOUBLED = 1.5, 2.0  # of a trend: worth a word, and a serious one
_MOST_OF_IT = 0.5  # of the excess, before a slice is called its cause


@dataclass(frozen=True)
class Sums:
    """Tokens, and the sum of their (1 - w)^+."""

    n: float = 0.0
    tv: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.n + other.n, self.tv + other.tv)

    @property
    def mean(self) -> float | None:
        return self.tv / self.n if self.n else None


def within(atoms: Mapping[int, Sequence[float]], bits: int) -> tuple[Sums, Sums]:
    """Tokens in any of the slices that `bits` names, and all others."""
    inside, outside = Sums(), Sums()
    for key, (n, tv) in atoms.items():
        if key & bits:
            inside += Sums(n, tv)
        else:
            outside += Sums(n, tv)
    return inside, outside


def _mean(atoms: Mapping[int, Sequence[float]], bits: int) -> float:
    """Mean (1 - w)^+ of the tokens in those slices, or of all where there are none; 0 of none."""
    inside, outside = within(atoms, bits)
    return (inside if bits else outside).mean or 0.0


def explained(atoms: Mapping[int, Sequence[float]], some: int, red: int) -> float | None:
    """The share of the excess in the red slices that lies in some of them.

    The excess is the sum of (1 - w)^+ above what the tokens outside would have had.
    """
    inside, outside = within(atoms, red)
    part, _ = within(atoms, some)
    base = outside.mean or 0.0
    excess = inside.tv - base * inside.n
    return (part.tv - base * part.n) / excess if excess > 0 else None


def fewest(
    names: Sequence[str],
    limits: Mapping[str, float | None],
    atoms: Mapping[int, Sequence[float]],
) -> tuple[str, ...]:
    """The red slices to leave out so that the others, and the whole, are within their limits.

    A slice that is red because it shares tokens with a worse one need not be left out.  The
    worst of what is left is taken, until nothing is beyond its limit: an estimate from means.

    Args:
        names: of all slices, in the order of the bits of `atoms`.
        limits: of the red ones, on the mean of (1 - w)^+; None where another metric is beyond
            its limit, so that the slice is always left out.  A name that is no slice stands
            for all tokens.
    """
    left = [name for name, limit in limits.items() if limit is None]
    while True:
        without = _bits(names, left)
        rest = {key: sums for key, sums in atoms.items() if not key & without}
        means = {name: _mean(rest, _bits(names, [name])) for name in limits}
        beyond = any(means[n] > limit for n, limit in limits.items() if limit is not None)
        open_ = [name for name in limits if name in names and name not in left]
        if not beyond or not open_:
            return tuple(name for name in names if name in left)
        left.append(max(open_, key=means.__getitem__))


def likely(
    names: Sequence[str],
    red: Sequence[str],
    atoms: Mapping[int, Sequence[float]],
    trend: Trend | None,
) -> str:
    """What the red slices look like, in one line; "" where their shape says nothing.

    Args:
        names: of all slices, in the order of the bits of `atoms`.
        red: names of those beyond their limit.
    """
    everything = _bits(names, red)
    for prefix, words in (
        ("start", "tokens lost or re-tokenised at tool boundaries"),
        ("stale", "staleness: tokens drawn by older weights"),
        ("replica", "{} itself: its weights, its build, its hardware"),
        ("env", "what {} sends: its prompts, its sampling, its tools"),
    ):
        family = [name for name in names if name.split("-")[0] == prefix]
        some = [name for name in red if name in family and name != "start-1"]
        if not some or (len(some) == len(family) and prefix != "start"):
            continue  # where all of a family are red, it does not tell them apart
        share = explained(atoms, _bits(names, some), everything)
        if share is not None and share >= _MOST_OF_IT:
            which = ", ".join(name.replace("-", " ", 1) for name in some)
            return f"{words.format(which)}; it explains {100 * min(share, 1):.0f} % of the excess"
    for prefix, words in (
        ("position", "an error that grows along the answer: positions, or a low-precision cache"),
        ("length", "long contexts: positions, attention, or a low-precision cache"),
    ):
        family = [
            name for name in names if name.startswith((f"{prefix}<", f"{prefix}=", f"{prefix}>"))
        ]
        some = [name for name in red if name in family]
        if some and len(some) < len(family) and family[-1] in some:
            return words
    if trend is not None and trend.interval[0] > 1 and trend.ratio >= GROWS:
        return "drift that grows with the steps: a part of the weights that the sync leaves out"
    return ""


def _bits(names: Sequence[str], some: Sequence[str]) -> int:
    return sum(1 << i for i, name in enumerate(names) if name in some)
