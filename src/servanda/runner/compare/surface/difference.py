# The comparison of two servers on one layer above the kernel, and its lines in the output of
# `servanda compare`, before any statistics.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Layer = Literal["servers", "defaults", "tokenizer", "chat template", "tool calls"]
Outcome = Literal["same", "differs", "unknown"]


@dataclass(frozen=True)
class LayerResult:
    """One layer of two servers.

    Args:
        outcome: unknown if one of them does not report it, which is no agreement.
        text: the comparison and its result.
        first: the first case that differs, both sides; "" if none does.
        fails: whether the difference affects responses; a difference that a client can avoid, such
            as a default that every request overrides, is only reported.
    """

    layer: Layer
    outcome: Outcome
    text: str
    first: str = ""
    fails: bool = True


def differs(findings: Iterable[LayerResult]) -> tuple[LayerResult, ...]:
    """The layers on which two servers differ."""
    return tuple(f for f in findings if f.outcome == "differs" and f.fails)


_GLYPH = {"same": "✓", "differs": "✗", "unknown": "?"}
_HEADS = {"chat template": "template", "tool calls": "tools"}


def lines(finding: LayerResult) -> Iterator[str]:
    """The lines of a result: its text, and the first difference."""
    head = _HEADS.get(finding.layer, finding.layer)
    glyph = "!" if finding.outcome == "differs" and not finding.fails else _GLYPH[finding.outcome]
    mark = "" if finding.layer == "servers" else f"{glyph} "
    yield f"{head:<9} {mark}{finding.text}"
    if finding.first:
        yield f"            {finding.first}"


def conclusion(layers: tuple[LayerResult, ...]) -> str:
    """The consequence of different layers; names the lowest one."""
    lowest = layers[0].layer
    if lowest == "tokenizer":
        return (
            "the tokenizers differ: a token id does not mean the same on both servers, so there "
            "is nothing to compare below"
        )
    what = " and the ".join(f.layer for f in layers)
    return (
        f"the {what} differ{'s' if len(layers) == 1 and lowest != 'tool calls' else ''}: clients "
        "get other responses, whatever the kernels do; the comparison below uses token ids, which "
        "bypass it"
    )
