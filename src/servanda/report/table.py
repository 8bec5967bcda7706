# Tables of text: cells in the columns of a terminal, two spaces apart.

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterator, Sequence

from servanda.report.format import line


def width(text: str) -> int:
    """Columns of a terminal: two for a wide character, none for one that combines.

    >>> width("abc"), width("名前"), width("é")
    (3, 4, 1)
    """
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def cut(text: str, widest: int) -> str:
    """A text on one line, of at most that many columns of a terminal.

    >>> cut("a longer name", 8), cut("名前名前", 6)
    ('a longe…', '名前…')
    """
    text = line(text)
    if width(text) <= widest:
        return text
    shorter = text
    while width(shorter) > widest - 1:
        shorter = shorter[:-1]
    return shorter + "…"


def table(
    rows: Sequence[Sequence[str]], *, right: Collection[int] = (), widest: int = 0
) -> list[str]:
    """A line for each row.

    Args:
        rows: of equally many cells, a heading among them or not.
        right: columns that end together, as numbers do; the others begin together.
        widest: columns of a terminal that a cell may have where another one follows it; 0: any.

    >>> table([("name", "n"), ("名前", "1"), ("x", "10")], right={1})
    ['name   n', '名前   1', 'x     10']
    """
    last = len(rows[0]) - 1
    cells = [[cut(c, widest) if widest and i < last else c for i, c in enumerate(r)] for r in rows]
    widths = [max(map(width, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(_padded(row, widths, right)).rstrip() for row in cells]


def _padded(row: Sequence[str], widths: Sequence[int], right: Collection[int]) -> Iterator[str]:
    for i, (cell, most) in enumerate(zip(row, widths, strict=True)):
        space = " " * (most - width(cell))
        yield space + cell if i in right else cell + space
