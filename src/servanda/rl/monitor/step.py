# A step: the verdict on one training step's tokens, the actions, and the metrics to log.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from servanda.contract.model import WHOLE
from servanda.judgement.clauses.base import CellVerdict, Outcome
from servanda.judgement.verdict import EXIT_CODES, Verdict
from servanda.judgement.verdict_table import html_of
from servanda.report.cell_text import worst_promise
from servanda.rl.follow.follow_step import FollowStep
from servanda.rl.monitor.ranks import Part
from servanda.rl.monitor.state_file import SCHEMA
from servanda.rl.steps.drift import TokenSum, Trend
from servanda.rl.trend.step_scalars import PREFIX, StepScalars
from servanda.theory.stats.draft_counts import DraftCounts
from servanda.traces.serialization import to_plain

Array = NDArray[Any]

CHANGE = "servanda/change"  # the largest statistic of the trend as a multiple of its threshold


@dataclass(frozen=True)
class Step:
    """The result of `Monitor.observe`; the same on every rank, except token weights and notes.

    Args:
        weights: number of updates of the trainer.
        outcome: holds, violated, inconclusive or error.
        action: actions to execute now, in the order of the contract's rules.
        would: actions of rules that are not enabled: halt, without `stop=True`.
        pages: people to notify, according to rules.
        masked: slices whose tokens are excluded from the loss.
        metrics: metrics to log; numbers that were not measured are absent.
        cause: likely cause of the violated slices, or the problem of the data; "" if none.
        notes: omitted parts, with the reasons.
        step: the number of the step in the trainer's log; by default `weights`.
        drafts: what the engines of all ranks counted of their speculative decoding.
        follow: whether the engine follows the trainer; None: not observed.
    """

    weights: int
    outcome: Outcome
    action: tuple[str, ...]
    would: tuple[str, ...]
    pages: tuple[str, ...]
    masked: tuple[str, ...]
    _token_weights: Callable[[], Array]
    metrics: Mapping[str, float]
    cause: str
    notes: tuple[str, ...]
    _verdict: Callable[[], Verdict]
    _trend: Callable[[], Trend | None]
    step: int = field(default=0, kw_only=True)
    drafts: DraftCounts = field(default=DraftCounts(), kw_only=True)
    follow: FollowStep | None = field(default=None, kw_only=True)

    def joined(self, follow: FollowStep | None) -> Step:
        """This step with the conclusion about its engine, which may be the worse one.

        Only a violation counts: undecided is no property of this step's tokens.
        """
        if follow is None:
            return self
        metrics = {**self.metrics, **follow.metrics}
        if follow.outcome != "violated":
            return replace(self, follow=follow, metrics=metrics)
        metrics["servanda/exit_code"] = float(follow.exit_code)
        cause = "; ".join(filter(None, (follow.sentence, self.cause)))
        return replace(self, outcome="violated", cause=cause, follow=follow, metrics=metrics)

    @cached_property
    def token_weights(self) -> Array:
        """Factor of each token's loss, [B, T], float32, for this rank; 0 outside the mask."""
        return self._token_weights()

    @cached_property
    def verdict(self) -> Verdict:
        """The complete verdict with intervals, computed at first access."""
        return self._verdict()

    @cached_property
    def trend(self) -> Trend | None:
        """The ratio of the last steps' drift to that of the first five; None if too few."""
        return self._trend()

    @property
    def exit_code(self) -> int:
        """0 holds, 1 violated, 3 inconclusive, 4 error."""
        return EXIT_CODES[self.outcome]

    @cached_property
    def worst(self) -> CellVerdict | None:
        """The worst enforced cell: violated ones first, then by the ratio of value to limit.

        None without a measured number.
        """
        return worst_promise(self.verdict.cells)

    @property
    def needs_tokens(self) -> int | None:
        """Approximate number of tokens that such a step needs for a decision; None if decided."""
        return self.verdict.needs_tokens if self.outcome == "inconclusive" else None

    def __str__(self) -> str:
        needs = self.needs_tokens
        short = "" if needs is None else f"\n{too_few(needs, self.verdict)}"
        follow = "" if self.follow is None else f"\nfollow   {self.follow}"
        return f"{self.verdict}{short}{follow}"

    @property
    def tokens(self) -> int:
        """Trained tokens of this step."""
        return int(self.metrics["servanda/observed_tokens"])

    def _repr_html_(self) -> str:
        return html_of(self)


def too_few(needs: int, verdict: Verdict) -> str:
    """The sentence about an inconclusive step's missing tokens."""
    spans = (c.steps for c in verdict.cells if c.steps is not None and c.slice == WHOLE)
    first, last = next(spans, (0, 0))
    has = f"steps {first} to {last} together have" if first < last else "this one has"
    return f"a step needs about {needs:,} tokens to be decided, and {has} {verdict.tokens:,}"


def selection(judged: int, offered: int) -> str:
    """The sentence about sequences that were not scored.

    >>> selection(30, 512)
    'judged on 30 of 512 sequences, selected before scoring'
    """
    return f"judged on {judged:,} of {offered:,} sequences, selected before scoring"


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
            "step": step.step,
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
            "tokens": step.tokens,
            "judged": verdict.tokens,
            "needs_tokens": step.needs_tokens,
            "sequences": verdict.sequences,
            "cells": [_cell(c) for c in verdict.cells if c.outcome != "not applicable"],
            "metrics": dict(step.metrics),
            **({"drafts": asdict(step.drafts)} if step.drafts.drafts else {}),
            **({} if step.follow is None else {"follow": step.follow.to_plain()}),
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
        "steps": cell.steps,
        "severity": cell.severity,
    }


def of_cells(verdict: Verdict) -> dict[str, float]:
    """The metrics of a verdict: each clause on the whole, and on its worst slice."""
    red = [c for c in verdict.cells if c.enforced and c.outcome == "violated"]
    metrics = {
        "servanda/exit_code": float(verdict.exit_code),
        "servanda/violated_cells": float(len(red)),
    }
    for cell in verdict.cells:
        if cell.section == "trend" and cell.value is not None:
            metrics[CHANGE] = max(cell.value, metrics.get(CHANGE, 0.0))
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
    parts: Sequence[Part], groups: Mapping[str, TokenSum], ratio: float | None = None
) -> dict[str, float]:
    """The metrics to log, only measured ones."""
    tokens, usable = (sum(getattr(p, name) for p in parts) for name in ("tokens", "usable"))
    metrics = {
        "servanda/observed_tokens": float(tokens),
        "servanda/observed_sequences": float(sum(p.sequences for p in parts)),
        "servanda/unusable_tokens": float(tokens - usable),
    }
    judged, offered = (sum(getattr(p, name) for p in parts) for name in ("sequences", "offered"))
    if judged < offered:
        metrics["servanda/share"] = judged / offered
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
        # an infinite weight is not logged
        if gaps and all(math.isfinite(g[i]) for g in gaps):
            mean = math.fsum(g[i] for g in gaps) / sum(g[2] for g in gaps)
            metrics[f"servanda/contribution/{sign}"] = mean
    if ratio is not None:
        metrics["servanda/trend"] = ratio
    scalars = sum((part.scalars for part in parts), StepScalars()).values
    return {**{f"{PREFIX}{name}": value for name, value in scalars.items()}, **metrics}
