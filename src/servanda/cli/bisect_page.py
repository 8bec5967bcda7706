# What `servanda bisect` found, as a page.

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from servanda.cli.bisect_text import HEADS, conclusion, module_name, module_row, outliers
from servanda.report.format import count, number
from servanda.report.html import Sheet, Story, board
from servanda.report.html_shapes import (
    WIDE,
    Markup,
    Scale,
    Tick,
    curve,
    key,
    mark,
    plot,
    spaced,
    toned,
)
from servanda.runner.bisect.module_result import Module, ModuleBisection

_LEGEND = Markup(
    f"{key('violated', 'local error of a module that explains the difference ')}"
    f"{key('inconclusive', 'of another one that differs')}<br>Line: the error of each output in a "
    "run of B, where errors before it arrive as well. Errors are relative to the size of the "
    "tensor in A; what is not above the noise is not marked."
)
_HEIGHT = 240  # pixels
_LAYER = re.compile(r"\.(\d+)(?:\.|$)")


def module_page(found: ModuleBisection) -> str:
    """A self-contained page: the errors along the model, and the modules that differ."""
    rows = sorted(found.modules, key=lambda m: (not m.differs, m.share is None, -(m.share or 0.0)))
    logits = (
        f"KL(B || A) is {number(found.kl_nats)} nats per token on {count(found.tokens, 'token')}, "
        f"and {number(found.floor_nats)} between runs of A in other batches."
    )
    sheets = [
        Sheet("Errors along the model", _LEGEND, _picture(found)),
        Sheet("Modules", logits, "", HEADS, [module_row(m) for m in rows]),
    ]
    glyph = "✓" if found.outcome == "same" else "✗"
    answer = "  ".join(f"{line}." for line in (conclusion(found), *outliers(found)))
    text = f"{answer}  B is {found.b}, A is {found.a}."
    return board("Bisection by modules", [Story(f"{glyph} {_head(found)}", text, sheets)])


def _head(found: ModuleBisection) -> str:
    if len(found.cause) == 1:
        return f"The module that differs: {module_name(found.cause[0])}"
    if found.cause:
        return f"{len(found.cause)} modules differ together"
    return {"same": "No difference", "below noise": "No difference of the logits"}.get(
        found.outcome, "Unexplained"
    )


def _picture(found: ModuleBisection) -> Markup:
    modules, last = found.modules, max(len(found.modules) - 1, 1)
    up = Scale.of([v for m in modules for v in (m.error, m.run_error)])

    def at(i: int, error: float) -> tuple[float, float]:
        return 100 * i / last, 100 - up.at(error)

    run = [at(i, m.run_error) for i, m in enumerate(modules) if not math.isnan(m.run_error)]
    shapes = [curve("aside", run)]
    for i, module in enumerate(modules):
        if module.differs:
            tone = "violated" if module.name in found.cause else "inconclusive"
            shapes.append(toned(tone, mark(tone, *at(i, module.error), 3.8)))
    label = f"Errors of modules in the order of execution: {conclusion(found)}."
    return plot(
        label,
        _HEIGHT,
        shapes,
        across=spaced(_layers(modules, last), WIDE),
        up=up.ticks(500),
        titles=("module, in the order of execution", "relative error, log scale"),
    )


def _layers(modules: tuple[Module, ...], last: int) -> Iterator[Tick]:
    """Where each layer begins."""
    seen: set[str] = set()
    for i, module in enumerate(modules):
        match = _LAYER.search(module.name)
        if match and match[1] not in seen:
            seen.add(match[1])
            yield Tick(100 * i / last, f"layer {match[1]}")
