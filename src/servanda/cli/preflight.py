# `servanda preflight`: does every updated weight reach the engine?

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from servanda.cli.options import FILE, duration, shared, show, show_as, show_json
from servanda.cli.screen import watching
from servanda.engines.foreign_code import code_is_refused
from servanda.rl.sync_drill.signals import TIMEOUT_S

if TYPE_CHECKING:
    from servanda.rl.sync_drill.report import Preflight
    from servanda.rl.sync_drill.trainee import Trainee

T = TypeVar("T")


def _timeout(text: str | float) -> float:
    """A duration; a number without a unit is seconds."""
    return duration(f"{text}s" if str(text)[-1:].isdigit() else text)


def _is_first_rank() -> bool:
    """Whether this process prints: of a sharded trainer one does, with the result of all."""
    torch = sys.modules.get("torch")
    group = torch.distributed if torch and torch.distributed.is_available() else None
    return not (group and group.is_initialized() and group.get_rank())


@click.command("preflight")
@click.argument("words", metavar="FILE.py:NAME | --trl SCRIPT [-- ARGS]", nargs=-1)
@click.option(
    "--trl",
    "script",
    type=FILE,
    metavar="SCRIPT",
    help="Run this TRL script with GRPOTrainer.train replaced by the test; ARGS go to the script.",
)
@click.option(
    "--checkpoint",
    type=FILE,
    metavar="DIR",
    help="Test servers without a trainer: the model in DIR is changed, saved and reloaded by them.",
)
@click.option(
    "--url",
    "urls",
    multiple=True,
    metavar="URL",
    help="Address of a vLLM or SGLang server; repeat it for each replica.  With --checkpoint.",
)
@click.option(
    "--folder",
    type=FILE,
    metavar="DIR",
    help="Where checkpoints are saved for the servers; by default the folder of temporary files.",
)
@click.option("--served", metavar="NAME", help="The servers' name of the model, if several.")
@click.option("--key-env", metavar="NAME", help="Environment variable with the servers' API key.")
@click.option(
    "--journal",
    type=FILE,
    help="Keep the weights in FILE until they are restored, in case the process is killed.",
)
@click.option(
    "--restore",
    "left",
    metavar="JOURNAL",
    type=FILE,
    help="Put back the weights that a killed test left in its journal, and sync.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=_timeout,
    metavar="DURATION",
    default=TIMEOUT_S,
    show_default="10m",
    help="Time limit of one sync or score, such as 90s or 10m; 0 for no limit.",
)
@shared("--seed")
@shared(
    "--format",
    type=click.Choice(["text", "json", "html"]),
    help="html draws the groups as a grid.",
)
@shared("--quiet", "--no-code")
def preflight_command(
    words: tuple[str, ...],
    script: Path | None,
    checkpoint: Path | None,
    urls: tuple[str, ...],
    folder: Path | None,
    served: str | None,
    key_env: str | None,
    journal: Path | None,
    left: Path | None,
    timeout_s: float,
    seed: int,
    format_: str,
    quiet: bool,
) -> None:
    """Test the weight sync: does every updated weight reach the engine?

    NAME is a Trainee, a TRL trainer, or a function without arguments that returns one, such as
    setup.py:trainee.  With --checkpoint and --url you need no code: the test finds whether a
    reload from disk reaches each server.  The test randomises all weights once, then perturbs
    one group after another, runs the trainer's own sync each time, and compares the logprobs of
    both sides.  Afterwards the weights are restored bit for bit.
    """
    if bool(checkpoint) != bool(urls):
        raise click.UsageError("--checkpoint DIR and --url URL need each other")
    if (script is None and len(words) + bool(checkpoint) != 1) or (script and checkpoint):
        raise click.UsageError("give FILE.py:NAME, --checkpoint DIR --url URL, or --trl SCRIPT")
    if checkpoint is None and code_is_refused():
        raise click.UsageError("a file runs, and --no-code refuses it: give --checkpoint and --url")
    if journal is not None and left is not None:
        raise click.UsageError("give --journal or --restore, not both")
    from servanda.rl.sync_drill.drill import preflight, restore
    from servanda.rl.sync_drill.plan import planned

    limit_s = timeout_s or None

    def restored(trainee: Trainee) -> None:
        assert left is not None
        restore(trainee, left, timeout_s=limit_s)

    def drilled(trainee: Trainee) -> Preflight:
        others = not _is_first_rank()
        if not (quiet or others):
            click.echo(f"plan     {planned(trainee)}", err=True)
        with watching(quiet or others) as watch:
            return preflight(trainee, journal=journal, seed=seed, timeout_s=limit_s, watch=watch)

    def called(call: Callable[[Trainee], T]) -> T:
        if script is not None:
            from servanda.rl.trl import instead_of_training

            return instead_of_training(script, words, call)
        if checkpoint is not None:
            from servanda.rl.sync_drill.servers.checkpoint_sync import trainee_of_checkpoint

            options = {"folder": folder, "served": served, "key_env": key_env}
            return call(trainee_of_checkpoint(checkpoint, urls, timeout_s=limit_s, **options))
        from servanda.rl.sync_drill.user_module import opened
        from servanda.rl.trainer_drill import trainee_of

        return call(trainee_of(opened(words[0])))

    # output of the trainer is no part of the data
    stdout = nullcontext() if format_ == "text" else redirect_stdout(sys.stderr)
    if left is not None:
        with stdout:
            called(restored)
        if not _is_first_rank():
            return
        text = f"weights restored bit for bit and synced; {left} removed"
        show_as(format_, {"restored": str(left)}, text)
        return
    with stdout:
        result = called(drilled)
    if not _is_first_rank():
        sys.exit(result.exit_code)
    if format_ == "json":
        show_json(result.to_json())
    elif format_ == "html":
        show(result.to_html())
    else:
        show(str(result))
    sys.exit(result.exit_code)
