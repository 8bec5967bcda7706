# `servanda tools measure`: one side alone, kept as a reference pack for others to re-score.

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

from servanda.cli.options import DASH, FILE_OR_DASH, shared, show_json
from servanda.cli.screen import watching
from servanda.engines.rank_processes import joined, started_by_torchrun
from servanda.runner.compare.reference import PackOptions, measure_pack, pack_contract
from servanda.runner.ray_engines import engines_on


@click.command("measure")
@click.argument("what", metavar="CONTRACT|KERNEL")
@shared("--side", help="[default: train]")
@shared("--prompts", help="[default: the shipped ones]")
@shared("--golden")
@shared("--sequences", help="[default: 1024]")
@shared("--max-new-tokens", help="[default: 64 for a kernel string]")
@shared("--temperature", "--top-p")
@shared("-o", type=FILE_OR_DASH, required=True, help="The baseline file, such as x.pack.")
@shared("--on", help="The kernel runs in an actor.")
@shared("--ray-actor", "--quiet", "--format", "--no-code")
def measure_command(
    what: str,
    side: str | None,
    output: Path,
    on: str | None,
    actors: tuple[str, ...],
    quiet: bool,
    format_: str,
    **options: object,
) -> None:
    """Generate with one kernel and write a baseline file that candidates are compared with.

    Give a CONTRACT with --side, or a kernel string with --prompts.  `servanda compare x.pack
    KERNEL` then needs the engine of the candidate only.

    Under torchrun the processes are the ranks of one kernel (option.ranks=8), on one machine or on
    several: torchrun --nproc-per-node 8 -m servanda tools measure KERNEL -o x.pack
    """
    if str(output) == DASH:
        raise click.UsageError("a pack is no text: it cannot be printed\n  hint: -o x.pack")
    contract, of = pack_contract(PackOptions(what, side, **options))  # type: ignore[arg-type]
    shared_out = started_by_torchrun()
    if shared_out and (on or actors):
        raise click.UsageError(
            "torchrun starts the ranks of a kernel, and Ray would start them again\n"
            "  hint: remove --on and --ray-actor, or torchrun"
        )
    follows = shared_out and os.environ["RANK"] != "0"
    with (
        engines_on(on, actors) as open_,
        watching(quiet or follows) as watch,
        tempfile.TemporaryDirectory() as elsewhere,
    ):
        # all ranks make the same pack; one of them writes it
        out = Path(elsewhere) / output.name if follows else output
        opened = joined if shared_out else open_
        pack = measure_pack(contract, of, out, open=opened, watch=watch)
    if follows:
        return
    held, tokens = pack.schedule, len(pack.answers["generate"].token_N)
    if format_ == "json":
        data = {"file": str(output), "kernel": str(held.kernel), "groups": held.groups}
        data |= {"tokens": tokens, "bytes": output.stat().st_size, "digest": pack.digest}
        show_json(data)
        return
    size = output.stat().st_size / (1 << 20)
    click.echo(
        f"{output}: {held.kernel}, {held.groups:,} prompt groups, {tokens:,} "
        f"tokens, {size:.1f} MB, digest {pack.digest[:8]}"
    )
    click.echo(f"next: servanda compare {output} KERNEL")
