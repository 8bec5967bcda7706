# `servanda contract calibrate`: from a run that is good to the limits that such a pair keeps.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from servanda.authoring.calibrate.default_clauses import standard
from servanda.authoring.calibrate.limits import Calibration, Limit, accept, closed_rounds
from servanda.authoring.calibrate.limits import calibrate as calibrated
from servanda.authoring.calibrate.rewrite import rewritten
from servanda.cli.options import DASH, FILE, shared, show, show_as
from servanda.cli.output import refuse_place, write_text
from servanda.engines.faults import signatures
from servanda.errors import ContractError, EvidenceError
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.plan import Plan
from servanda.judgement.power import power as power_of
from servanda.judgement.verdict import Caught, Verdict, judge
from servanda.report.format import count, number, percent
from servanda.report.table import table
from servanda.rl.recorded_run import recorded_run
from servanda.rl.trend.changes import Reference, followed
from servanda.runner.finished_run import Finished, moved, read, reread
from servanda.runner.run_directory import ATTEMPT
from servanda.theory.stats.change import CLIP

# `servanda contract calibrate` of a trainer's runs: from good runs to a reference for the trend.


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
    data = {**reference.to_plain(), "digest": reference.digest}
    show_as(format_, data, "\n".join(_lines(reference)))
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
        *reference.assumed,
        "It covers runs of the same set-up: model, engine, precision, learning rate and batch.  "
        f"Later than {of.steps} steps the rate is an estimate.",
        *([f"For 1/20, record {19 - of.runs} more good runs."] if of.runs < 19 else []),
    ]


_SEED = 20260607  # the same run gives the same limits
_BINDS = {
    "sampling": "sampling: at a tighter limit, later runs would pass less often than --power",
    "together": "together: raised, so that all slices and clauses hold in the same runs",
    "self-noise": "noise floor: twice the noise floor; no smaller difference is called violated",
    "record": "record: the rounding of the recorded logprobs alone would exceed a tighter limit",
    "fact": "fact: exact on the golden texts; no sampling, so no power",
}


@click.command()
@click.argument("runs", metavar="RUN...", type=FILE, nargs=-1, required=True)
@click.option(
    "--power",
    type=float,
    default=0.9,
    show_default=True,
    help="Probability that a later run of such a pair holds, such as 0.9.",
)
@click.option(
    "--resamples",
    type=click.IntRange(min=100),
    default=500,
    show_default=True,
    help="Number of later runs that are resampled from this one.",
)
@shared(
    "--contract",
    help="Needed if the contract of the run was moved.  [default: the file that was checked]",
)
@shared("--save-contract")
@click.option(
    "--standard",
    "standard_set",
    is_flag=True,
    help="Calibrate a standard set of clauses instead of the contract's own.",
)
@click.option(
    "--save-reference",
    type=FILE,
    metavar="FILE",
    help="Of good training runs: write their reference, such as good.reference.json.",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="Of good training runs: follow NAME, such as k3_nats.  [default: those of every run]",
)
@shared("--unsafe-pickles", "--force", "--format", "--no-code")
def calibrate(
    runs: tuple[Path, ...],
    power: float,
    resamples: int,
    contract: Path | None,
    save: Path | None,
    standard_set: bool,
    save_reference: Path | None,
    metrics: tuple[str, ...],
    unsafe_pickles: bool,
    force: bool,
    format_: str,
) -> None:
    """Print the smallest limits that kernels like those of RUN keep.

    RUN is the run directory of two kernels that you accept: yesterday's build, or one build
    twice.  Nothing is measured.  Only the number in at_most of each clause changes; a saved
    contract has the old one in a comment above it.

    If each RUN is the state file of a monitor or a trainer's dump, of a training run that was
    good, their reference is printed instead, with which later runs are compared.
    """
    if not 0 < power < 1:
        raise click.BadParameter(f"--power is a probability between 0 and 1, found {power:g}")
    refuse_place(save, force)
    refuse_place(save_reference, force)
    measured = [run for run in runs if any(run.glob(f"{ATTEMPT}*"))]
    run_dir, several = runs[0], len(runs) > 1
    if not measured and (save_reference or several or (run_dir.exists() and not run_dir.is_dir())):
        calibrate_trend(runs, metrics, save_reference, format_, unsafe_pickles=unsafe_pickles)
        return
    if not measured:
        raise EvidenceError(
            f"{run_dir} is no run directory",
            hint="`servanda check CONTRACT --run-dir RUN_DIR` measures one; of a trainer's good "
            "run: --save-reference FILE",
        )
    if several or save_reference is not None or metrics:
        raise click.UsageError(
            f"{measured[0]} is a run directory: give it alone; --save-reference and --metric are "
            "for training runs"
        )
    verdict = read(run_dir)
    with reread(run_dir, verdict, contract) as run:
        accept(run.plan, verdict)
        if standard_set:
            calibration, text = _of_standard(run, power, resamples)
        else:
            calibration = _calibrated(run, run.plan, verdict.cells, power, resamples)
            text = run.text
        limits = {place: f"{limit:g}" for place, limit in calibration.limits.items()}
        text = rewritten(text, limits, calibration.notes)
        # which faults the new limits would have caught at the size of this run
        plan = run.planned(text)
        caught = power_of(replace(plan, attempt=1), run.weighed(plan), signatures.catalogue())
    aside = str(save) == DASH  # only the contract goes to stdout then
    more = {"warnings": _warnings(verdict, calibration), "caught": caught}
    data = {**calibration.to_dict(), "contract_text": text, **more}
    lines = _calibrate_lines(run_dir, run, calibration, caught)
    show_as(format_, data, "\n".join(lines), err=aside)
    if save is not None:
        places = moved(run.plan.contract, run.path.parent, save.parent)
        write_text(save, rewritten(text, places))
        if not aside:
            click.echo(f"wrote {save}", err=format_ == "json")


def _calibrated(
    run: Finished, plan: Plan, judged: Sequence[CellVerdict], power: float, resamples: int
) -> Calibration:
    rounds = closed_rounds(plan, run.verdict.key, run.rounds)
    rng = np.random.Generator(np.random.Philox(key=_SEED))
    # a contract with other limits is another one: its first attempt is to come
    plan = replace(plan, attempt=1)
    return calibrated(plan, rounds, judged, power=power, resamples=resamples, rng=rng)


def _of_standard(run: Finished, power: float, resamples: int) -> tuple[Calibration, str]:
    """The standard set instead of the contract's clauses, without those that get no limit."""
    without: set[str] = set()
    while True:
        text = standard(run.plan, run.text, without)
        plan = run.planned(text)
        judged = judge(plan, run.weighed(plan), intervals=False).cells
        calibration = _calibrated(run, plan, judged, power, resamples)
        idle = {clause.clause for clause in calibration.left}
        idle |= {row.clause for row in calibration.rows if row.limit is None}
        if not idle:
            # what stood there before was no limit
            rows = tuple(replace(row, before=None) for row in calibration.rows)
            return replace(calibration, rows=rows), text
        without |= idle


def _calibrate_lines(
    run_dir: Path, run: Finished, calibration: Calibration, caught: tuple[Caught, ...]
) -> list[str]:
    confidence = run.plan.contract.confidence
    head = [
        f"{run.plan.contract.metadata.name}: limits that a pair like the one in {run_dir} keeps"
    ]
    for name, (groups, size) in calibration.groups.items():
        of = "" if name == "workload" else f" of {name}"
        head.append(
            f"resampled {calibration.resamples:,} times from {count(groups, 'prompt group')}{of}: "
            f"runs of {size:,}, confidence {confidence:g}"
        )
    rows = [
        ["clause", "decided by", "measured", "noise floor", "limit", "calibrated", "power", "binds"]
    ]
    rows += [_row(row) for row in calibration.rows]
    lines = table(rows, right=range(2, len(rows[0]) - 1))
    notes = [f"{row.clause}: {row.note}" for row in calibration.rows if row.note]
    without = [f"{left.clause}: left as it is: {left.reason}" for left in calibration.left]
    legend = [
        text for binds, text in _BINDS.items() if any(r.binds == binds for r in calibration.rows)
    ]
    warnings = [f"warning: {text}" for text in _warnings(run.verdict, calibration)]
    above = [*head, "", *lines, "", *legend, *notes, *without]
    return [*above, *_together(calibration), *warnings, *_faults(caught)]


def _warnings(verdict: Verdict, calibration: Calibration) -> list[str]:
    broken = [c for c in verdict.cells if c.enforced and c.outcome == "violated"]
    if not broken:
        return [*calibration.warnings]
    names = ", ".join(dict.fromkeys(f"{cell.clause} on {cell.slice}" for cell in broken))
    return [
        f"this run's verdict was violated ({names}): the limits are those of a pair that broke "
        "its contract",
        *calibration.warnings,
    ]


def _row(row: Limit) -> list[str]:
    what = f"{row.aggregate} {row.metric}".strip()
    return [
        what if what == row.clause else f"{row.clause}: {what}",
        row.slice,
        number(row.measured),
        number(row.floor),
        "" if row.before is None else f"{row.before:g}",
        "refused" if row.limit is None else f"{row.limit:g}",
        "" if row.power is None else f"{row.power:.2f}",
        row.binds if row.enforced else f"{row.binds} (monitored)",
    ]


def _together(calibration: Calibration) -> list[str]:
    if calibration.power is None:
        return []
    power, least = calibration.power, calibration.asked
    short = "" if power >= least else f", less than the {percent(least)} asked for"
    return [
        f"power: in {percent(power)} of these runs every calibrated clause holds{short}.",
        "It is an estimate from one run.  It does not cover a pair that drifts more than this one.",
    ]


def _faults(caught: tuple[Caught, ...]) -> list[str]:
    lines = []
    for of_field, at in (
        (False, "the catalogue's strengths"),
        (True, "the strengths of the field"),
    ):
        faults = [fault for fault in caught if fault.met == of_field]
        missed = [f"{fault.fault} {fault.strength}".strip() for fault in faults if not fault.by]
        if faults:
            names = f"; missed: {', '.join(missed)}" if missed else ""
            lines.append(
                f"caught: {len(faults) - len(missed)} of {len(faults)} known faults at {at}, at "
                f"the size of this run{names}"
            )
    if lines:
        lines.append(
            "fault sizes were measured on the bundled 2.6 M parameter model; yours may differ"
        )
    return lines
