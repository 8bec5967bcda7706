# Faults x checks as Markdown: the short table, and all rows.

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.experiment.alarms import GUARDS, HEALTHY, NEVER, OURS, Firing, Firings
from benchmarks.experiment.pictures import called

# the rows of the short table: every check unless another row fires within a step or two of it
SHORT = (
    *("slime", "miles", "nemo-tme", "nemo-kl", "nemo-sequence", "prime-rl", "verl-bad"),
    *("verl-normal", "verl-health", "tinker", "trend", "change", "follow", "monitor", "drill"),
)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; bars inside a cell are escaped.

    >>> print(markdown(("check", "first"), [("|d| > 0.1", "3")]))
    | check | first |
    |---|---|
    | &#124;d&#124; > 0.1 | 3 |
    """
    cells = [[cell.replace("|", "&#124;") for cell in row] for row in (head, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def faults_by_guards(firings: Firings, names: Sequence[str]) -> str:
    """The first step at which each check fires, case by case.

    Brackets mark a check that also fires on healthy runs.
    """
    names = [name for name in names if name in firings]
    shown = [*firings[names[0]]]
    others = [case for case in shown if case != HEALTHY]
    head = ("check", "fires when", "on healthy runs", *map(called, others))
    seeds = [len(told.first) if (told := firings[names[0]][case]) else 0 for case in shown]
    rows = [("runs", "", *map(str, seeds))]
    for name in names:
        told, guard = firings[name], GUARDS[name]
        healthy = told[HEALTHY]
        rows.append(
            (
                f"**{guard.who}**" if name in OURS else guard.who,
                guard.rule,
                "not run" if healthy is None else healthy.alarms,
                *(_cell(told[case], bool(healthy and healthy.fired)) for case in others),
            )
        )
    return markdown(head, rows)


def _cell(firing: Firing | None, brackets: bool) -> str:
    if firing is None:
        return "not run"
    said = str(firing)
    return f"[{said}]" if brackets and said != NEVER else said
