# What two servers have in common on one layer above the kernel, and what not; and the lines of it
# that `servanda compare` prints before any statistics.

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
        outcome: unknown where one of them does not say: that is no agreement.
        text: what was compared, and found.
        first: the first case that differs, both sides; "" where none does.
        fails: whether the difference affects responses; a difference that a client can avoid, such
            as a default that every request overrides, is only reported.
    """

    layer: Layer
    outcome: Outcome
    text: str
    first: str = ""
    fails: bool = True


def differs(findings: Iterable[LayerResult]) -> tuple[LayerResult, ...]:
    """The layers on which two servers do not serve alike."""
    return tuple(f for f in findings if f.outcome == "differs" and f.fails)


_GLYPH = {"same": "✓", "differs": "✗", "unknown": "?"}
_HEADS = {"chat template": "template", "tool calls": "tools"}


def lines(finding: LayerResult) -> Iterator[str]:
    """A finding, and its first difference in a line of its own."""
    head = _HEADS.get(finding.layer, finding.layer)
    glyph = "!" if finding.outcome == "differs" and not finding.fails else _GLYPH[finding.outcome]
    mark = "" if finding.layer == "servers" else f"{glyph} "
    yield f"{head:<9} {mark}{finding.text}"
    if finding.first:
        yield f"            {finding.first}"


def conclusion(layers: tuple[LayerResult, ...]) -> str:
    """What it means that these layers differ; the lowest one is named."""
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
