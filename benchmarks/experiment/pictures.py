# The pictures of docs/explanation/experiment.md, from the records alone.

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.experiment import svg
from benchmarks.experiment.alarms import (
    BEFORE,
    GUARDS,
    HEALTHY,
    OURS,
    Firing,
    Firings,
    case_of,
    chosen,
    steps_of,
)
from benchmarks.experiment.record import Run
from benchmarks.experiment.svg import Axis, Panel

# arm -> what it is called in pictures and tables; the place in this list is its colour and dash
ARMS: Mapping[str, str] = {
    "none": "no correction",
    "tis": "TIS",
    "mis": "MIS",
    "monitor": "monitor",
    "contract": "drill and monitor",
}
_CASES: Mapping[str, str] = {
    HEALTHY: "healthy",
    "never_synced": "never synced",
    "tied_head_stale": "tied head stale",
    "one_layer": "one layer stale",
    "one_mlp": "one MLP stale",
    "norms_stale": "norms stale",
    "adapter_ignored": "adapter ignored",
    "wrong_cast": "float8 sync",
    "undisclosed_temperature": "temperature off",
    "healthy int4_g32": "4 bits, no fault",
    "healthy bfloat16_lora": "adapter, no fault",
}


def called(case: str) -> str:
    """A case as pictures and tables call it."""
    return _CASES.get(case, case.replace("_", " "))


def mean_of(runs: Sequence[Run], what: str) -> list[tuple[float, float]]:
    """(step, mean reward over runs), at the steps that all of them were evaluated at."""
    by_step: dict[int, list[float]] = {}
    for run in runs:
        for step, reward in zip(run.evaluations["step"], run.evaluations[what], strict=True):
            by_step.setdefault(step, []).append(reward)
    whole = {step: values for step, values in by_step.items() if len(values) == len(runs)}
    return [(step, math.fsum(values) / len(values)) for step, values in sorted(whole.items())]


def rewards(runs: Sequence[Run], cases: Sequence[str], what: str, title: str) -> str:
    """Reward over updates: a panel a case, a line an arm, thin lines its seeds.

    Args:
        what: "trained" or "held_out".
    """
    arms = [arm for arm in ARMS if any(chosen(runs, case, arm) for case in cases)]
    last = max(run.settings["steps"] for run in runs)
    values = [value for run in runs for value in run.evaluations.get(what, ())]
    up = Axis(math.floor(10 * min(values)) / 10, math.ceil(10 * max(values)) / 10)
    columns = 2 if len(cases) in (1, 2, 4) else 3
    rows, width = math.ceil(len(cases) / columns), 828 / columns - 50
    parts = [
        svg.text(20, 28, title, "big"),
        svg.text(
            20,
            46,
            "thick: mean over seeds; thin: each seed; a mark: halted there; across: updates",
            "small",
        ),
        *svg.legend(20, 72, [([*ARMS].index(arm), ARMS[arm]) for arm in arms]),
    ]
    for i, case in enumerate(cases):
        left, top = 54 + (width + 50) * (i % columns), 112 + 194 * (i // columns)
        panel = Panel(left, top, width, 132, Axis(0, last), up)
        parts += panel.frame(called(case))
        for arm in reversed(arms):
            found = chosen(runs, case, arm)
            series = [*ARMS].index(arm)
            for run in found:
                points = zip(run.evaluations["step"], run.evaluations[what], strict=True)
                parts.append(panel.path([*points], series, "thin"))
                if run.halted_at is not None:
                    last_seen = run.evaluations[what][-1]
                    parts.append(
                        svg.mark(panel.x(run.halted_at), panel.y(last_seen), series, size=3)
                    )
            if found:
                parts.append(panel.path(mean_of(found, what), series))
    about = (
        f"{len(cases)} panels, one for each of {', '.join(map(called, cases))}; in each the "
        f"reward over {last} updates of the arms {', '.join(ARMS[a] for a in arms)}."
    )
    return svg.picture(866, 106 + 194 * rows, title, about, parts)


def timeline(firings: Firings, steps: int) -> str:
    """When guards fire: a row a guard, a column a case, a mark the first step of each seed."""
    cases = [*next(iter(firings.values()))]
    left, gap, top, height = 322, 22, 98, 24
    width = max(76, min(140, 760 // len(cases) - gap))
    parts = [
        svg.text(20, 28, "The first step on which a guard fires", "big"),
        svg.text(20, 47, "one mark a seed, across: updates;", "small"),
        svg.mark(226, 43, _RINGS),
        svg.text(236, 47, "fires;", "small"),
        svg.mark(286, 43, _CRIES),
        svg.text(296, 47, "fires, and on healthy runs as well;", "small"),
        _bar(502, 43),
        svg.text(506, 47, "before the first step", "small"),
    ]
    for j, case in enumerate(cases):
        across, rows = Axis(0, steps), Axis(0, len(firings))
        panel = Panel(left + j * (width + gap), top, width, height * len(firings), across, rows)
        bottom = top + panel.height
        for k, words in enumerate(reversed(textwrap.wrap(called(case), 11))):
            parts.append(svg.text(panel.left, top - 12 - 15 * k, words, "head"))
        for step in (0, steps / 2, steps):
            parts.append(svg.line(panel.x(step), top, panel.x(step), bottom))
            parts.append(svg.text(panel.x(step), bottom + 16, svg.number(step), "small", "middle"))
        for i, row in enumerate(firings.values()):
            y = top + height * (i + 0.5)
            parts.append(svg.line(panel.left, y, panel.left + width, y))
            healthy = row.get(HEALTHY)
            cries = bool(healthy and healthy.fired)
            parts += _marks(row.get(case), _CRIES if cries else _RINGS, panel, y)
    for i, name in enumerate(firings):
        y, guard = top + height * (i + 0.5) + 4, GUARDS[name]
        parts.append(svg.text(20, y, guard.who, "head" if name in OURS else ""))
        parts.append(svg.text(left - 12, y, guard.rule, "small", "end"))
    size = left + len(cases) * (width + gap), top + height * len(firings) + 34
    about = "A row for each guard, a column for each case; the numbers stand in the table."
    return svg.picture(*size, "When guards fire", about, parts)


_RINGS, _CRIES = 1, 4  # series, with their shapes


def _bar(x: float, y: float) -> str:
    return f'<rect class="f3" x="{x - 6:.1f}" y="{y - 7:.1f}" width="5" height="14"/>'


def _marks(firing: Firing | None, series: int, panel: Panel, y: float) -> list[str]:
    first = [step for step in firing.first if step is not None] if firing else []
    return [
        _bar(panel.left, y) if step == BEFORE else svg.mark(panel.x(step), y, series)
        for step in first
    ]


@dataclass(frozen=True)
class Point:
    """The true bias at one checkpoint of one run, under one weighting.

    Args:
        bias: mean norm over tokens, by the logits, of estimator - target; bound: A G D of it.
        seen: the statistics of the step that was drawn with these weights; {} after the last.
    """

    case: str
    arm: str
    seed: int
    step: int
    weighting: str
    bias: float
    bound: float
    seen: Mapping[str, float]


WEIGHTINGS: Mapping[str, str] = {
    "none": "no correction",
    "tis": "TIS: min(w, 2)",
    "mis": "MIS: w in [0.5, 2]",
}


_LEAST = 1e-5  # drawn at the edge where it is less
NOTHING = 1e-9  # a bias, or a bound, that is 0 but for rounding: no weight was cut


def points_of(runs: Sequence[Run]) -> list[Point]:
    """Every checkpoint under every weighting; of a run that repeats another, none."""
    found = []
    for run in runs:
        seen = {} if run.same_as else dict(zip(run.steps["step"], steps_of(run), strict=True))
        for at in () if run.same_as else run.checkpoints:
            found += [
                Point(
                    case_of(run),
                    run.settings["arm"],
                    run.settings["seed"],
                    at["step"],
                    weighting,
                    at["logit_bias"][weighting],
                    at["logit_bound"][weighting],
                    seen.get(at["step"], {}),
                )
                for weighting in WEIGHTINGS
            ]
    return found


_METRICS = (("abs_d_mean", "mean |d|, nats"), ("k3", "mean k3, nats"))


def truth(points: Sequence[Point]) -> str:
    """The true bias against its bound, and against two of the field's metrics; all log-log.

    Of the arm without a correction: at each checkpoint every weighting is looked at anyway.
    """
    points = [p for p in points if p.arm == "none"]
    up = Axis.powers([p.bias for p in points if p.bias > _LEAST])
    bounds = Axis.powers([p.bound for p in points if p.bound > _LEAST])
    size, top, left = 250, 116, 62
    parts = [
        svg.text(20, 28, "The true bias of the gradient, and what says so", "big"),
        svg.text(
            20,
            47,
            "upwards: mean norm over tokens of estimator less target, enumerated; at the edges: "
            "less, or 0",
            "small",
        ),
        *svg.legend(20, 76, [*enumerate(WEIGHTINGS.values())], marks=True),
    ]
    panel = Panel(left, top, size, size, bounds, up)
    parts += panel.frame("against the bound A G D", "A G D of the same weighting")
    ends = max(bounds.low, up.low), min(bounds.high, up.high)
    parts.append(
        svg.line(panel.x(ends[0]), panel.y(ends[0]), panel.x(ends[1]), panel.y(ends[1]), "edge")
    )
    parts.append(svg.text(panel.left + 8, panel.top + 16, "dashed: bias = bound", "small"))
    parts += _dots(panel, [(p.bound, p) for p in points])
    plain = [p for p in points if p.weighting == "none" and p.seen]
    for i, (name, label) in enumerate(_METRICS, 1):
        across = Axis.powers([p.seen[name] for p in plain])
        panel = Panel(left + i * (size + 50), top, size, size, across, up)
        parts += panel.frame(f"against {label.split(',')[0]}", label, numbers=False)
        parts += _dots(panel, [(p.seen[name], p) for p in plain])
    about = (
        f"{len(points)} pairs of bias and bound, all below the diagonal where they meet; and "
        f"{len(plain)} uncorrected ones against mean |d| and mean k3 of the same step."
    )
    return svg.picture(62 + 3 * size + 2 * 50 + 24, top + size + 46, "Bias and bound", about, parts)


def _dots(panel: Panel, placed: Sequence[tuple[float, Point]]) -> list[str]:
    series = [*WEIGHTINGS]
    return [
        svg.mark(
            panel.x(x),
            panel.y(point.bias),
            series.index(point.weighting),
            f"{called(point.case)}, seed {point.seed}, step {point.step}",
            3.2,
        )
        for x, point in placed
    ]
