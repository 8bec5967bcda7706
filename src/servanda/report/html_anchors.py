# Names as parts of an address on the page: a place to link to for each cell and section.

from __future__ import annotations

import re
from collections.abc import Iterable

from servanda.judgement.clauses.base import CellVerdict


def anchors(cells: Iterable[CellVerdict]) -> dict[int, str]:
    """The place of each cell on the page, by its index: no two are the same.

    A cell is found by its clause and slice, so a link to it holds for later runs of the contract.
    """
    found: dict[int, str] = {}
    taken: set[str] = set()
    for i, cell in enumerate(cells):
        name = base = f"cell-{slug(cell.clause)}-{slug(cell.slice)}"
        again = 1
        while name in taken:
            again += 1
            name = f"{base}-{again}"
        taken.add(name)
        found[i] = name
    return found


def slug(text: str) -> str:
    """A text as part of an address.

    >>> slug("depth>=16"), slug("Where, worst first")
    ('depth-ge-16', 'where-worst-first')
    """
    for sign, word in ((">=", "-ge-"), ("<", "-lt-"), ("..", "-to-")):
        text = text.replace(sign, word)
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "x"
