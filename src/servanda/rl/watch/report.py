# Telling: one line a step, a few lines a transition, one at the end.

from __future__ import annotations

from servanda.report.cell_text import GLYPH
from servanda.report.format import line
from servanda.rl.watch.step import Seen
from servanda.rl.watch.transitions import LOST, VIOLATED, Alert, Memory, number

_MARK = {"error": "✗", "warning": "!", "info": "✓"}


def step_line(seen: Seen) -> str:
    """Step, answer, worst cell, its number against its limit, trend."""
    parts = [f"step {seen.step:<6} {GLYPH[seen.outcome]} {seen.outcome:<13}"]
    worst = seen.worst()
    if seen.outcome == "error":
        parts.append(line(seen.why))
    elif worst is not None:
        parts.append(f"{worst.clause}, {line(seen.place(worst.slice))}: {number(worst)}")
    else:
        parts.append("no trained token")
    if seen.trend is not None:
        parts.append(f"trend x{seen.trend.ratio:.2f}")
    if seen.outcome == "inconclusive" and seen.needs_tokens is not None:
        parts.append(f"needs about {seen.needs_tokens:,} tokens, has {seen.tokens:,}")
    if seen.again:
        parts.append("written again")
    return "  ".join(part for part in parts if part).rstrip()


def alert_lines(alert: Alert) -> list[str]:
    """What is printed of a transition."""
    head, *rest = (line(text) for text in alert.lines())
    return [f"  {_MARK[alert.level]} {head}", *(f"    {text}" for text in rest)]


def last_line(memory: Memory) -> str:
    """The run in one line."""
    if memory.step is None:
        return "watched no step"
    counts = ", ".join(f"{n} {outcome}" for outcome, n in memory.counts.items())
    steps = f"{memory.steps} step{'s' if memory.steps > 1 else ''}"
    parts = [f"watched {steps}, {memory.first} to {memory.step}: {counts}"]
    for name, what in ((VIOLATED, "red"), (LOST, "coverage lost")):
        if name in memory.flags:
            parts.append(f"{what} since step {memory.flags[name].since}")
    if memory.stop is None:
        parts.append("would not have stopped")
    else:
        parts.append(f"would have stopped at step {memory.stop}")
    return " · ".join(parts)
