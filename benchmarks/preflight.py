"""What the sync drill says of syncs that work, and of broken ones: drills of the shipped models.

A trainer in float32, engines of three forms, with adapters and without.  Half an hour on one
core; tests/slow/test_preflight.py holds half of the working syncs, and all faults, to what they
have to say.

    python -m benchmarks.preflight [--write]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from tests.rl.sync_drill.drills import BROKEN, Drill, drilled, expected, named, working

from benchmarks import committed
from servanda.rl.sync_drill.report import Preflight

DOCS = Path(__file__).parents[1] / "docs" / "how-to" / "preflight.md"
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
ADAPTERS = {"": "all weights", "fresh": "LoRA", "trained": "LoRA"}

Done = tuple[Drill, Preflight]


def of_healthy(done: Sequence[Done]) -> Iterator[tuple[str, ...]]:
    """A row for each engine and architecture, with adapters and without."""
    yield (
        *("engine", "model", "trained", "drills", "not clean", "floor, nats"),
        *("randomised, floors", "response slope", "largest residual"),
    )
    rows = _by(done, lambda drill: (drill.form, drill.kind, ADAPTERS[drill.adapters]))
    for (form, kind, trained), pairs in rows.items():
        drills = [found for _, found in pairs]
        groups = [group for found in drills for group in found.groups]
        yield (
            *(form, kind, trained, str(len(drills))),
            str(sum(not clean(found) for found in drills)),
            _span((found.found.floor for found in drills), ".2g"),
            _span((found.poison.distance / found.found.floor for found in drills), ".1f"),
            _span((group.follow for group in groups), ".2f"),
            f"{max(group.residual for group in groups):.1f}",
        )


def of_broken(done: Sequence[Done]) -> Iterator[tuple[str, ...]]:
    """A row for each fault and engine, both architectures together."""
    yield (
        *("fault", "engine", "drills", "named", "randomised, floors"),
        *("slope, not synced", "slope, all others"),
    )
    for (fault, form), drills in _by(done, lambda drill: (drill.fault, drill.form)).items():
        count = sum(named(drill, found) for drill, found in drills)
        deaf, rest = [], []
        for drill, found in drills:
            for group in found.groups:
                lost = group.name in (expected(drill.kind, fault) or ())
                parts = [part.follow for part in group.parts if part.deaf]
                (deaf if lost or parts else rest).extend(parts or [group.follow])
        yield (
            *(fault, form, str(len(drills)), str(count)),
            _span((found.poison.distance / found.found.floor for _, found in drills), ".1f"),
            _span(deaf, ".2f"),
            _span(rest, ".2f"),
        )


def clean(found: Preflight) -> bool:
    """Whether a drill has nothing to say against a sync: no error, no warning, nothing unseen."""
    marked = any(group.mark != "holds" for group in found.groups)
    return found.outcome == "holds" and not found.warnings and not marked


def _by(
    done: Sequence[Done], key: Callable[[Drill], tuple[str, ...]]
) -> dict[tuple[str, ...], list[Done]]:
    rows: dict[tuple[str, ...], list[Done]] = {}
    for drill, found in done:
        rows.setdefault(key(drill), []).append((drill, found))
    return rows


def _span(values: Iterable[float], form: str) -> str:
    """From the least to the greatest, as printed; "" for none."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return ""
    low, high = f"{min(known) + 0.0:{form}}", f"{max(known) + 0.0:{form}}"
    return low if low == high else f"{low} to {high}"


def table(rows: Iterable[tuple[str, ...]]) -> str:
    head, *rest = rows
    lines = [head, tuple("---" for _ in head), *rest]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def page(healthy: Sequence[Done], broken: Sequence[Done]) -> str:
    return f"{table(of_healthy(healthy))}\n\n{table(of_broken(broken))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="into docs/how-to/preflight.md")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    text = page(
        *([(drill, drilled(*drill)) for drill in drills] for drills in (working(8), BROKEN))
    )
    print(text)
    if asked.write:
        committed.write(DOCS, text, "python -m benchmarks.preflight --write", BEGIN, END)


if __name__ == "__main__":
    main()
