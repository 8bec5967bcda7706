# The pictures of docs/explanation/experiment.md, from the records alone.

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
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

# arm -> its name in pictures and tables; the place in this list is its colour, dash and shape
ARMS: Mapping[str, str] = {
    "none": "no correction",
    "tis": "TIS",
    "mis": "MIS",
    "monitor": "monitor",
    "contract": "preflight and monitor",
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
    "undisclosed_temperature": "wrong temperature",
    "healthy int4_g32": "4 bits (no fault)",
    "healthy bfloat16_lora": "adapter (no fault)",
}


def called(case: str) -> str:
    """The name of a case in pictures and tables."""
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
    """Reward over updates where the arms differ most; of the other cases the last rewards.

    Args:
        what: "trained" or "held_out".
    """
    arms = [arm for arm in ARMS if any(chosen(runs, case, arm) for case in cases)]
    last = max(run.settings["steps"] for run in runs)
    values = [value for run in runs for value in run.evaluations.get(what, ())]
    up = Axis(math.floor(10 * min([0.0, *values])) / 10, math.ceil(10 * max(values)) / 10)
    ends = {case: {arm: _ends(chosen(runs, case, arm), what) for arm in arms} for case in cases}
    large = max(cases, key=lambda case: _range([mean for _, mean in ends[case].values()]))
    top, height = 128, 280
    parts = [
        svg.text(20, 32, title, "big"),
        svg.text(
            20,
            58,
            "Thick: mean over seeds; thin: one seed. A run halted by the monitor ends at its mark.",
            "small",
        ),
    ]
    panel = Panel(60, top, 520, height, Axis(0, last), up)
    parts += panel.frame(called(large), "updates")
    for arm in reversed(arms):
        parts += _curves(panel, chosen(runs, large, arm), what, [*ARMS].index(arm))
    halted = {arm for arm in arms if any(r.halted_at is not None for r in chosen(runs, large, arm))}
    parts += _named(panel, ends[large], halted)
    others = [case for case in cases if case != large]
    begin = top + height + 104
    if others:
        parts.append(svg.text(20, begin - 30, "The other cases, after the last update", "big"))
        parts.append(
            svg.text(
                20, begin - 6, "Each mark is one seed; the number is the mean over seeds.", "small"
            )
        )
    each = 26 * len(arms) + 64
    for i, case in enumerate(others):
        across, down = i % _STRIPS, begin + 32 + each * (i // _STRIPS)
        if not across:
            parts += [
                svg.text(20, down + 26 * (j + 0.5) + 5, ARMS[arm]) for j, arm in enumerate(arms)
            ]
        strip = Panel(196 + 222 * across, down, 150, 26 * len(arms), up, Axis(0, len(arms)))
        parts += _strip(strip, called(case), ends[case])
    about = (
        f"Reward over {last} updates in the case {called(large)}, a line for each of the arms "
        f"{', '.join(ARMS[a] for a in arms)}. Below, the reward after the last update in the "
        f"cases {', '.join(map(called, others))}."
    )
    size = begin + each * math.ceil(len(others) / _STRIPS) + 8 if others else begin - 40
    return svg.picture(svg.WIDTH, size, title, about, parts)


_STRIPS = 3  # in a row
_Ends = tuple[list[float], float]


def _ends(runs: Sequence[Run], what: str) -> _Ends:
    """The last reward of each run, and their mean; NaN without a run."""
    last = [run.evaluations[what][-1] for run in runs if run.evaluations]
    return last, math.fsum(last) / len(last) if last else math.nan


def _range(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return max(known) - min(known) if known else 0.0


def _curves(panel: Panel, runs: Sequence[Run], what: str, series: int) -> list[str]:
    """A thin line for each run, their mean as a thick one, a mark where a run was halted."""
    parts = [
        panel.path(
            [*zip(run.evaluations["step"], run.evaluations[what], strict=True)], series, "thin"
        )
        for run in runs
    ]
    if not runs:
        return []
    halted = [run for run in runs if run.halted_at is not None]
    if not halted:
        mean = mean_of(runs, what)
        parts.append(panel.path(mean, series))
        parts += [svg.mark(panel.x(x), panel.y(y), series) for x, y in mean[1:]]
    for run in halted:
        at = panel.x(run.halted_at or 0), panel.y(run.evaluations[what][-1])
        parts.append(svg.mark(*at, series, size=5))
    return parts


def _named(panel: Panel, ends: Mapping[str, _Ends], halted: Container[str]) -> list[str]:
    """The names of the arms and their last rewards, right of the ends of their lines."""
    known = [arm for arm, (last, _) in ends.items() if last]
    places = svg.apart([panel.y(ends[arm][1]) for arm in known], 24)
    parts, right = [], panel.left + panel.width
    for arm, y in zip(known, places, strict=True):
        series = [*ARMS].index(arm)
        if arm not in halted:
            parts.append(svg.line(right + 2, panel.y(ends[arm][1]), right + 18, y))
        parts.append(svg.sample(right + 20, y, series))
        parts.append(svg.mark(right + 35, y, series))
        parts.append(svg.text(right + 58, y + 5, f"{ARMS[arm]} {ends[arm][1]:.2f}"))
    return parts


def _strip(panel: Panel, title: str, ends: Mapping[str, _Ends]) -> list[str]:
    """The last reward of each seed, a row for each arm, and the mean."""
    bottom = panel.top + panel.height
    parts = [svg.text(panel.left, panel.top - 10, title, "head")]
    for tick in (panel.across.low, (panel.across.low + panel.across.high) / 2, panel.across.high):
        parts.append(svg.line(panel.x(tick), panel.top, panel.x(tick), bottom))
        parts.append(svg.text(panel.x(tick), bottom + 20, svg.number(tick), "small", "middle"))
    for j, (arm, (last, mean)) in enumerate(ends.items()):
        y, series = panel.top + 26 * (j + 0.5), [*ARMS].index(arm)
        parts.append(svg.line(panel.left, y, panel.left + panel.width, y))
        parts += [svg.mark(panel.x(value), y, series, size=4) for value in last]
        shown = f"{mean:.2f}" if last else "not run"
        parts.append(svg.text(panel.left + panel.width + 12, y + 5, shown))
    return parts


def timeline(firings: Firings, steps: int) -> str:
    """When checks fire: a row for each check, a column for each case, a mark for each seed."""
    cases = [*next(iter(firings.values()))]
    left, top, height = 240, 248, 44
    pitch = (svg.WIDTH - 36 - left) / len(cases)
    width = pitch - 12
    parts = [
        svg.text(20, 32, "The training step at which each check first fires", "big"),
        svg.text(20, 58, f"One mark per seed; each column runs from update 0 to {steps}.", "small"),
        svg.mark(27, 79, _FIRES),
        svg.text(42, 84, "fires", "small"),
        svg.mark(97, 79, _ALSO_HEALTHY),
        svg.text(110, 84, "fires, but also on healthy runs (false positives)", "small"),
        _bar(473, 79),
        svg.text(482, 84, "fires before the first update", "small"),
    ]
    for j, case in enumerate(cases):
        across, rows = Axis(0, steps), Axis(0, len(firings))
        panel = Panel(left + j * pitch, top, width, height * len(firings), across, rows)
        bottom = top + panel.height
        parts.append(svg.text(panel.left + 12, top - 8, called(case), turned=-55))
        for step in (0, steps):
            parts.append(svg.line(panel.x(step), top, panel.x(step), bottom))
            anchor = "end" if step else "start"
            parts.append(svg.text(panel.x(step), bottom + 20, svg.number(step), "small", anchor))
        for i, row in enumerate(firings.values()):
            y = top + height * (i + 0.5)
            parts.append(svg.line(panel.left, y, panel.left + width, y))
            healthy = row.get(HEALTHY)
            series = _ALSO_HEALTHY if healthy and healthy.fired else _FIRES
            parts += _marks(row.get(case), series, panel, y)
    for i, name in enumerate(firings):
        y, guard = top + height * (i + 0.5), GUARDS[name]
        parts.append(svg.text(20, y - 3, guard.who, "head" if name in OURS else ""))
        parts.append(svg.text(20, y + 15, guard.rule, "small"))
    size = svg.WIDTH, top + height * len(firings) + 36
    about = "A row for each check, a column for each case; the table has the numbers."
    return svg.picture(*size, "When checks fire", about, parts)


_FIRES, _ALSO_HEALTHY = 1, 4  # series, with their shapes


def _bar(x: float, y: float) -> str:
    return f'<rect class="f3" x="{x - 7:.1f}" y="{y - 10:.1f}" width="6" height="20"/>'


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


_LEAST = 1e-5  # a smaller value is drawn at the edge
NOTHING = 1e-9  # a bias or bound below is 0 up to rounding: no weight was cut


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
    """The true bias against its bound, and against two metrics of other projects; all log-log.

    Only the arm without a correction: each of its checkpoints is evaluated under every weighting.
    """
    points = [p for p in points if p.arm == "none"]
    up = Axis.powers([p.bias for p in points if p.bias > _LEAST])
    bounds = Axis.powers([p.bound for p in points if p.bound > _LEAST])
    size, top, left = 232, 156, 66
    parts = [
        svg.text(20, 32, "The true bias of the gradient against its bound and two metrics", "big"),
        svg.text(
            20,
            58,
            "Vertical axis: the bias, as the mean norm over tokens of estimator minus target. "
            f"Smaller than {svg.number(_LEAST, log=True)}: at the edge.",
            "small",
        ),
        *svg.legend(20, 92, [*enumerate(WEIGHTINGS.values())]),
    ]
    panel = Panel(left, top, size, size, bounds, up)
    parts += panel.frame("bias and bound", "bound A × G × D")
    ends = max(bounds.low, up.low), min(bounds.high, up.high)
    parts.append(
        svg.line(panel.x(ends[0]), panel.y(ends[0]), panel.x(ends[1]), panel.y(ends[1]), "edge")
    )
    parts.append(svg.text(panel.left + 10, panel.top + 20, "dashed: bias = bound", "small"))
    parts += _dots(panel, [(p.bound, p) for p in points])
    plain = [p for p in points if p.weighting == "none" and p.seen]
    for i, (name, label) in enumerate(_METRICS, 1):
        across = Axis.powers([p.seen[name] for p in plain])
        panel = Panel(left + i * (size + 36), top, size, size, across, up)
        parts += panel.frame(f"bias and {label.split(',')[0]}", label, numbers=False)
        parts += _dots(panel, [(p.seen[name], p) for p in plain])
    about = (
        f"{len(points)} pairs of bias and bound, all below the diagonal where they meet; and "
        f"{len(plain)} uncorrected ones against mean |d| and mean k3 of the same step."
    )
    return svg.picture(svg.WIDTH, top + size + 60, "Bias and bound", about, parts)


def _dots(panel: Panel, placed: Sequence[tuple[float, Point]]) -> list[str]:
    series = [*WEIGHTINGS]
    return [
        svg.mark(
            panel.x(x),
            panel.y(point.bias),
            series.index(point.weighting),
            f"{called(point.case)}, seed {point.seed}, step {point.step}",
            3.6,
        )
        for x, point in placed
    ]
