# Lint of calibration: a fact about all golden positions of a slice at once.

from __future__ import annotations

from collections.abc import Iterator

from servanda.contract.clause import Clause, Relative, Section
from servanda.contract.finding import Finding
from servanda.contract.yaml_reader import Path


def calibration(path: Path, section: Section, clause: Clause) -> Iterator[Finding]:
    """In numerical, with a limit in (0, 1), and without what belongs to single positions."""
    if section != "numerical":
        message = "calibration needs full logits and golden tokens; a sampled token has neither"
        hint = "move the clause to numerical: golden texts say which token was right"
        yield Finding((*path, "metric"), message, hint)
        return
    for name in ("aggregate", "clip"):
        if getattr(clause, name) is not None:
            message = f"calibration is one number for all positions: it takes no {name}"
            yield Finding((*path, name), message, "remove it", key=True)
    if clause.at_least is not None:
        message = "a divergence is kept small: calibration takes at_most"
        hint = "remove at_least" if clause.at_most is not None else "write at_most"
        yield Finding((*path, "at_least"), message, hint, key=True)
        return
    limit = clause.at_most
    if limit is None:
        yield Finding(path, f"clause {clause.id!r} has no limit", "add at_most: 0.02")
    elif isinstance(limit, Relative):
        return
    elif limit >= 1:
        message = f"calibration is at most 1: a limit of {limit:g} can never fail"
        yield Finding((*path, "at_most"), message, "write a limit below 1, such as 0.02")
    elif limit <= 0:
        message = f"calibration is never negative, and rounding alone exceeds {limit:g}"
        yield Finding((*path, "at_most"), message, "write a limit above 0, such as 0.02")
