# `servanda preflight`: does what the trainer updates reach its engine?

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from servanda.cli.output import show
from servanda.cli.progress import watching


@click.command("preflight", short_help="Before a run: does every weight reach the engine?")
@click.argument("target", metavar="FILE.py:NAME", required=False)
@click.option(
    "--trl",
    "script",
    type=click.Path(path_type=Path),
    help="Run this script with GRPOTrainer.train replaced by the drill.",
)
@click.option(
    "--journal",
    type=click.Path(path_type=Path),
    help="Keep the weights in FILE until they are back, for a process that may be killed.",
)
@click.option(
    "--restore",
    "left",
    metavar="JOURNAL",
    type=click.Path(path_type=Path),
    help="Put back the weights that a killed drill left in its journal, and sync.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of tokens and noise.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Of what is printed.",
)
@click.option("--quiet", is_flag=True, help="No progress.")
def preflight_command(
    target: str | None,
    script: Path | None,
    journal: Path | None,
    left: Path | None,
    seed: int,
    format_: str,
    quiet: bool,
) -> None:
    """Change the trainer's weights, sync, and see whether the engine follows.

    NAME is a Trainee, a trainer of TRL, or a function without arguments that returns one.
    All weights are replaced by noise once, then one group after another is nudged, and each
    time the trainer's own sync runs.  Afterwards the weights are as before, bit for bit.

    Exit codes: 0 every group follows, 1 something does not reach the engine, 2 the call or
    the file is wrong, 3 a group could not be seen, 4 scoring or syncing failed.
    """
    if (target is None) == (script is None):
        raise click.UsageError("give FILE.py:NAME, or --trl SCRIPT")
    if script is not None:
        if journal is not None or left is not None:
            raise click.UsageError("--journal and --restore go with FILE.py:NAME")
        from servanda.rl.trl import drilled

        with watching(quiet) as watch:
            result = drilled(script, seed=seed, watch=watch)
    else:
        from servanda.preflight.drill import preflight, restore
        from servanda.preflight.opening import opened
        from servanda.preflight.planning import planned
        from servanda.rl.drilling import trainee_of

        assert target is not None
        trainee = trainee_of(opened(target))
        if left is not None:
            restore(trainee, left)
            click.echo(f"weights restored bit for bit and synced; {left} removed")
            return
        if not quiet:
            click.echo(f"plan     {planned(trainee)}", err=True)
        with watching(quiet) as watch:
            result = preflight(trainee, journal=journal, seed=seed, watch=watch)
    show(json.dumps(result.to_json(), indent=2) if format_ == "json" else str(result))
    sys.exit(result.exit_code)
