# Findings: what two servers have in common on one layer above the kernel, and what not.

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Layer = Literal["servers", "defaults", "tokenizer", "chat template", "tool calls"]
Outcome = Literal["same", "differs", "unknown"]


@dataclass(frozen=True)
class LayerResult:
    """One layer of two servers.

    Args:
        outcome: unknown where one of them does not say: that is no agreement.
        text: what was compared, and found.
        first: the first case that differs, both sides; "" where none does.
        fails: whether what differs is a difference of what they serve; what a client can
            send away, such as a default that every request overrides, is told and fails nothing.
    """

    layer: Layer
    outcome: Outcome
    text: str
    first: str = ""
    fails: bool = True


def differs(findings: Iterable[LayerResult]) -> tuple[LayerResult, ...]:
    """The layers on which two servers do not serve alike."""
    return tuple(f for f in findings if f.outcome == "differs" and f.fails)
