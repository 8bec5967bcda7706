# The drafts of a step: what the engines counted, as metrics, and against the run's first steps.

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Protocol

from servanda.rl.steps.drift import ENDS
from servanda.theory.stats.draft_counts import DraftCounts, fallen, moved

NAME = "servanda/draft_acceptance"
FELL = (
    f"drafts are accepted less often than in the first {ENDS} steps of the run: are the draft's "
    "weights synced too?"
)


class Meter(Protocol):
    """Counts drafts between two readings, such as servanda.rl.DraftMeter.

    `problem`: why the last interval is unknown; "" if it is known.
    """

    problem: str

    def read(self) -> DraftCounts | None: ...


def counted(drafts: DraftCounts | Meter | None) -> tuple[DraftCounts, tuple[str, ...]]:
    """The counts of this rank, and the reason why there are none."""
    if drafts is None or isinstance(drafts, DraftCounts):
        return drafts or DraftCounts(), ()
    counts = drafts.read()
    return (DraftCounts(), (drafts.problem,)) if counts is None else (counts, ())


def draft_metrics(
    counts: DraftCounts, firsts: MutableMapping[int, DraftCounts], weights: int, alpha: float
) -> dict[str, float]:
    """The metrics to log of a step's drafts, only measured ones.

    The first ENDS steps with drafts are the reference, and each later step is compared with them.

    Args:
        firsts: updates -> counts of the reference; a step of it is added.
        alpha: error probability of each comparison.
    """
    if not counts.drafts:
        return {}
    metrics = {NAME: counts.mean}
    metrics |= {f"{NAME}/depth_{d}": share for d, share in enumerate(counts.shares, 1)}
    if weights in firsts or len(firsts) < ENDS:
        firsts[weights] = counts
        return metrics
    first = sum(firsts.values(), DraftCounts())
    metrics[f"{NAME}/fell_at_least"] = fallen(first, counts, alpha)
    if first.by_depth and counts.by_depth:
        metrics[f"{NAME}/target_tv_at_least"] = moved(first, counts, alpha)
    return metrics


def notes_on(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """A note if the acceptance fell."""
    return (FELL,) if metrics.get(f"{NAME}/fell_at_least") else ()
