# Display names of clauses and slices without a contract.

from __future__ import annotations

import re

from servanda.contract.model import WHOLE
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.clauses.whole_responses import MEAN
from servanda.report.cell_text import quantity

# a token clause whose threshold is that of the clip range
_CLIP_NATS = 0.182


def is_gradient(cell: CellVerdict) -> bool:
    """Whether a cell is the mean TV; twice its value bounds the bias of the gradient."""
    return cell.metric == "tv" and cell.threshold is None


def clause(cell: CellVerdict) -> str:
    if is_gradient(cell):
        return "mean total variation (tv)"
    if cell.metric == "abs_log_ratio_nats" and cell.threshold == _CLIP_NATS:
        return "tokens with |Δ logp| > 0.182 (PPO clip)"
    if cell.metric == MEAN:
        return f"responses with mean |Δ logp| > {cell.threshold:g}"
    return quantity(cell)


def where(cell: CellVerdict) -> str:
    """The display name of what a cell is about: its steps, if not all, and its slice."""
    if cell.steps is None:
        return place(cell.slice)
    first, last = cell.steps
    steps = f"step {last}" if first == last else f"steps {first} to {last}"
    return steps if cell.slice == WHOLE else f"{steps}, {place(cell.slice)}"


def place(name: str) -> str:
    """The display name of a slice of a dump.

    >>> place("start-3"), place("turn-4-on"), place("start-2-to-3")
    ('first 3 tokens of turn 3', 'turn 4 and later', 'first 3 tokens of turns 2 to 3')
    >>> place("position=16..64"), place("length>=4096")
    ('response tokens 16 to 64', 'contexts of 4096 tokens and more')
    """
    if name == WHOLE:
        return "all trained tokens"
    if match := re.fullmatch(r"(turn|start|stale)-(\d+)(?:-(on)|-to-(\d+))?", name):
        kind, low, on, high = match.groups()
        if kind == "stale":
            more = " and more" if on else f" to {high}" if high else ""
            return f"tokens {low}{more} updates old"
        turns = f"turns {low} to {high}" if high else f"turn {low}{' and later' if on else ''}"
        return turns if kind == "turn" else f"first 3 tokens of {turns}"
    if match := re.fullmatch(r"(position|length)(?:<(\d+)|=(\d+)\.\.(\d+)|>=(\d+))", name):
        kind, below, low, high, least = match.groups()
        of = "response tokens" if kind == "position" else "contexts of"
        tokens = "" if kind == "position" else " tokens"
        if below:
            return f"{of} {'before' if kind == 'position' else 'fewer than'} {below}{tokens}"
        if least:
            return f"{of} from {least} on" if not tokens else f"{of} {least}{tokens} and more"
        return f"{of} {low} to {high}{tokens}"
    if match := re.fullmatch(r"(env|replica)-(.*)", name):
        return f"{match[1]} {match[2]}"
    return name
