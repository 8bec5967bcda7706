# The precision ladder: how far standard formats of the reference model are from the reference.

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rung:
    """One format, or the candidate, on fixed texts; not judged.

    Args:
        name: of the format, such as "fp8_channel".
        tv: mean total variation to the train kernel, 0 to 1; None where it was not measured.
        abs_log_ratio_nats: mean of the given token, nats.
        flips: share of positions at which the most likely token differs.
        tokens: positions.
        candidate: whether this is the infer kernel.
        missing: why it was not measured; "" if it was.
    """

    name: str
    tv: float | None = None
    abs_log_ratio_nats: float | None = None
    flips: float | None = None
    tokens: int = 0
    candidate: bool = False
    missing: str = ""


def by_distance(rungs: tuple[Rung, ...]) -> list[Rung]:
    """Those that were measured, nearest first."""
    return sorted((r for r in rungs if r.tv is not None), key=lambda r: r.tv or 0.0)


def place(rungs: tuple[Rung, ...]) -> str:
    """Where the candidate is, in a sentence; "" where it was not measured.

    >>> place((Rung("bfloat16", 0.001), Rung("nvfp4", 0.02), Rung("B", 0.004, candidate=True)))
    'the infer kernel is farther away than bfloat16 and nearer than nvfp4'
    """
    order = by_distance(rungs)
    at = next((i for i, rung in enumerate(order) if rung.candidate), None)
    if at is None or len(order) < 2:
        return ""
    below = f"farther away than {order[at - 1].name}" if at else ""
    above = f"nearer than {order[at + 1].name}" if at + 1 < len(order) else ""
    return f"the infer kernel is {' and '.join(part for part in (below, above) if part)}"
