# A step: the verdict on one training step's tokens, what is to be done, and the numbers to log.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from servanda.contract.model import WHOLE
from servanda.judgement.clauses.base import CellVerdict, Outcome
from servanda.judgement.verdict import EXIT_CODES, Verdict
from servanda.judgement.verdict_table import html_of
from servanda.report.cell_text import worst_promise
from servanda.rl.dumps.steps import TokenSum, Trend
from servanda.rl.monitor.ranks import Part
from servanda.rl.monitor.state_file import SCHEMA
from servanda.traces.serialization import to_plain

Array = NDArray[Any]


@dataclass(frozen=True)
class Step:
    """What `Monitor.observe` answers; every rank has the same but for token weights and notes.

    Args:
        weights: updates that the trainer had made.
        outcome: holds, violated, inconclusive or error.
        action: what is to be done now, in the order of the contract's rules.
        would: what rules say and was not switched on: halt, without `stop=True`.
        pages: whom rules say to notify.
        masked: slices whose tokens are left out of the loss.
        token_weights: what each token's loss is to be multiplied by, [B, T], float32, of this
            rank; 0 outside the mask.
        metrics: to log; a number that was not measured is not there.
        cause: what the red slices look like, or what is wrong with the data; "" of neither.
        notes: what was left out, and why.
    """

    weights: int
    outcome: Outcome
    action: tuple[str, ...]
    would: tuple[str, ...]
    pages: tuple[str, ...]
    masked: tuple[str, ...]
    token_weights: Array
    metrics: Mapping[str, float]
    cause: str
    notes: tuple[str, ...]
    _verdict: Callable[[], Verdict]
    _trend: Callable[[], Trend | None]

    @cached_property
    def verdict(self) -> Verdict:
        """The whole verdict, intervals included: worked out when it is first looked at."""
        return self._verdict()

    @cached_property
    def trend(self) -> Trend | None:
        """How the last steps' drift compares with that of the first five; None before there are."""
        return self._trend()

    @property
    def exit_code(self) -> int:
        """0 holds, 1 violated, 3 inconclusive, 4 error."""
        return EXIT_CODES[self.outcome]

    @cached_property
    def worst(self) -> CellVerdict | None:
        """The enforced cell to look at first: violated ones, then by value against limit.

        None where no number was measured.
        """
        return worst_promise(self.verdict.cells)

    @property
    def needs_tokens(self) -> int | None:
        """About how many tokens a step like this one needs to be decided; None where it is."""
        return self.verdict.needs_tokens if self.outcome == "inconclusive" else None

    def __str__(self) -> str:
        needs = self.needs_tokens
        short = "" if needs is None else f"\n{too_few(needs, self.verdict.tokens)}"
        return f"{self.verdict}{short}"

    def _repr_html_(self) -> str:
        return html_of(self)


def too_few(needs: int, tokens: int) -> str:
    """What an inconclusive step lacks.

    >>> too_few(288, 192)
    'a step needs about 288 tokens to be decided, and this one has 192'
    """
    return f"a step needs about {needs:,} tokens to be decided, and this one has {tokens:,}"


def state_line(step: Step, at: float) -> dict[str, Any]:
    """A step as one line of the state file.

    Args:
        at: seconds since 1970.
    """
    verdict = step.verdict
    return to_plain(
        {
            "schema": SCHEMA,
            "weights": step.weights,
            "at": at,
            "name": verdict.contract,
            "contract": verdict.key.contract,
            "outcome": step.outcome,
            "action": step.action,
            "would": step.would,
            "pages": step.pages,
            "masked": step.masked,
            "cause": step.cause,
            "notes": step.notes,
            "tokens": verdict.tokens,
            "needs_tokens": step.needs_tokens,
            "sequences": verdict.sequences,
            "cells": [_cell(c) for c in verdict.cells if c.outcome != "not applicable"],
            "metrics": dict(step.metrics),
        }
    )


def _cell(cell: CellVerdict) -> dict[str, Any]:
    low, high = cell.interval or (None, None)
    return {
        "clause": cell.clause,
        "slice": cell.slice,
        "metric": cell.metric,
        "aggregate": cell.aggregate,
        "outcome": cell.outcome,
        "value": cell.value,
        "low": low,
        "high": high,
        "limit": cell.limit,
        "threshold": cell.threshold,
        "n": cell.n,
        "missing": cell.missing,
        "enforced": cell.enforced,
        "severity": cell.severity,
    }


def _of_cells(verdict: Verdict) -> dict[str, float]:
    """The numbers of a verdict to log: each promise on the whole, and where it is worst."""
    red = [c for c in verdict.cells if c.enforced and c.outcome == "violated"]
    metrics = {
        "servanda/exit_code": float(verdict.exit_code),
        "servanda/violated_cells": float(len(red)),
    }
    for cell in verdict.cells:
        if cell.section != "statistical" or cell.value is None:
            continue
        name = f"servanda/{cell.clause}"
        if cell.slice == WHOLE:
            metrics[name] = cell.value
        else:
            name = f"{name}/worst_slice"
            metrics[name] = max(cell.value, metrics.get(name, cell.value))
    return metrics


def metrics_of(
    verdict: Verdict,
    parts: Sequence[Part],
    groups: Mapping[str, TokenSum],
    ratio: float | None,
) -> dict[str, float]:
    """What to log: only what was measured."""
    tokens, usable = (sum(getattr(p, name) for p in parts) for name in ("tokens", "usable"))
    metrics = {
        "servanda/observed_tokens": float(tokens),
        "servanda/observed_sequences": float(sum(p.sequences for p in parts)),
        "servanda/unusable_tokens": float(tokens - usable),
    }
    if tokens:
        metrics["servanda/coverage"] = usable / tokens
    if usable:
        drift = math.fsum(g.total for g in groups.values())
        metrics["servanda/abs_log_ratio_nats"] = drift / usable
    stale = [p.staleness for p in parts if p.staleness[1]]
    if stale:
        mean = math.fsum(s[0] for s in stale) / sum(s[1] for s in stale)
        metrics["servanda/staleness/mean"] = mean
        metrics["servanda/staleness/max"] = max(s[2] for s in stale)
    gaps = [p.contributions for p in parts if p.contributions[2]]
    for i, sign in enumerate(("positive", "negative")):
        # a weight may be infinite, and is then no number to log
        if gaps and all(math.isfinite(g[i]) for g in gaps):
            mean = math.fsum(g[i] for g in gaps) / sum(g[2] for g in gaps)
            metrics[f"servanda/contribution/{sign}"] = mean
    if ratio is not None:
        metrics["servanda/trend"] = ratio
    return {**metrics, **_of_cells(verdict)}
