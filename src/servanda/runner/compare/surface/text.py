# The surface in lines, as `servanda compare` prints them before any statistics.

from __future__ import annotations

from collections.abc import Iterator

from servanda.runner.compare.surface.difference import LayerResult

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
        "are served otherwise, whatever the kernels do; what follows speaks of token ids, which "
        "step around it"
    )
