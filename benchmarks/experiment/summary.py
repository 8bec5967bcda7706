# The answers to the four questions of the page, from the records.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from benchmarks.experiment.alarms import HEALTHY, Firing, Firings, compared
from benchmarks.experiment.guards import FIELD
from benchmarks.experiment.pictures import ARMS, Point, called
from benchmarks.experiment.record import Run
from benchmarks.experiment.sections import final, fires_on_healthy

OURS = {
    "drill": "preflight sync test",
    "trend": "trend",
    "change": "change",
    "follow": "follow",
    "monitor": "monitor",
}


def answers(runs: Sequence[Run], fired: Firings, points: Sequence[Point]) -> str:
    """One line for each question."""
    return "\n".join(
        f"- {line}" for line in (_detection(fired), *_rewards(runs), _bound(points)) if line
    )


def _detection(fired: Firings) -> str:
    """The number of faults that each check finds on every seed."""
    broken = [case for case in next(iter(fired.values())) if not case.startswith(HEALTHY)]
    quiet = [name for name in FIELD if name in fired and not fires_on_healthy(fired[name])]
    best = max((_found(fired[name], broken) for name in quiet), default=0)
    ours = ", ".join(
        f"{OURS[name]} {_found(fired[name], broken)}" for name in OURS if name in fired
    )
    return (
        f"**Detection**: of {len(broken)} faults, the checks find on every seed: "
        f"{ours}, best threshold of another project {best} (among those that never fire on a "
        "healthy run). The preflight test needs no training step."
    )


def _found(row: Mapping[str, Firing | None], cases: Sequence[str]) -> int:
    """The number of cases in which a check fires on every run."""
    known = [row[case] for case in cases]
    return sum(of is not None and of.runs == len(of.first) for of in known)


def _rewards(runs: Sequence[Run]) -> list[str]:
    """The case that costs most without a correction, and the same case under each arm."""
    plain = {case: final(runs, case, "none", "trained").values() for case in compared(runs)}
    means = {case: fmean(values) for case, values in plain.items() if values}
    faulty = [case for case in means if case != HEALTHY]
    if HEALTHY not in means or not faulty:
        return []
    worst = min(faulty, key=lambda case: means[case])
    ends = {arm: final(runs, worst, arm, "trained").values() for arm in ARMS if arm != "none"}
    rest = ", ".join(f"{ARMS[arm]} {fmean(values):.2f}" for arm, values in ends.items() if values)
    return [
        f'**Cost**: without a correction, the case "{called(worst)}" ends at a reward of '
        f"{means[worst]:.2f} instead of {means[HEALTHY]:.2f}, as the mean over seeds.",
        f"**Repair**: in the same case the other arms end at: {rest}.",
    ]


def _bound(points: Sequence[Point]) -> str:
    above = sum(p.bias > p.bound for p in points)
    return f"**Bound**: {above} of {len(points)} computed biases are above their bound."
