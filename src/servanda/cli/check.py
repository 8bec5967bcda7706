# `servanda check`: measure, judge, report; of a dump, judge what was measured.

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from servanda.cli.input import contract_bytes
from servanda.cli.options import FILE, PLACE_OR_DASH, refuse_given, shared, show, together, until
from servanda.cli.output import REPORT_OPTIONS, report_places, write
from servanda.cli.screen import next_step, show_verdict, watching
from servanda.engines.foreign_code import code_of, keys_of
from servanda.judgement.verdict import FORMATS
from servanda.runner import load, run
from servanda.runner.ray_engines import engines_on

_NEITHER = f"{load.NO_CONTRACT}, or of a folder with a trainer's dump"
_DUMPED = (".jsonl", ".gz", ".parquet", ".pt", ".pkl")  # how files of a dump end; no contract does


def _steps(text: str) -> tuple[int | None, int | None]:
    """a:b, a:, :b, both ends included, or one step."""
    first, colon, last = text.partition(":")
    try:
        low, high = int(first) if first else None, int(last) if last else None
        if not colon and low is None:
            raise ValueError
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a range of steps: write 10:20, 10:, :20 or 10"
        ) from None
    if low is not None and high is not None and low > high:
        raise click.BadParameter(f"{text!r} ends before it begins: write {high}:{low}")
    return (low, high if colon else low)


_OF_A_DUMP = together(
    shared(
        "--contract",
        help="Its limits and slices judge the dump, instead of a preset; --save-contract writes "
        "one.",
    ),
    shared("--as"),
    shared("--preset", help="One for a trainer, such as trl."),
    click.option("--steps", type=_steps, metavar="A:B", help="Steps to judge, such as 10:20."),
    click.option(
        "--mask",
        type=FILE,
        metavar="DIR",
        help="Folder for masks of the tokens in violated slices, such as masks.",
    ),
    shared("--save-contract", "--bitwise", "--reference"),
    shared("--referee", help="It has the weights of the dump's only step."),
    click.option(
        "--referee-rows",
        "rows",
        type=click.IntRange(1),
        default=64,
        show_default=True,
        help="Rows of the dump that --referee scores, drawn at random.",
    ),
    shared("--temperature", default=1.0, help="Of --referee."),
    click.option(
        "--jobs",
        type=click.IntRange(1),
        metavar="N",
        help="Processes that read steps side by side; default: one per core for a large dump.",
    ),
    shared("--unsafe-pickles"),
)
_OF_A_CONTRACT = together(
    shared("--run-dir", help="[default: runs/NAME]"),
    shared("--fresh", "--ladder"),
    click.option(
        "--record",
        type=FILE,
        help="Record everything that one kernel returns, such as infer.recorded; engine "
        "`recorded` replays it elsewhere.",
    ),
    click.option(
        "--record-side",
        type=click.Choice(["infer", "train", "stable"]),
        default="infer",
        show_default=True,
        help="Kernel that --record records.",
    ),
    shared("--ray-actor", "--max-time"),
)
_OF_BOTH = together(
    REPORT_OPTIONS,
    shared("--report"),
    shared("--on", help="Each kernel runs in an actor; of a dump, its nodes read the steps."),
    shared("--quiet", "--no-code"),
)


class _ByTarget(click.Command):
    """A command whose help lists the options of a contract and those of a dump apart."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx)
            if row is not None and isinstance(param, click.Option):
                of = {"Options for a contract": _CONTRACT_NAMES, "Options for a dump": _DUMP_NAMES}
                heading = next((h for h, names in of.items() if param.name in names), "Options")
                sections.setdefault(heading, []).append(row)
        for heading in sorted(sections):
            with formatter.section(heading):
                formatter.write_dl(sections[heading])


def _names(options: Callable[[Any], Any]) -> frozenset[str]:
    """The parameters that some options of a command make."""
    command = click.command()(options(lambda: None))
    return frozenset(param.name for param in command.params if param.name is not None)


_CONTRACT_NAMES, _DUMP_NAMES = _names(_OF_A_CONTRACT), _names(_OF_A_DUMP)


@click.command(cls=_ByTarget)
@click.argument("target", metavar="CONTRACT|DUMP", type=PLACE_OR_DASH)
@together(_OF_BOTH, _OF_A_DUMP, _OF_A_CONTRACT)
def check(target: Path, **options: Any) -> None:
    """Judge a trainer's dump, or measure and judge the kernels of a contract.

    DUMP is what an RL trainer wrote of its rollouts: for each sampled token the logprob of the
    rollout engine and the one of the trainer. The answer is whether to go on, on which tokens
    not, and since which step. The format and the limits are detected. DUMP is a folder, a file,
    or the URL of an object store, such as s3://bucket/run; it may be larger than memory.

    CONTRACT is a contract file; - reads it from standard input. Both kernels are measured on the
    same tokens. The run stops as soon as every cell (clause x slice) is decided. After Ctrl-C the
    same command resumes it.

    An old report is removed first, so that a failed run leaves none.
    """
    remote = not isinstance(target, Path)
    own = {name: options.pop(name) for name in _CONTRACT_NAMES & options.keys()}
    if remote or target.is_dir() or (target.suffix in _DUMPED and target.is_file()):
        refuse_given(own, "a dump was measured already, so that this is for a contract")
        from servanda.cli.dump import check_dump

        check_dump(target, **options)
    refuse_given(_DUMP_NAMES, f"{target} is a contract, and this is for a dump")
    own |= {name: value for name, value in options.items() if name not in _DUMP_NAMES}
    _check_contract(target, **own)


def _check_contract(
    contract: Path,
    *,
    run_dir: Path | None,
    fresh: bool,
    ladder: bool,
    record: Path | None,
    record_side: str,
    actors: tuple[str, ...],
    max_time: float | None,
    format_: str | None,
    output: Path | None,
    reports: tuple[Path, ...],
    on: str | None,
    quiet: bool,
) -> NoReturn:
    printed, files = report_places(format_, output, reports)
    deadline = until(max_time)
    data, name, folder = contract_bytes(contract, _NEITHER)
    named = load.read(data, name, folder)
    if not quiet:
        said = [f"runs code: {code}" for code in code_of(named)]
        for line in (*said, *(f"sends a key: {key}" for key in keys_of(named))):
            click.echo(line, err=True)
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
