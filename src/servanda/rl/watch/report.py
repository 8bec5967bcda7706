# The output of a watch: one line per step, a few lines per transition, one at the end.

from __future__ import annotations

from servanda.report.cell_text import GLYPH
from servanda.report.format import count, line, percent
from servanda.rl.trend.run_chart import TREND
from servanda.rl.watch.step import WatchedStep
from servanda.rl.watch.transitions import LOST, VIOLATED, Alert, WatchState, number, trend_words

_MARK = {"error": "✗", "warning": "!", "info": "✓"}


def step_line(step: WatchedStep) -> str:
    """Step, outcome, worst cell, its number with its limit, trend."""
    parts = [f"step {step.step:<6} {GLYPH[step.outcome]} {step.outcome:<13}"]
    worst = step.worst()
    if step.outcome == "error":
        parts.append(line(step.why))
    elif worst is not None:
        place = line(step.where(worst))
        parts.append(
            trend_words(worst)
            if worst.section == TREND
            else f"{worst.clause}, {place}: {number(worst)}"
        )
    else:
        parts.append("no trained token")
    if step.trend is not None:
        parts.append(f"trend x{step.trend.ratio:.2f}")
    if step.drafts is not None:
        parts.append(f"drafts accepted {percent(step.drafts)}")
    if step.outcome == "inconclusive" and step.needs_tokens is not None:
        has = step.tokens if step.pool is None else step.pool.tokens
        parts.append(f"needs about {count(step.needs_tokens, 'token')}, has {has:,}")
        if step.pool is not None:
            parts.append(f"in {step.pool.steps} of at most {count(step.pool.most, 'step')}")
    if step.follow:
        parts.append(line(step.follow))
    if step.again:
        parts.append("written again")
    return "  ".join(part for part in parts if part).rstrip()


def alert_lines(alert: Alert) -> list[str]:
    head, *rest = (line(text) for text in alert.lines())
    return [f"  {_MARK[alert.level]} {head}", *(f"    {text}" for text in rest)]


def last_line(state: WatchState) -> str:
    if state.step is None:
        return "no complete step was found"
    counts = ", ".join(f"{n} {outcome}" for outcome, n in state.counts.items())
    steps = count(state.steps, "step")
    parts = [f"watched {steps}, {state.first} to {state.step}: {counts}"]
    for name, what in ((VIOLATED, "red"), (LOST, "logprob coverage lost")):
        if name in state.flags:
            parts.append(f"{what} since step {state.flags[name].since}")
    if state.stop is None:
        parts.append("would not have stopped")
    else:
        parts.append(f"would have stopped at step {state.stop}")
    return " · ".join(parts)
