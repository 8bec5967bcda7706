"""What passive follow says of engines that follow, and of others: training runs of shipped models.

A float32 trainer with AdamW, engines in bfloat16, 640 probe tokens, six syncs.  Half an hour on one
core; with --runs the scores of finished runs are kept and read again.

    python -m benchmarks.follow [--runs FOLDER] [--write]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tests.rl.follow_faults import BROKEN, CAUSES, HEALTHY, HELD, Run, Scores, followed, scored

from benchmarks import committed
from benchmarks.preflight import table
from servanda.rl.follow.follow_step import FollowStep

DOCS = Path(__file__).parents[1] / "docs" / "how-to" / "follow.md"
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
REPLICAS = 8

Done = Sequence[tuple[Run, Scores]]


def recorded(run: Run, folder: Path | None) -> Scores:
    """The scores of a run: read from its file, or computed and kept there."""
    if folder is None:
        return scored(run)
    words = (run.kind, f"{run.rate:g}", run.seed, *run.faults, f"{run.moved:g}", run.steps)
    path = folder / f"{'-'.join(map(str, words))}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        found = scored(run)
        engines = {f"engine {name}": values for name, values in found.engines.items()}
        parts = {f"part {name}": values for name, values in found.parts.items()}
        with path.with_suffix(".new").open("wb") as file:
            np.savez(file, train=found.train, exact=found.exact, **engines, **parts)
        path.with_suffix(".new").replace(path)
    with np.load(path) as file:
        named = {
            kind: {n.removeprefix(kind): file[n] for n in file.files if n.startswith(kind)}
            for kind in ("engine ", "part ")
        }
        return Scores(file["train"], file["exact"], named["engine "], named["part "])


def of_healthy(done: Done) -> Iterator[tuple[str, ...]]:
    """A row for each model, rate and start: with the weights that are sent, and with its own."""
    yield (
        *("model", "learning rate", "trainer scored with", "runs", "violated", "1 outside once"),
        *("moved, nats", "slope at the end", "first holds at sync"),
    )
    rows: dict[tuple[str, ...], list[Scores]] = {}
    for run, scores in done:
        start = "" if run.moved else ", weights of bfloat16"
        rows.setdefault((run.kind, f"{run.rate:g}{start}"), []).append(scores)
    for (kind, rate), runs in rows.items():
        for exact in (False, True):
            steps = [followed(scores, exact=exact) for scores in runs]
            red = sum(any(s.outcome == "violated" for s in run) for run in steps)
            outside = sum(any(not _covers(s) for s in run) for run in steps)
            holds = [n for run in steps if (n := _first(run, outcome="holds")) is not None]
            yield (
                *(kind, rate, "its own weights" if exact else "the weights as sent"),
                *(str(len(runs)), str(red), str(outside)),
                _span((run[-1].worst.slope.moved_nats for run in steps), ".2g"),
                _span((run[-1].slope for run in steps), ".2f"),
                f"{_span(holds, '.0f')} ({len(holds)} of {len(runs)})" if holds else "none",
            )


def of_broken(done: Done) -> Iterator[tuple[str, ...]]:
    """A row for each fault, all runs together."""
    yield (
        *("fault", "effects of parts", "runs", "violated", "first at sync", "named"),
        *("first at sync", "wrong name", "slope at the end"),
    )
    cases = [(name, "", 1) for name in HELD if name]
    cases += [("never_synced", "", REPLICAS), ("adapter_scaled", "", 1)]
    for name in ("one_mlp", "tied_head_stale", "norms_stale"):
        cases += [(name, asked, 1) for asked in ("", "violated", "always")]
    for fault, asked, replicas in cases:
        runs = [scores for _, scores in done if fault in HELD or fault in scores.engines]
        steps = [followed(s, fault, parts=asked, replicas=replicas) for s in runs]
        cause = CAUSES[fault] if replicas == 1 else "stale_replicas"
        red = [n for run in steps if (n := _first(run, outcome="violated")) is not None]
        named = [n for run in steps if (n := _first(run, cause=cause)) is not None]
        unnamed = {"", "undecided", "unexplained", cause}
        if fault == "late":  # at its first sync nothing has arrived
            unnamed.add("never_synced")
        wrong = sum(any(s.cause not in unnamed for s in run) for run in steps)
        yield (
            f"one of {replicas} replicas {fault}" if replicas > 1 else fault,
            {"": "not given", "violated": "if violated", "always": "at every sync"}[asked],
            *(str(len(runs)), str(len(red)), _span(red, ".0f"), str(len(named))),
            *(_span(named, ".0f"), str(wrong)),
            _span((run[-1].slope for run in steps), ".2f"),
        )


def _covers(step: FollowStep) -> bool:
    low, high = step.interval
    return low <= 1 <= high


def _first(steps: Sequence[FollowStep], **wanted: object) -> int | None:
    """The version of the first step with these attributes."""
    (name, value), *_ = wanted.items()
    return next((s.version for s in steps if value and getattr(s, name) == value), None)


def _span(values: Iterable[float], form: str) -> str:
    """From the least to the greatest, as printed; "" for none."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    low, high = f"{min(known) + 0.0:{form}}", f"{max(known) + 0.0:{form}}"
    return low if low == high else f"{low} to {high}"


def page(healthy: Done, broken: Done) -> str:
    return f"{table(of_healthy(healthy))}\n\n{table(of_broken(broken))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, help="folder of the scores of finished runs")
    parser.add_argument("--write", action="store_true", help="into docs/how-to/follow.md")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    text = page(*([(run, recorded(run, asked.runs)) for run in runs] for runs in (HEALTHY, BROKEN)))
    print(text)
    if asked.write:
        committed.write(DOCS, text, "python -m benchmarks.follow --write", BEGIN, END)


if __name__ == "__main__":
    main()
