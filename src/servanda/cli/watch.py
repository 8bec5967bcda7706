# `servanda watch`: follow a run and report every change.

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from servanda.cli.dump import refuse_run
from servanda.cli.options import FILE, PLACE, shared, show, together
from servanda.judgement.verdict import EXIT_CODES
from servanda.rl.watch.dump import WatchOptions
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
            # a URL may hold a secret, and every user of the machine reads arguments
            envvar=f"SERVANDA_WATCH_{name.upper()}" if sink.takes == "URL" else None,
            show_envvar=True,
        )
        for name, sink in ((name, SINKS[name]) for name in SINKS.names())
    )
)


@click.command()
@click.argument("path", type=PLACE)
@click.option("--once", is_flag=True, help="Judge the steps that exist, then exit.")
@click.option("--until-step", type=int, metavar="N", help="Exit after this step.")
@shared("--every", default=10.0, show_default="10s")
@shared("--as")
@shared("--preset", help="One for a trainer, such as trl.")
@shared(
    "--contract",
    help="Use the limits and slices of this contract; see `servanda check DUMP --save-contract`.",
)
@shared("--unsafe-pickles", "--reference")
@click.option(
    "--state-file",
    "state",
    type=FILE,
    help="Record delivered alerts in FILE, so that a restarted watch does not repeat them.",
)
@click.option(
    "--stop-file", type=FILE, help="Write this file at the step where the run would be stopped."
)
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
    reference: Path | None,
    state: Path | None,
    stop_file: Path | None,
    **wheres: str | Path | None,
) -> None:
    """Follow PATH while a run trains: a trainer's dump, or the state file of a monitor.

    Each new step of a dump is judged, with limits and slices that the first steps fix.
    Prints one line per step. Sends one alert per change (a violation, a slice that becomes red,
    lost logprob coverage, a trend), with the command to run next.

    A watch never stops the run: it reports the step at which the run would have been stopped.
    Ctrl-C ends it. The exit code is that of the last verdict; with --once on a dump it is 4 if
    the data of any step fails a quality check, else 1 if any step is violated.
    """
    refuse_run(path)
    if preset is not None and contract is not None:
        raise click.UsageError("--preset and --contract both set the limits: give one")
    if stop_file is not None and not stop_file.parent.is_dir():
        raise click.BadParameter(f"--stop-file: there is no folder {stop_file.parent}")
    source = DetectedSource(WatchOptions(path, as_, preset, contract, unsafe_pickles, reference))
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
