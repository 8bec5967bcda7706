# The pilot: at which learning rate does a healthy run learn, and a broken sync hurt?
#
# Its arm is always "none", so that no arm is favoured; every run of the experiment then has the
# rate that `chosen` gives.  Its runs are in results/pilot.

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.experiment.record import RESULTS, Run

FOLDER = RESULTS / "pilot"
LEARNT = 0.9


def lines(runs: Iterable[Run]) -> list[str]:
    """A line for each rate and fault: the rewards on the training problems, by seed."""
    shown: dict[tuple[float, str], list[str]] = {}
    for run in runs:
        key = (run.settings["learning_rate"], run.settings["fault"])
        reward = " ".join(f"{value:.2f}" for value in run.evaluations["trained"])
        shown.setdefault(key, []).append(reward)
    return [f"{rate:<8g}{fault:<17}{'   '.join(some)}" for (rate, fault), some in shown.items()]


def chosen(runs: Iterable[Run]) -> float:
    """The largest rate at which the healthy policy ends at LEARNT or better with every seed."""
    ends: dict[float, list[float]] = {}
    for run in runs:
        if run.settings["fault"] == "healthy":
            last = run.evaluations["trained"][-1]
            ends.setdefault(run.settings["learning_rate"], []).append(last)
    return max(rate for rate, some in ends.items() if min(some) >= LEARNT)
