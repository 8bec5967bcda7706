# The standard set of clauses, instead of a contract's own.

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node

from servanda.contract.model import WHOLE
from servanda.judgement.plan import Plan
from servanda.judgement.slices.rules import Cut
from servanda.theory.stats.interval import units_at_best


class _Clause(NamedTuple):
    """One clause with a placeholder limit."""

    id: str
    section: str
    text: str
    share: float | None = None  # of a percentile


_SET = (
    _Clause("drift", "numerical", "metric: logit_osc_nats, aggregate: max, at_most: 100"),
    _Clause("tv", "statistical", "metric: tv, aggregate: mean, at_most: 0.99"),
    _Clause("tail", "statistical", "metric: abs_log_ratio_nats, aggregate: p99, at_most: 10", 0.01),
    _Clause(
        "far-tail", "statistical", "metric: abs_log_ratio_nats, aggregate: p99.9, at_most: 10", 1e-3
    ),
    _Clause("k3", "statistical", "metric: k3_nats, aggregate: mean, clip: 1.0, at_most: 0.99"),
    _Clause("reward", "statistical", "metric: reward_drift, at_most: {reward:g}"),
)
_EVERY_SLICE = ("tv",)


def standard(plan: Plan, text: str, without: Collection[str] = ()) -> str:
    """The text of a contract with the standard set as its numerical and statistical sections.

    Omitted are clauses without their declarations (golden texts, a reward), percentiles that even
    identical kernels could not show at these sizes, and the ids in `without`.

    Args:
        plan: plan of the contract; text: its text.
    """
    reward = plan.contract.reward
    width = reward.range[1] - reward.range[0] if reward else 0.0
    wanted = [
        clause for clause in _SET if clause.id not in without and _possible(plan, clause, width)
    ]
    blocks = []
    for section in ("numerical", "statistical"):
        lines = [
            f"  - {{id: {clause.id}, {clause.text.format(reward=0.99 * width)}"
            + ("}" if clause.id in _EVERY_SLICE else f", slices: [{WHOLE}]}}")
            for clause in wanted
            if clause.section == section
        ]
        blocks += [f"{section}:", *lines] if lines else []
    return _replaced(text, "\n".join(blocks) + "\n")


def _possible(plan: Plan, clause: _Clause, width: float) -> bool:
    if clause.id == "drift":
        return plan.golden is not None
    if not plan.schedules or (clause.id == "reward" and not width):
        return False
    if clause.share is None:
        return True
    schedule = plan.schedules[0]
    each = schedule.capacity(Cut(WHOLE)) if plan.contract.claim == "realised" else 1
    needed = units_at_best(clause.share, plan.alpha)
    return needed is not None and needed <= schedule.last * each


def _replaced(text: str, block: str) -> str:
    """The text with its clauses replaced by another block."""
    root = YAML(typ="safe", pure=True).compose(text)
    assert isinstance(root, MappingNode)
    at = None
    for key, value in reversed(root.value):
        if key.value in ("numerical", "statistical"):
            at = key.start_mark.index
            end = text.find("\n", _end(value))
            text = text[:at] + text[end + 1 if end >= 0 else len(text) :]
    if at is None:
        return f"{text}\n{block}"
    return text[:at] + block + text[at:]


def _end(node: Node) -> int:
    """Where the last part of a value ends; that of a block is past the comments after it."""
    if not isinstance(node, CollectionNode) or node.flow_style or not node.value:
        return node.end_mark.index
    last = node.value[-1]
    return _end(last[1] if isinstance(node, MappingNode) else last)
