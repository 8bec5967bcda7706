# `servanda contract calibrate` of a trainer's runs: from good runs to a reference for the trend.

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import click

from servanda.cli.stdout import show, show_json
from servanda.errors import ContractError
from servanda.report.format import count, number
from servanda.report.table import table
from servanda.rl.recorded_run import recorded_run
from servanda.rl.trend.changes import Reference, followed
from servanda.theory.stats.change import CLIP

ALPHA = 0.05  # false alarms per run if steps were independent and normal


def calibrate_trend(
    paths: Sequence[Path],
    metrics: Sequence[str],
    save: Path | None,
    format_: str,
    *,
    unsafe_pickles: bool,
) -> None:
    """Print what good runs look like, and write the reference."""
    runs = [recorded_run(path, unsafe_pickles=unsafe_pickles) for path in paths]
    digests = [run.digest for run in runs]
    for run in runs:
        if digests.count(run.digest) > 1:
            raise ContractError(
                f"{run.source} is given twice, or is a copy of another run",
                hint="each good run counts once: name different runs",
            )
    reference = Reference.of(runs, ALPHA, metrics or None)
    if save is not None:
        reference.write(save)
    if format_ == "json":
        show_json({**reference.to_plain(), "digest": reference.digest})
    else:
        show("\n".join(_lines(reference)))
    if save is not None:
        click.echo(f"wrote {save}", err=format_ == "json")
        if format_ != "json":
            show(f"next  servanda watch RUN --reference {save}    (or servanda check DIR)")


def _lines(reference: Reference) -> list[str]:
    of, runs = reference.detector, reference.sources
    head = f"{count(len(runs), 'good run')}, {sum(r.steps for r in runs):,} steps; the first step "
    lines = [f"{head}of each is left out, because its weights are as the engine loaded them"]
    lines += [f"  {run.path}: {count(run.steps, 'step')}, {run.digest[:8]}" for run in runs]
    rows = [["metric", "mean", "one step differs by", "threshold", "found: a lasting", "within"]]
    for m, name in enumerate(reference.metrics):
        metric, folds = followed(name), of.folds
        centre = math.fsum(fold.centre_M[m] for fold in folds) / len(folds)
        scale = max(fold.scale_M[m] for fold in folds)
        side = metric.side or 1
        rows.append(
            [
                name,
                number(math.exp(centre) if metric.log else centre),
                metric.told(side * scale),
                number(max(fold.threshold for fold in folds)),
                metric.told(side * CLIP * scale),
                count(int(of.delay()), "step"),
            ]
        )
    return [
        *lines,
        "",
        *table(rows, right=range(1, 6)),
        "",
        f"{reference.promise}.",
        *_few(reference),
    ]


def _few(reference: Reference) -> list[str]:
    runs = reference.detector.runs
    more = [
        "It covers runs of the same set-up: model, engine, precision, learning rate and batch.  "
        f"Later than {reference.detector.steps} steps the rate is an estimate."
    ]
    if runs < 19:
        more.append(f"For 1/20, record {19 - runs} more good runs.")
    return more
