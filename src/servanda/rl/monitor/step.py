# A step: the verdict on one training step's tokens, the actions, and the metrics to log.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.actions import ACTIONS
from servanda.contract.model import WHOLE, Contract
from servanda.errors import ContractError
from servanda.judgement.breakdown import Advice
from servanda.judgement.clauses.base import CellVerdict, Outcome
from servanda.judgement.clauses.gradient import psi_of
from servanda.judgement.escalation import action_of, rules_met
from servanda.judgement.field_rules import RULES, RuleSums
from servanda.judgement.slices.atoms import atoms_of
from servanda.judgement.slices.rules import Cut
from servanda.judgement.verdict import (
    EXIT_CODES,
    BlindSpot,
    Verdict,
    html_of,
    objection,
    refuted,
    remarks,
)
from servanda.report.cell_text import worst_promise
from servanda.rl.dumps.checks import unasked
from servanda.rl.follow.follow_step import FollowStep
from servanda.rl.monitor.batch import Batch, BatchFields
from servanda.rl.monitor.ranks import Part, drafts_of, extras_of, weighed_of
from servanda.rl.monitor.state_file import SCHEMA, RunState
from servanda.rl.monitor.statistics import draft_metrics, notes_on, usable
from servanda.rl.steps.drift import TokenSum, Trend
from servanda.rl.steps.judge import (
    NO_TOKEN,
    Atoms,
    StepJudge,
    StepSums,
    StepVerdict,
    fewest,
    limits_of,
)
from servanda.rl.trend.changes import PREFIX, StepScalars, scalars_of
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
        generation: how many were observed before in the same step: 0 unless it has several.
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
    generation: int = field(default=0, kw_only=True)
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
            "generation": step.generation,
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
    rules = sum((part.rules for part in parts), RuleSums())
    for rule in RULES:
        value = rule.value(rules)
        if value is not None and math.isfinite(value):
            metrics[rule.metric] = value
    scalars = sum((part.scalars for part in parts), StepScalars()).values
    return {**{f"{PREFIX}{name}": value for name, value in scalars.items()}, **metrics}


# The verdict on a step of a monitor, from the parts of all ranks, and its likely cause in one line.


BEFORE_AN_UPDATE = (
    "before the first update: kernels, prompts, logprob mode or another checkpoint, not the sync"
)
_NO_TEXTS = BlindSpot(
    "data", f"a monitor does not examine {unasked()}: `servanda check` of a dump does"
)


def blind_spots(judged: int, offered: int, left_out: Sequence[str]) -> list[BlindSpot]:
    """The sequences that were not scored, and the omitted slices."""
    share = [BlindSpot("sample", selection(judged, offered))] if offered > judged else []
    slices = (BlindSpot("slice", text) for text in left_out)
    return [*share, *slices, _NO_TEXTS]


def cause_text(found: StepVerdict, advice: Advice | None, weights: int) -> str:
    """The likely cause of a violated step, or the problem of its data; "" if none.

    Args:
        weights: number of updates of the trainer.
    """
    if found.errors:
        return found.errors[0]
    cells = (c for c in found.quick.cells if c.enforced and c.outcome == "violated")
    early = not weights and any(c.section == "statistical" for c in cells)
    causes = ["" if advice is None else advice.cause, BEFORE_AN_UPDATE if early else ""]
    return "; ".join(filter(None, causes))


def judged(
    judge: StepJudge,
    state: RunState,
    parts: Sequence[Part],
    groups: Mapping[str, TokenSum],
    step: int,
    generation: int,
    follow: FollowStep | None,
    look: Callable[[], Sequence[str]],
) -> tuple[StepVerdict, DraftCounts, dict[str, float], list[str]]:
    """Judge a step from the parts of all ranks.

    Args:
        step: its number in the trainer's log; generation: its number in the step.
        look: finds out why the data of a red step is no evidence.

    Returns:
        The verdict, what the engines counted, the metrics of drafts, loss and versions, and notes
        about the data and about steps that are judged together.
    """
    plan, weights = judge.plan, parts[0].weights
    own = weighed_of(plan, parts, len(groups))
    drafts, alpha = drafts_of(parts), 1 - plan.contract.confidence
    problems, notes, metrics = extras_of(plan, parts, weights)
    metrics |= draft_metrics(drafts, state.drafts, weights, alpha)
    notes += notes_on(metrics)
    wrong = [problem for part in parts for problem in part.unsound]
    if copied := objection(plan.contract, own.agreement):
        wrong.append(copied)
    else:
        notes += remarks(plan.contract, own.agreement)
    if not own.tokens:
        notes.append(NO_TOKEN)
    thin = 0 < own.tokens < judge.enough and judge.size > 1
    if thin and not judge.number:
        notes.append(
            f"a step has about {own.tokens:,} tokens and about {judge.enough:,} decide: what a "
            f"step does not decide is judged on the last {judge.size:,} steps together"
        )
    found = judge.add(StepSums(step, own, generation=generation), [*wrong, *problems], look)
    found = found.beside(blind_spots(own.sequences, sum(p.offered for p in parts), state.left_out))
    beside = [*refuted(plan.contract, own.agreement)]
    notes += [cell.note for cell in beside]
    if state.chart is not None:
        measured = metrics_of(parts, groups) | metrics | of_cells(found.quick)
        measured |= follow.metrics if follow is not None else {}
        values = {} if found.quick.outcome == "error" else scalars_of(measured)
        beside += state.chart.add(weights, values, generation)
    found = found.compared(beside) if beside else found
    return found, drafts, metrics, notes


# Actions: the actions of a contract's rules for a verdict, and the resulting token weights.


@dataclass(frozen=True)
class DueActions:
    """The actions of rules.

    Args:
        action: names, in the order of the rules, each once.
        pages: whom to notify.
        sample: the share of sequences to keep from now on; None: unchanged.
        masked: names of the slices to exclude.
    """

    action: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    sample: float | None = None
    masked: tuple[str, ...] = ()


def named_actions(contract: Contract) -> set[str]:
    """Every action of the contract's rules, or the default without rules."""
    return {*_named(contract)} if contract.escalation else {*possible_actions(contract)}


def _named(contract: Contract) -> list[str]:
    return [action_of(entry)[0] for rule in contract.escalation for entry in rule.do]


def due_actions(
    contract: Contract, verdict: Verdict, names: Sequence[str], atoms: Atoms
) -> DueActions:
    """The actions for a verdict; without rules only the declared weighting.

    Args:
        names: names of all slices, in the order of the bits of `atoms`.
    """
    if not contract.escalation:
        return DueActions(possible_actions(contract))
    values: dict[str, list[str]] = {}
    masked: list[str] = []
    for rule, cells in rules_met(contract, verdict.cells):
        # exclude slices so that the rest is within the limits of these cells
        limits = limits_of(cell for cell in cells if cell.outcome == "violated")
        for entry in rule.do:
            name, value = action_of(entry)
            if name == "mask":
                red = fewest(names, limits, atoms)
                masked += red
                if not red:
                    continue  # the whole exceeds its limit, and no slice explains it
            if _is_taken(name):
                values.setdefault(name, []).append(value)
    return DueActions(
        tuple(values),
        tuple(dict.fromkeys(values.get("page", ()))),
        max(map(float, values.get("sample", ())), default=None),
        tuple(dict.fromkeys(masked)),
    )


def _is_taken(name: str) -> bool:
    """Whether a trainer executes an action."""
    return name in ACTIONS and "rl" in ACTIONS[name].doors


def possible_actions(contract: Contract) -> tuple[str, ...]:
    """The trainer's actions that a contract may request, each once."""
    if not contract.escalation:
        declared = contract.gradient is not None and contract.gradient.weighting is not None
        return ("correct",) if declared else ()
    return tuple(dict.fromkeys(filter(_is_taken, _named(contract))))


def action_metrics(taken: DueActions, contract: Contract) -> dict[str, float]:
    """Metrics for the log: 1 or 0 for each action that the contract may request."""
    names = possible_actions(contract)
    return {f"servanda/action/{name}": float(name in taken.action) for name in names}


def check_selection(contract: Contract, batch: Batch) -> None:
    """Refuse to correct tokens that were not scored.

    Raises:
        ContractError: the contract corrects tokens, and some sequences were not selected.
    """
    if "correct" in named_actions(contract) and batch.selected < batch.sequences:
        raise ContractError(
            f"the contract says correct, which needs every token, and {batch.selected} of "
            f"{batch.sequences} sequences are selected",
            hint="score every sequence, or use a contract that does not correct",
        )


def token_weights(
    contract: Contract, taken: DueActions, batch: Batch, masked: Sequence[Cut]
) -> Array:
    """The factor of each token's loss, [B, T], float32.

    0 outside the mask, for unusable logprobs, and in excluded slices; psi(w) if tokens are
    corrected, else 1.  A sequence that was not selected has no logprobs: 0 in excluded slices,
    else 1.

    Args:
        masked: the excluded slices.
    """
    batch = batch.on_host
    with np.errstate(invalid="ignore", over="ignore"):
        used_BT = batch.learns_BT & (usable(batch) | ~batch.selected_B[:, None])
        if masked:
            atoms = atoms_of(masked, BatchFields(replace(batch, mask_BT=batch.learns_BT)))
            out_A: Array = np.any(atoms.inside_CA, axis=0)
            used_BT &= ~out_A[atoms.atom]
        if "correct" not in taken.action:
            return used_BT.astype(np.float32)
        ratio_BT = batch.logp_train_BT.astype(np.float64) - batch.logp_infer_BT
        weight_BT = psi_of(contract).weight(np.exp(ratio_BT))
        return np.where(used_BT, weight_BT, 0.0).astype(np.float32)
