# `servanda tools weights`: what the tensors of one checkpoint hold of another's.

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from servanda.cli.options import FILE, shared, show_as
from servanda.contract.identity import difference_lines
from servanda.engines.folder import config_values, read_json
from servanda.report.format import count, number, percent
from servanda.runner.bisect.weight_layout import (
    MISPLACED,
    SAME,
    Kind,
    TensorOrigin,
    checkpoint_origins,
)

_DIFFERENT = 1
_SHOWN = 8  # lines of a kind
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_KINDS: dict[Kind, str] = {
    "equal": "equal bit for bit in float32",
    "rounded": "equal up to rounding to 8 bits or more",
    "renamed": "equal to a tensor of A that has another name",
    "changed": "another value, as after training or quantisation",
    "scaled": "multiplied by a factor",
    "moved": "in the place of another tensor",
    "repeated": "rows of A that occur more than once",
    "transposed": "transposed",
    "reordered": "rows or columns in another order",
    "other": "nothing of the tensor of this name",
    "not finite": "NaN or infinite",
    "only in A": "only in A",
    "only in B": "only in B",
}


@click.command("weights")
@click.argument("a", metavar="A", type=FILE)
@click.argument("b", metavar="B", type=FILE)
@shared("--format", type=click.Choice(["text", "json"]))
def weights_command(a: Path, b: Path, format_: str) -> None:
    """Say what each tensor of checkpoint B holds of checkpoint A.

    A and B are folders with safetensors, such as a model before and after a conversion to a
    trainer's format and back. Tensors are found by their values: an expert in the place of
    another, rows that are interleaved, transposed or repeated, and a factor are named. Neither
    model is run.
    """
    found = checkpoint_origins(a, b)
    config = _config(a, b)
    same = not config and all(origin.kind in SAME for origin in found)
    data = {"same": same, "config": config, "tensors": found}
    show_as(format_, data, "\n".join(_lines(a, b, found, config)))
    sys.exit(0 if same else _DIFFERENT)


def _config(a: Path, b: Path) -> list[str]:
    """How the config.json of B differs, if both folders have one."""
    files = [folder / "config.json" for folder in (a, b)]
    if not all(file.is_file() for file in files):
        return []
    one, other = (config_values(read_json(file)) for file in files)
    return difference_lines("config.json differs", one, other, sides="A / B")


def _lines(a: Path, b: Path, found: Sequence[TensorOrigin], config: Sequence[str]) -> Iterator[str]:
    yield f"weights   {b}  (B) against  {a}  (A)"
    for kind, meaning in _KINDS.items():
        of_kind = [origin for origin in found if origin.kind == kind]
        if not of_kind:
            continue
        by = ""
        if kind in ("rounded", "changed"):
            errors = [origin.error for origin in of_kind]
            by = f", by {number(min(errors))} to {number(max(errors))} of their norm"
        glyph = "✓" if kind in SAME else "✗" if kind != "changed" else "~"
        yield f"{glyph} {count(len(of_kind), 'tensor')}: {meaning}{by}"
        if kind not in ("equal", "rounded", "changed"):
            yield from _named(of_kind)
    yield from (f"✗ {line}" for line in config)
    but = ", but config.json differs" if config else ""
    yield f"answer    {conclusion(found)}{but}"


def conclusion(found: Sequence[TensorOrigin]) -> str:
    """The answer in one sentence."""
    kinds = {origin.kind for origin in found}
    wrong = [origin for origin in found if origin.kind in MISPLACED]
    if wrong:
        of = f"{len(wrong)} of {count(len(found), 'tensor')}"
        return f"the conversion puts weights in wrong places, or scales them: {of}"
    if kinds <= {*SAME}:
        up_to = "" if kinds <= {"equal", "renamed"} else ", up to rounding"
        return f"the weights of B are those of A{up_to}"
    if kinds <= {*SAME, "changed"}:
        return "B has other weights than A, each in its place"
    return "B is not A: see the tensors that are marked ✗"


def _named(of_kind: Sequence[TensorOrigin]) -> Iterator[str]:
    """Tensors that differ by the numbers in their names, and in nothing else, on one line."""
    alike: dict[str, list[TensorOrigin]] = {}
    for origin in of_kind:
        text = f"{_LAYER.sub('*', origin.name)}{_LAYER.sub('*', _held(origin))}"
        alike.setdefault(text, []).append(origin)
    for origins in [*alike.values()][:_SHOWN]:
        first = origins[0]
        more = f"  (and {len(origins) - 1} more such)" if len(origins) > 1 else ""
        yield f"    {first.name}{_held(first)}{more}"
    if len(alike) > _SHOWN:
        yield f"    and {len(alike) - _SHOWN} more; --format json has all"


def _held(origin: TensorOrigin) -> str:
    if origin.kind == "other" and not origin.detail:
        return f"  {percent(origin.error)} of its norm away"
    return f"  {origin.text}" if origin.text and origin.kind != "transposed" else ""
