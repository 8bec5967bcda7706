# `servanda watch`: a run is followed, and what changes is told.

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from servanda.cli.check_dump import refuse_run
from servanda.cli.options import FILE, shared, together
from servanda.cli.stdout import show
from servanda.judgement.verdict import EXIT_CODES
from servanda.rl.watch.contract import WatchOptions
from servanda.rl.watch.loop import WatchLoop
from servanda.rl.watch.open import DetectedSource
from servanda.rl.watch.sinks import SINKS, GuardedSink
from servanda.rl.watch.state_file import StateFile, locked

_sink_options = together(
    *(
        click.option(
            f"--{name}",
            metavar=sink.takes,
            type=FILE if sink.takes in ("FILE", "DIR") else str,
            help=sink.summary,
        )
        for name, sink in SINKS.items()
    )
)


@click.command()
@click.argument("path", type=FILE)
@click.option("--once", is_flag=True, help="Judge what is there, and end.")
@click.option("--until-step", type=int, metavar="N", help="End after this step.")
@shared("--every", default=10.0, show_default="10s")
@shared("--as", "--preset")
@shared("--contract", help="Its limits and slices; see `tools check-dump --save-contract`.")
@shared("--unsafe-pickles")
@click.option(
    "--state-file",
    "state",
    type=FILE,
    help="Keep here what was told, so that it is told once.",
)
@click.option("--stop-file", type=FILE, help="Write this file where the run would be stopped.")
@_sink_options
def watch(
    path: Path,
    once: bool,
    until_step: int | None,
    every: float,
    as_: str | None,
    preset: str | None,
    contract: Path | None,
    unsafe_pickles: bool,
    state: Path | None,
    stop_file: Path | None,
    **wheres: str | Path | None,
) -> None:
    """Follow PATH while a run goes on: a trainer's dump, or the state of a monitor.

    Each new step of a dump is judged alone, under limits and slices that are fixed from the
    first steps. One line a step; what changes (holds to violated, a slice that becomes red,
    coverage that is lost, a trend) is told once, with the command to run next.

    Nothing is ever stopped: the text says at which step a run would have been. Ctrl-C ends the
    watch. --once of a dump ends with exit code 4 where the data of any step is not sound, else
    with 1 where any step is violated; else it and --until-step end with the code of the last
    verdict.
    """
    refuse_run(path)
    if preset is not None and contract is not None:
        raise click.UsageError("--preset and --contract both say the limits: give one")
    if stop_file is not None and not stop_file.parent.is_dir():
        raise click.BadParameter(f"--stop-file: there is no folder {stop_file.parent}")
    source = DetectedSource(WatchOptions(path, as_, preset, contract, unsafe_pickles))
    with locked(state):
        sinks = [
            GuardedSink(name, SINKS[name](str(where), time.sleep), _print)
            for name, where in wheres.items()
            if where is not None
        ]
        loop = WatchLoop(
            source,
            str(path),
            StateFile(state, path),
            _print,
            sinks,
            once=once,
            until=until_step,
            every_s=every,
            stop_file=stop_file,
            wait=time.sleep,
        )
        end = loop.run()
    assert end.outcome is not None  # a watch without a step has raised
    # one bad step is not undone by a good one behind it, as `servanda check DIR` says
    bad = loop.bad if once and source.kind == "dump" else None
    code = EXIT_CODES[bad or end.outcome]
    show(f"exit {code}")
    # wandb puts a function of its own in the place of sys.exit
    raise SystemExit(code)


def _print(text: str) -> None:
    show(text)
    sys.stdout.flush()
