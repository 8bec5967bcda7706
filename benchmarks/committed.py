# What a script measured, kept beside the scripts, so that a test can hold the page that shows it
# to it without measuring again: tests/test_committed.py goes over every kept file.
#
# A page shows it between two markers.  Kept are its tables, cell by cell, and the texts between.

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).parent / "measured"
BEGIN, END = "<!-- measured -->", "<!-- end of what is measured -->"


def write(page: Path, text: str, command: str, begin: str = BEGIN, end: str = END) -> None:
    """Keep what was measured, and put it into its page between the markers.

    Raises:
        ValueError: the markers do not stand there once, in order.
    """
    told = {
        "page": str(page.relative_to(ROOT)),
        "command": command,
        "begin": begin,
        "end": end,
        "blocks": blocks(text),
    }
    shown = placed(page.read_text(encoding="utf-8"), told)
    KEPT.mkdir(exist_ok=True)
    name = "".join(c if c.isalnum() else "_" for c in f"{page.stem} {begin[4:-3].strip()}")
    data = json.dumps(told, indent=1, ensure_ascii=False)
    (KEPT / f"{name}.json").write_text(f"{data}\n", encoding="utf-8")
    page.write_text(shown, encoding="utf-8")


def placed(page: str, told: dict[str, Any]) -> str:
    """A page with what was measured between its markers.

    Raises:
        ValueError: the markers do not stand there once, in order.
    """
    before, rest = page.split(told["begin"])
    _, after = rest.split(told["end"])
    return f"{before}{told['begin']}\n{text_of(told['blocks'])}\n{told['end']}{after}"


def blocks(text: str) -> list[Any]:
    """A text as lines, and its tables as rows of cells.

    >>> blocks("a\\n\\n| x | y |\\n|---|---|\\n| 1 | 2 |")
    ['a\\n', {'rule': '|---|---|', 'rows': [['x', 'y'], ['1', '2']]}]
    """
    found: list[Any] = []
    for inside, run in groupby(text.splitlines(), key=lambda line: line.startswith("|")):
        lines = [*run]
        if inside:
            rows = [line[2:-2].split(" | ") for line in (lines[0], *lines[2:])]
            found.append({"rule": lines[1], "rows": rows})
        else:
            found.append("\n".join(lines))
    return found


def text_of(found: Sequence[Any]) -> str:
    """The text of blocks: what `blocks` was given."""
    parts = []
    for block in found:
        if isinstance(block, str):
            parts.append(block)
            continue
        head, *rest = (f"| {' | '.join(row)} |" for row in block["rows"])
        parts.append("\n".join([head, block["rule"], *rest]))
    return "\n".join(parts)
