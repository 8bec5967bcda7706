# Folders of verdicts that were never measured, for tests of their history.

import json
from dataclasses import replace

from tests.report import made

CELLS = {("tv", "all"): 0.01, ("tv", "long"): 0.02, ("tail", "all"): 0.03}


def verdict(n, values=CELLS, *, outcome="holds", floor=0.0, build=0, **changes):
    """The verdict of run n, whose cells have these values."""
    base = made.VERDICTS[outcome]
    cells = [
        made.cell(outcome, clause=clause, slice=name, value=x, limit=0.1, floor=floor)
        for (clause, name), x in values.items()
    ]
    prints = {"infer": {"engine": "vllm", "vllm": f"0.2{build}.0"}}
    return replace(
        base,
        **{
            "cells": (*cells, *made.guards()),
            "evidence": f"{n:032x}",
            "key": replace(base.key, infer=f"{build:x}" * 32),
            "circumstances": replace(base.circumstances, fingerprints=prints),
            **changes,
        },
    )


def write(folder, n, made_, day=None):
    """The run directory of run n, which ended on a day of November."""
    path = folder / f"run-{n:02d}" / "attempt-1" / "verdict.json"
    path.parent.mkdir(parents=True)
    ended = {"ended": f"2026-11-{n + 1 if day is None else day:02d}T03:00:00Z"}
    path.write_text(json.dumps({**made_.to_dict(), **ended}))
    return path


def good(folder, n, spread=0.001):
    """Runs 0 to n - 1, which hold and differ a little."""
    for i in range(n):
        values = {key: x + spread * ((7 * i) % 11) / 11 for key, x in CELLS.items()}
        write(folder, i, verdict(i, values, build=i // 5))
