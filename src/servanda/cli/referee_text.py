# The answer of a third scorer about two sides, as lines of text.

from __future__ import annotations

from collections.abc import Iterator

from servanda.report.format import count, number, percent
from servanda.runner.compare.side_distance import CAP, SideDistance, ThirdScore

_WORST = 3  # slices that are named


def third_lines(found: ThirdScore, train: str, infer: str) -> Iterator[str]:
    """The side that is further, by how much, and in which slices most.

    Args:
        train, infer: what the sides are called.
    """
    names = {"train": train, "infer": infer}
    whole, *slices = found.slices
    missing = f", {whole.missing:,} without a logprob" if whole.missing else ""
    yield (
        f"scorer    {found.referee}, on {count(whole.tokens, 'token')} of {found.rows:,} of "
        f"{count(found.of, 'row')}{missing}"
    )
    yield f"          {_sentence(whole, names)}"
    yield (
        f"          {train} − {infer}: {_signed(whole.low)} to {_signed(whole.high)} nats per "
        f"token of these, a token at most {CAP:g}, confidence {percent(found.confidence)}"
    )
    # where it is worse than on the whole, the clearest first
    ranked = sorted(slices, key=lambda s: -max(s.low, -s.high))
    worst = [s for s in ranked if s.further != "cannot tell" and _gap(s) > _gap(whole)]
    for found_slice in worst[:_WORST]:
        yield f"          on {found_slice.slice}: {_sentence(found_slice, names)}"


def _gap(found: SideDistance) -> float:
    return abs(found.train - found.infer)


def _signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 else number(value)


def _sentence(found: SideDistance, names: dict[str, str]) -> str:
    sides = {"train": found.train, "infer": found.infer}
    if found.further == "cannot tell":
        both = " and ".join(f"{names[side]} {number(v)}" for side, v in sides.items())
        return f"cannot tell which side is further: {both} nats from it per token"
    other = "infer" if found.further == "train" else "train"
    return (
        f"{names[found.further]} is further: {number(sides[found.further])} nats from it per "
        f"token, {names[other]} {number(sides[other])}"
    )
