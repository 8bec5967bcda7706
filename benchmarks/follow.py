"""What Follow concludes about engines that follow, and about others: training runs of real models.

    python -m benchmarks.follow --runs FOLDER [--only KIND] [--write]        an hour on two cores

A float32 trainer with AdamW, eight syncs, 640 probe tokens; engines in bfloat16, and in formats to
which they round the weights by themselves.  Scores of finished runs are kept in the folder; --only
makes those of one kind of model, so that two processes can share the work.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.stats import beta
from tests.rl.follow_faults import BROKEN, CAUSES, HELD, Run, Scores, followed, scored

from benchmarks import committed
from benchmarks.experiment.tables import markdown
from servanda.rl.follow.follow_step import FollowStep

PAGE = Path(__file__).parents[1] / "docs/how-to/follow.md"
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
FORMATS = {
    "": "bfloat16",
    "fp8_tensor": "fp8, a scale per tensor",
    "fp8_block": "fp8, a scale per block",
    "int8_weight_only": "int8 weights, a scale per channel",
    "w8a8": "int8, a scale per channel",
    "nvfp4": "NVFP4",
}
_QUANTISED = tuple(filter(None, FORMATS))
# kind -> (runs, learning rates in turn, how far the weights start from those of the checkpoint)
KINDS = {
    "qwen3": (30, (3e-5, 1e-4), 0.002),
    "llama": (20, (2e-5, 1e-4), 0.002),
    "SmolLM2": (1, (2e-5, 5e-6), 0.0),  # of half an hour; eight were planned
}
HEALTHY = {
    kind: [
        Run(kind, seed=100 + n, steps=8, rate=rates[n % 2], moved=moved, quantised=_QUANTISED)
        for n in range(runs)
    ]
    for kind, (runs, rates, moved) in KINDS.items()
}
ROWS = {"a cache of 3 rows of 10": "the same", "one of 10 replicas": "others"}

Done = Sequence[tuple[Run, Scores]]


def recorded(run: Run, folder: Path) -> Scores:
    """The scores of a run: read from its file, or computed and kept there."""
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
        print(path, flush=True)
    with np.load(path) as file:
        engines, parts = (
            {n.removeprefix(kind): file[n] for n in file.files if n.startswith(kind)}
            for kind in ("engine ", "part ")
        )
        return Scores(file["train"], file["exact"], engines, parts)


def of_healthy(done: Done) -> Iterator[tuple[str, ...]]:
    """A row for each model, format and way of scoring the trainer."""
    for form, told in FORMATS.items():
        for kind in KINDS:
            runs = [scores for run, scores in done if run.kind == kind]
            for exact in (False, True) if not form else (True,):
                yield (told, kind, *_healthy([followed(s, form, exact=exact) for s in runs], exact))
    steps = [followed(scores, form, exact=bool(form)) for _, scores in done for form in FORMATS]
    yield ("**all**", "", *_healthy(steps, None))


def _healthy(runs: Sequence[Sequence[FollowStep]], exact: bool | None) -> tuple[str, ...]:
    red = sum(any(s.outcome == "violated" for s in run) for run in runs)
    upper = beta.ppf(0.975, red + 1, len(runs) - red) if red < len(runs) else 1.0
    holds = [n for run in runs if (n := _first(run, outcome="holds")) is not None]
    return (
        {None: "", False: "the weights as sent", True: "its own weights"}[exact],
        f"{red} of {len(runs)} (at most {upper:.1%})",
        _span((run[-1].worst.floor_nats for run in runs), ".2g"),
        _span((run[-1].worst.slope.moved_nats for run in runs), ".2g"),
        _span((run[-1].slope for run in runs), ".2f"),
        f"{len(holds)} of {len(runs)}" + (f", from {_span(holds, '.0f')} on" if holds else ""),
    )


def of_broken(done: Done, loaded: Done) -> Iterator[tuple[str, ...]]:
    """A row for each fault and format; those of a part of the weights in bfloat16."""
    for fault in (*(name for name in HELD if name), *ROWS):
        for form, told in FORMATS.items():
            steps = [_broken(scores, fault, form, run.seed) for run, scores in done]
            cause = "part_of_rows" if fault in ROWS else CAUSES[fault]
            yield (fault, told, *_named(steps, {cause, "never_synced"} - {""}, cause))
    for fault in CAUSES:
        runs = [scores for _, scores in loaded if fault in scores.engines]
        for parts in ("", "violated", "always") if runs else ():
            steps = [followed(s, fault, parts=parts) for s in runs]
            asked = {"": "", "violated": "; parts if violated", "always": "; parts at every sync"}
            cause = CAUSES[fault] or ""
            yield (fault, f"bfloat16{asked[parts]}", *_named(steps, {cause}, cause))


def _broken(scores: Scores, fault: str, form: str, seed: int) -> list[FollowStep]:
    """The conclusions about an engine of a format that holds earlier weights."""
    healthy = scores.engine(form)
    if fault in HELD:
        infer = healthy[[HELD[fault](k) for k in range(len(healthy))]]
    else:
        draws = np.random.default_rng(seed).random(healthy.shape[:2])
        stale = np.arange(healthy.shape[1]) % 10 < 3 if ROWS[fault] == "the same" else draws < 0.1
        infer = np.where(np.broadcast_to(stale, draws.shape)[..., None], healthy[0], healthy)
    return followed(
        scores._replace(engines={"": healthy, "broken": infer}), "broken", exact=bool(form)
    )


def _named(runs: Sequence[Sequence[FollowStep]], right: set[str], cause: str) -> tuple[str, ...]:
    red = [n for run in runs if (n := _first(run, outcome="violated")) is not None]
    named = [n for run in runs if (n := _first(run, cause=cause)) is not None]
    open_ = {"", "undecided", "unexplained", *right}
    wrong = sum(any(s.cause not in open_ for s in run) for run in runs)
    return (
        *(f"{len(red)} of {len(runs)}", _span(red, ".0f"), str(len(named))),
        *(_span(named, ".0f"), str(wrong), _span((run[-1].slope for run in runs), ".2f")),
    )


def _first(steps: Sequence[FollowStep], **wanted: object) -> int | None:
    """The version of the first step with this attribute."""
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
    heads = (
        *("engine", "model", "trainer scored with", "violated (95 % upper end)"),
        *("gap at best, nats", "moved, nats", "slope at the end", "holds"),
    )
    faults = (
        *("fault", "engine", "violated", "first at sync", "named"),
        *("first at sync", "wrong name", "slope at the end"),
    )
    return "\n\n".join(
        (markdown(heads, [*of_healthy(healthy)]), markdown(faults, [*of_broken(healthy, broken)]))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="folder of finished runs")
    parser.add_argument("--only", choices=[*KINDS], help="make the runs of this kind, and stop")
    parser.add_argument("--write", action="store_true", help="into docs/how-to/follow.md")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [asked.only] if asked.only else [*KINDS]
    healthy = [(run, recorded(run, asked.runs)) for kind in kinds for run in HEALTHY[kind]]
    if asked.only:
        return
    text = page(healthy, [(run, recorded(run, asked.runs)) for run in BROKEN])
    print(text)
    if asked.write:
        command = "python -m benchmarks.follow --runs FOLDER --write"
        committed.write(PAGE, text, command, BEGIN, END)


if __name__ == "__main__":
    main()
