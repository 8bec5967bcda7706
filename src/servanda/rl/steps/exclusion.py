# The violated slices to exclude, so that all other tokens are within the limits.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from servanda.contract.model import WHOLE
from servanda.judgement.clauses.base import CellVerdict
from servanda.rl.steps.drift import TokenSum
from servanda.rl.steps.format import is_gradient
from servanda.rl.steps.judge import Atoms


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


def _bits(names: Sequence[str], some: Sequence[str]) -> int:
    return sum(1 << i for i, name in enumerate(names) if name in some)
