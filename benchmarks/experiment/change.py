# The change of a run against the healthy runs of other seeds, as the monitor judges it.

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.experiment.record import Run
from servanda.rl.trend.changes import K3, GoodRun, Reference, RunChart
from servanda.theory.stats.change import LEAST_STEPS

ALPHA = 0.05  # as `servanda contract calibrate` has it


def good_run(run: Run) -> GoodRun:
    """A run as the state of its monitor would have it; every token has both logprobs."""
    steps = tuple((s, {K3: k3}) for s, k3 in zip(run.steps["step"], run.steps["k3"], strict=True))
    return GoodRun(run.name, run.name, steps)


def reference_for(run: Run, healthy: Sequence[Run]) -> Reference:
    """The reference of a run: the healthy runs of all other seeds."""
    others = [one for one in healthy if one.settings["seed"] != run.settings["seed"]]
    return Reference.of([good_run(one) for one in others], ALPHA)


def is_long_enough(runs: Sequence[Run]) -> bool:
    """Whether some healthy runs make a reference for one of their own."""
    steps = [len(run.steps["step"]) for run in runs if "k3" in run.steps]
    return len(steps) == len(runs) > 2 and min(steps) > LEAST_STEPS


def changed(run: Run, healthy: Sequence[Run]) -> list[int]:
    """The steps at which a run is called changed."""
    chart = RunChart(reference_for(run, healthy))
    return [
        step
        for step, values in good_run(run).steps
        if any(cell.outcome == "violated" for cell in chart.add(step, values))
    ]
