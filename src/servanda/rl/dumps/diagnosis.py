# Likely causes from the pattern of violated slices: an estimate of where to start.

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from servanda.contract.model import WHOLE
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.slices.rules import LABEL, Cut
from servanda.judgement.workload_coverage import listed
from servanda.report.format import count
from servanda.rl.dumps.format import is_gradient
from servanda.rl.steps.drift import GROWS, WORST, TokenSum, Trend

# bits of slices -> number of tokens in exactly these, and the sum of their (1 - w)^+
Atoms = Mapping[int, Sequence[float]]

_MOST_OF_IT = 0.5  # smallest share of the excess for a slice to be named as its cause
_FEW = (
    0.75  # share of the drift in the worst sequences: stale caches 0.93, FP8 0.39, a lost LoRA 0.51
)
_ZERO = np.zeros(1)
# labels of the infrastructure, not of the texts
_LABELLED = {
    "replica": "{}: its weights, its build, its hardware",
    "env": "requests of {}: its prompts, its sampling, its tools",
}
_GROWING = {
    "context.position": "an error that grows along the answer: positions, or a low-precision cache",
    "context.length": "long contexts: positions, attention, or a low-precision cache",
}


def within(atoms: Atoms, bits: int) -> tuple[TokenSum, TokenSum]:
    """The (1 - w)^+ of tokens in any of the slices that `bits` names, and of all others."""
    inside, outside = TokenSum(), TokenSum()
    for key, (n, tv) in atoms.items():
        if key & bits:
            inside += TokenSum(tv, int(n))
        else:
            outside += TokenSum(tv, int(n))
    return inside, outside


def _mean(atoms: Atoms, bits: int) -> float:
    """Mean (1 - w)^+ of the tokens in those slices, or of all without slices; 0 without tokens."""
    inside, outside = within(atoms, bits)
    return (inside if bits else outside).mean or 0.0


def explained(atoms: Atoms, some: int, red: int) -> float | None:
    """The share of the excess of the violated slices that lies in some of them.

    The excess is the sum of (1 - w)^+ above the mean of the tokens outside.
    """
    inside, outside = within(atoms, red)
    part, _ = within(atoms, some)
    base = outside.mean or 0.0
    excess = inside.total - base * inside.n
    return (part.total - base * part.n) / excess if excess > 0 else None


def limits_of(violated: Iterable[CellVerdict]) -> dict[str, float | None]:
    """The exceeded limit on mean TV of each violated slice and of the whole, if any."""
    limits: dict[str, float | None] = {}
    for cell in violated:
        if is_gradient(cell):
            limits[cell.slice] = cell.limit
        elif cell.slice != WHOLE:
            limits.setdefault(cell.slice, None)
    return limits


def fewest(
    names: Sequence[str], limits: Mapping[str, float | None], atoms: Atoms
) -> tuple[str, ...]:
    """The violated slices to exclude so that the others, and the whole, are within their limits.

    A slice that is violated only because it shares tokens with a worse one is not excluded. Greedy:
        the worst remaining slice is taken until no limit is exceeded; an estimate from means.

    Args:
        names: names of all slices, in the order of the bits of `atoms`.
        limits: limits of the violated ones on the mean of (1 - w)^+; None if another metric exceeds
            its limit, so that the slice is always excluded.  A name that is no slice means all
            tokens.
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
    cuts: Sequence[Cut],
    red: Sequence[str],
    atoms: Atoms,
    trend: Trend | None,
    concentration: float | None = None,
) -> str:
    """The likely cause of the violated slices, in one line; "" if unknown.

    A cause is derived from the fields that define a slice, and from its share of the excess, not
    from its name.

    Args:
        cuts: all slices, in the order of the bits of `atoms`.
        red: names of the violated ones.
        concentration: see `steps.concentration`; None if not measured.
    """
    if cause := _at_starts(cuts, red, atoms):
        return cause
    if red and (cause := _of_old_weights(cuts, atoms)):
        return cause
    for field in dict.fromkeys(f for cut in cuts for f in cut.fields if f.startswith(LABEL)):
        if cause := _of_label(field, cuts, red, atoms):
            return cause
    for field, words in _GROWING.items():
        if cause := _growing(field, words, cuts, red, atoms):
            return cause
    return _unexplained(trend, concentration) if trend is not None and trend.level else ""


def _at_starts(cuts: Sequence[Cut], red: Sequence[str], atoms: Atoms) -> str:
    """A cause from the first tokens of turns after a tool result."""
    some = [cut.name for cut in cuts if cut.name in red and _after_a_tool(cut)]
    if share := _most_of(some, cuts, red, atoms):
        start = "the first tokens after a tool result, perhaps lost or tokenised differently"
        return f"{start}; {_explains(share)}"
    return ""


def _after_a_tool(cut: Cut) -> bool:
    first = any(t.field == "context.turn_position" and t.op in ("lt", "lte") for t in cut.terms)
    later = any(
        t.field == "context.turn" and t.op in ("gte", "gt") and float(t.value) + (t.op == "gt") > 1
        for t in cut.terms
    )
    return first and later


def _of_old_weights(cuts: Sequence[Cut], atoms: Atoms) -> str:
    """A cause from tokens sampled by older weights, compared with those of the current ones."""
    aged = {cut.name for cut in cuts if cut.fields == {"outcome.staleness"}}
    fresh = {c.name for c in cuts if c.name in aged and c.mask({"outcome.staleness": _ZERO}, 1)[0]}
    names = [cut.name for cut in cuts]
    old, rest = within(atoms, _bits(names, [*(aged - fresh)]))
    base = rest.mean if fresh else None
    whole = old.total + rest.total
    if not old.n or base is None or not whole:
        return ""
    share = (old.total - base * old.n) / whole
    if share < _MOST_OF_IT:
        return ""
    return (
        f"staleness: tokens sampled by older weights have a mean tv of {old.mean:.3g}, the others "
        f"{base:.3g}; it "
        f"explains {100 * share:.0f} % of all divergence"
    )


def _of_label(field: str, cuts: Sequence[Cut], red: Sequence[str], atoms: Atoms) -> str:
    """A cause from some values of a label."""
    family = [cut for cut in cuts if cut.fields == {field}]
    some = [cut for cut in family if cut.name in red]
    if len(some) == len(family):
        return ""  # if all values are violated, the label does not distinguish them
    share = _most_of([cut.name for cut in some], cuts, red, atoms)
    if not share:
        return ""
    label = field.removeprefix(LABEL)
    which = ", ".join(f"{label} {_values(cut)}" for cut in some)
    words = _LABELLED.get(label, "{} alone, for an unknown reason")
    return f"{words.format(which)}; {_explains(share)}"


def _values(cut: Cut) -> str:
    term = cut.terms[0]
    if term.op == "in":
        return listed(map(str, term.value))
    return "of none" if term.op == "exists" else "of any other value"


def _growing(field: str, words: str, cuts: Sequence[Cut], red: Sequence[str], atoms: Atoms) -> str:
    """A cause from buckets with increasing drift."""
    names = [cut.name for cut in cuts]
    family = sorted((cut for cut in cuts if cut.fields == {field}), key=_lower)
    if len(family) < 2 or family[-1].name not in red or all(c.name in red for c in family):
        return ""
    ends = [within(atoms, _bits(names, [cut.name]))[0].mean for cut in (family[0], family[-1])]
    if ends[0] is None or ends[1] is None or ends[1] < GROWS * ends[0]:
        return ""
    return f"{words} (from {ends[0]:.3g} to {ends[1]:.3g})"


def _lower(cut: Cut) -> float:
    return max((float(t.value) for t in cut.terms if t.op in ("gte", "gt")), default=-math.inf)


def _unexplained(trend: Trend, concentration: float | None) -> str:
    """A cause from drift that grows: concentration separates a cache from weights."""
    grown = f"drift that grows, x{trend.ratio:.2g} in the last {count(trend.steps, 'step')}"
    if concentration is None:
        return f"{grown}: unexplained; test the weight sync next (servanda preflight)"
    share = f"{100 * concentration:.0f} % of it in {100 * WORST:.0f} % of the tokens"
    if concentration >= _FEW:
        return (
            f"{grown}, in few sequences ({share}): a prefix cache that outlives a sync looks like "
            "this; sample a step with the cache off, or reset it after each sync"
        )
    return (
        f"{grown}, in all sequences alike ({share}): unexplained; weights that the sync leaves out "
        "and low-precision drift look the same here; servanda preflight tells them apart"
    )


def _explains(share: float) -> str:
    return f"{100 * min(share, 1):.0f} % of the excess over the limit lies there"


def _most_of(
    some: Sequence[str], cuts: Sequence[Cut], red: Sequence[str], atoms: Atoms
) -> float | None:
    """The share of the excess in some slices; None if it is too small to explain it."""
    names = [cut.name for cut in cuts]
    share = explained(atoms, _bits(names, some), _bits(names, red)) if some else None
    return share if share is not None and share >= _MOST_OF_IT else None


def _bits(names: Sequence[str], some: Sequence[str]) -> int:
    return sum(1 << i for i, name in enumerate(names) if name in some)
