# Which check fires on which run, and when: faults x checks, from the records alone.
#
# All checks read the same runs, those of arm "none", which are neither corrected nor halted; only
# the preflight test is read from arm "contract", and comes before the first step.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.experiment.change import changed, is_long_enough
from benchmarks.experiment.guards import FIELD, trend_fires
from benchmarks.experiment.record import Run
from servanda.engines.faults import FAULTS
from servanda.engines.faults.sync import SYNC_FAULTS

HEALTHY = "healthy"
HEALTHY_ADAPTER = "healthy bfloat16_lora"
ENGINES = {"adapter_ignored": "bfloat16_lora"}  # of a fault that needs another than bfloat16
BEFORE = -1  # the step of a preflight test, which comes before the first
NEVER = "-"
OURS = ("trend", "change", "follow", "monitor", "drill")


@dataclass(frozen=True)
class Guarding:
    """One row: a check, and how it reads a run.

    Args:
        who, rule, source: as in guards.Guard; arm: the arm whose runs it reads.
        fires: run -> the steps on which it fires; None where the run lacks its statistic.
        once: whether it is evaluated once per run, and not at each step.
    """

    who: str
    rule: str
    source: str
    arm: str
    fires: Callable[[Run], list[int] | None]
    once: bool = False


# Statistics that a record lacks follow from others: the first to the four digits that `ess` is
# kept with, the second by another reduction (over tokens, where the project takes means of
# sequences first).  guard_notes() states this on the page.
DERIVED: Mapping[str, Callable[[Mapping[str, float]], float]] = {
    "is_std": lambda step: step["is_mean"] * math.sqrt(max(1 / step["ess"] - 1, 0.0)),
    "abs_d_mean_by_sequence": lambda step: step["abs_d_mean"],
}


def steps_of(run: Run) -> list[dict[str, float]]:
    """The statistics of each step, as measure() would give them; NaN where one has none."""
    names = [name for name in run.steps if name != "step"]
    columns = zip(*(run.steps[name] for name in names), strict=True)
    steps = [
        {n: math.nan if v is None else float(v) for n, v in zip(names, values, strict=True)}
        for values in columns
    ]
    for step in steps:
        step.update((n, of(step)) for n, of in DERIVED.items() if n not in step)
    return steps


def _of_field(name: str) -> Guarding:
    guard = FIELD[name]

    def fires(run: Run) -> list[int] | None:
        steps = steps_of(run)
        if any(bar.reads not in step for bar in guard.bars for step in steps):
            return None
        return [run.steps["step"][i] for i in guard.fires(steps)]

    return Guarding(guard.who, guard.rule, guard.source, "none", fires)


def _trend(run: Run) -> list[int]:
    return [run.steps["step"][i] for i in trend_fires(run.steps["abs_d_mean"])]


def _monitor(run: Run) -> list[int] | None:
    if not run.monitor:
        return None
    return [
        step
        for step, told in zip(run.steps["step"], run.monitor, strict=True)
        if told["outcome"] == "violated"
    ]


def _follow(run: Run) -> list[int] | None:
    """A sync that brings version N comes before the rollouts of step N."""
    if not run.follow:
        return None
    return [seen["version"] for seen in run.follow if seen["outcome"] == "violated"]


def _drill(run: Run) -> list[int] | None:
    if not run.preflight:
        return None
    return [BEFORE] if run.preflight["outcome"] == "violated" else []


GUARDS: Mapping[str, Guarding] = {
    **{name: _of_field(name) for name in FIELD},
    "trend": Guarding(
        "servanda trend",
        "mean |d| doubled",
        "mean of the last five steps over that of the first five, as in `servanda check DUMP`",
        "none",
        _trend,
    ),
    "change": Guarding(
        "servanda change",
        "mean k3 has changed",
        "the trend clause: a CUSUM against the healthy runs of all other seeds, from "
        "`servanda contract calibrate`",
        "none",
        lambda _: None,  # needs the healthy runs, see `_against`
    ),
    "follow": Guarding(
        "servanda follow",
        "the engine does not follow",
        "`servanda.rl.Follow`: the slope of the engine's change on the trainer's, on 640 probe "
        "tokens after each sync, at confidence 0.95 per run",
        "none",
        _follow,
    ),
    "monitor": Guarding(
        "servanda monitor",
        "a clause is violated",
        "on the whole batch or on a slice, at confidence 0.95 per step",
        "none",
        _monitor,
    ),
    "drill": Guarding(
        "servanda preflight",
        "a group is not synced",
        "`servanda.rl.preflight`: randomise all weights, sync, score; then perturb one group at a "
        "time",
        "contract",
        _drill,
        once=True,
    ),
}


@dataclass(frozen=True)
class Firing:
    """One check on the runs of one fault, one run for each seed.

    Args:
        first: of each run the first step on which it fires, or None.
        fired, looks: alarms and evaluations over all runs; unit: the name of an evaluation.
    """

    first: tuple[int | None, ...]
    fired: int
    looks: int
    unit: str = "steps"

    @property
    def runs(self) -> int:
        return sum(step is not None for step in self.first)

    def __str__(self) -> str:
        """First steps over the seeds.

        >>> print(Firing((3, 4, 3), 9, 60), Firing((None, 7), 1, 40), Firing((None,), 0, 20))
        3-4 7 (1 of 2) -
        """
        found = sorted(step for step in self.first if step is not None)
        if not found:
            return NEVER
        low, high = ("before 0" if step == BEFORE else str(step) for step in (found[0], found[-1]))
        span = low if low == high else f"{low}-{high}"
        part = len(found) < len(self.first)
        return f"{span} ({len(found)} of {len(self.first)})" if part else span

    @property
    def alarms(self) -> str:
        """False alarms: steps and runs.

        >>> print(Firing((2, None), 3, 40).alarms, Firing((None, None), 0, 40).alarms, sep="; ")
        3 of 40 steps, 1 of 2 runs; 0 of 40 steps
        """
        told = f"{self.fired} of {self.looks} {self.unit}"
        return f"{told}, {self.runs} of {len(self.first)} runs" if self.fired else told


def firing(guard: Guarding, runs: Iterable[Run]) -> Firing | None:
    """A check on some runs of one fault; None where none of them has its statistic."""
    told = [(guard.fires(run), 1 if guard.once else len(run.steps["step"])) for run in runs]
    heard = [(fires, looks) for fires, looks in told if fires is not None]
    if not heard:
        return None
    return Firing(
        tuple(min(fires, default=None) for fires, _ in heard),
        sum(len(fires) for fires, _ in heard),
        sum(looks for _, looks in heard),
        "tests" if guard.once else "steps",
    )


def case_of(run: Run) -> str:
    """The case of a run: its fault, and its engine unless the fault needs that one."""
    fault, engine = run.settings["fault"], run.settings["engine"]
    return fault if engine == ENGINES.get(fault, "bfloat16") else f"{fault} {engine}"


def cases_of(runs: Sequence[Run]) -> list[str]:
    """The cases of some runs: faults in the order of the catalogue, healthy ones around them."""
    order = [HEALTHY, *SYNC_FAULTS, *FAULTS]
    found = {case_of(run): order.index(run.settings["fault"]) for run in runs}
    last = len(order)  # healthy runs with another engine
    place = {case: at if at or case == HEALTHY else last for case, at in found.items()}
    return sorted(found, key=lambda case: (place[case], case))


def compared(runs: Sequence[Run]) -> list[str]:
    """The cases of which every arm was run: the others were run once, and are not compared."""
    arms = {run.settings["arm"] for run in runs}
    return [case for case in cases_of(runs) if all(chosen(runs, case, arm) for arm in arms)]


def chosen(runs: Sequence[Run], case: str, arm: str) -> list[Run]:
    """The runs of one case and arm, by seed."""
    found = [run for run in runs if case_of(run) == case and run.settings["arm"] == arm]
    return sorted(found, key=lambda run: run.settings["seed"])


def _against(guard: Guarding, name: str, runs: Sequence[Run]) -> Guarding:
    """The check of a change, with its healthy runs; other checks need none."""
    healthy = chosen(runs, HEALTHY, "none")
    if name != "change" or not is_long_enough(healthy):
        return guard
    return replace(guard, fires=lambda run: changed(run, healthy) if "k3" in run.steps else None)


# check -> case -> how it fires; None where no run has its statistic
Firings = Mapping[str, Mapping[str, Firing | None]]


def firings(runs: Sequence[Run]) -> Firings:
    """How every check fires on the runs of every case; an adapter makes no other healthy case.

    A check whose statistic is on no record is left out.
    """
    cases = [case for case in cases_of(runs) if case != HEALTHY_ADAPTER]
    guards = {name: _against(guard, name, runs) for name, guard in GUARDS.items()}
    of = {case: (case, HEALTHY_ADAPTER) if case == HEALTHY else (case,) for case in cases}
    told = {
        name: {
            case: firing(guard, [run for one in of[case] for run in chosen(runs, one, guard.arm)])
            for case in cases
        }
        for name, guard in guards.items()
    }
    return {name: row for name, row in told.items() if any(row.values())}
