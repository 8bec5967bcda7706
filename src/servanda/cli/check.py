# `servanda check`: measure, judge, report.

from __future__ import annotations

import sys
from pathlib import Path

import click

from servanda.cli.input import contract_bytes
from servanda.cli.options import FILE, PLACE_OR_DASH, given, shared, until
from servanda.cli.output import REPORT_OPTIONS, report_places, write
from servanda.cli.progress import watching
from servanda.cli.stdout import show
from servanda.cli.verdict_text import next_step, show_verdict
from servanda.engines.foreign_code import code_of, keys_of
from servanda.judgement.verdict import FORMATS
from servanda.runner import load, run
from servanda.runner.ray_engines import engines_on

_NEITHER = f"{load.NO_CONTRACT}, or of a folder with a trainer's dump"
_DUMPED = (".jsonl", ".gz", ".parquet", ".pt", ".pkl")  # how files of a dump end; no contract does


@click.command()
@click.argument("contract", type=PLACE_OR_DASH)
@shared("--run-dir", help="[default: runs/NAME]")
@shared("--fresh", "--ladder")
@REPORT_OPTIONS
@shared("--report")
@click.option(
    "--record",
    type=FILE,
    help="Record everything that one kernel returns, such as infer.recorded; engine `recorded` "
    "replays it elsewhere.",
)
@click.option(
    "--record-side",
    type=click.Choice(["infer", "train", "stable"]),
    default="infer",
    show_default=True,
    help="Kernel that --record records.",
)
@shared("--preset", help="Preset of limits for a dump, such as trl.  [default: the one that fits]")
@shared(
    "--reference", help="Compare the steps of a dump with good runs, such as good.reference.json."
)
@shared("--referee", help="Of a dump of one step, with its weights.")
@shared("--on", help="Each kernel runs in an actor; for a dump, its nodes read the steps.")
@shared("--ray-actor")
@shared("--max-time", "--quiet", "--no-code")
def check(
    contract: Path,
    run_dir: Path | None,
    fresh: bool,
    ladder: bool,
    format_: str | None,
    output: Path | None,
    reports: tuple[Path, ...],
    record: Path | None,
    record_side: str,
    preset: str | None,
    reference: Path | None,
    referee: str | None,
    on: str | None,
    actors: tuple[str, ...],
    max_time: float | None,
    quiet: bool,
) -> None:
    """Measure both kernels of CONTRACT on the same tokens and judge every clause.

    The run stops as soon as every cell (clause x slice) is decided. After Ctrl-C the same command
    resumes it. An old report is removed first, so that a failed run leaves none.

    If CONTRACT is a trainer's dump (a folder, a file, or a URL such as s3://bucket/run), its
    rollouts are judged instead, as by `servanda tools check-dump`. - reads the contract from
    standard input.
    """
    remote = not isinstance(contract, Path)
    if remote or contract.is_dir() or (contract.suffix in _DUMPED and contract.is_file()):
        for option in given("run_dir", "fresh", "ladder", "max_time", "record", "actors"):
            raise click.UsageError(f"{option} is for a contract: a dump was measured already")
        from servanda.cli.check_dump import judged
        from servanda.rl.dumps.judge import DumpOptions
        from servanda.rl.dumps.third_scorer import Referee

        options = DumpOptions(contract, preset=preset, jobs=None, reference=reference)
        asked = None if referee is None else Referee(referee)
        printing = {"format_": format_, "output": output, "reports": reports, "quiet": quiet}
        judged(options, on=on, referee=asked, **printing)
    if preset is not None:
        raise click.UsageError("--preset is for a dump: a contract has its own limits")
    if referee is not None:
        raise click.UsageError("--referee is for a dump: a contract has train and infer")
    if reference is not None:
        raise click.UsageError("--reference is for a dump: it compares the steps of a run")
    printed, files = report_places(format_, output, reports)
    deadline = until(max_time)
    data, name, folder = contract_bytes(contract, _NEITHER)
    named = load.read(data, name, folder)
    if not quiet:
        for code in code_of(named):
            click.echo(f"runs code: {code}", err=True)
        for key in keys_of(named):
            click.echo(f"sends a key: {key}", err=True)
    with engines_on(on, actors) as open_, watching(quiet) as watch:
        verdict = run.check(
            named,
            text=data.decode("utf-8-sig"),
            run_dir=run_dir,
            fresh=fresh,
            open=open_,
            watch=watch,
            deadline=deadline,
            record=record,
            record_side=record_side,
            ladder=ladder,
        )
    if not quiet:
        click.echo(f"measured in {run_dir or run.RUNS / verdict.contract}", err=True)
        if record is not None:
            click.echo(f"recorded the {record_side} kernel in {record}", err=True)
    for path, name in files.items():
        write(verdict, name, path)
    written = [f"report {path}" for path in files]
    if printed == "text":
        page = any(name == "html" for name in files.values())
        place = run_dir or run.RUNS / verdict.contract
        show_verdict(verdict, *next_step(verdict, place, page=page), *written)
    elif printed is not None:
        show(FORMATS[printed](verdict))
    if printed != "text" and not quiet:
        for text in written:
            click.echo(text, err=True)
    sys.exit(verdict.exit_code)
