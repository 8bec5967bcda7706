# Faults x guards as Markdown: the short table, and the rest.

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.experiment.alarms import GUARDS, HEALTHY, NEVER, OURS, Firing, Firings
from benchmarks.experiment.pictures import called

# the rows of the short table: every guard that no other row follows within a step or two
SHORT = (
    *("slime", "miles", "nemo-tme", "nemo-kl", "nemo-sequence", "prime-rl", "verl-bad"),
    *("verl-normal", "verl-health", "tinker", "trend", "monitor", "drill"),
)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a bar inside a cell is written so that it is none of the table's.

    >>> print(markdown(("guard", "first"), [("|d| > 0.1", "3")]))
    | guard | first |
    |---|---|
    | &#124;d&#124; > 0.1 | 3 |
    """
    cells = [[cell.replace("|", "&#124;") for cell in row] for row in (head, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def faults_by_guards(firings: Firings, names: Sequence[str]) -> str:
    """The first step on which each guard fires, case by case.

    A guard that fires on healthy runs as well stands in brackets: its fire says little.
    """
    names = [name for name in names if name in firings]
    shown = [*firings[names[0]]]
    others = [case for case in shown if case != HEALTHY]
    head = ("guard", "fires when", "on healthy runs", *map(called, others))
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
