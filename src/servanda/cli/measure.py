# `servanda tools measure`: one side alone, kept as a reference pack for others to re-score.

from __future__ import annotations

import json
from pathlib import Path

import click

from servanda.cli.options import format_option, no_code_option
from servanda.cli.output import STDOUT
from servanda.cli.progress import watching
from servanda.runner.compare.reference import PackOptions, measure_pack, pack_contract

_FILE = click.Path(path_type=Path)


@click.command("measure")
@click.argument("what", metavar="CONTRACT|KERNEL")
@click.option("--side", type=click.Choice(["train", "infer"]), help="Of a contract.")
@click.option("--prompts", type=_FILE, help="Of a kernel.  [default: the shipped ones]")
@click.option("--golden", type=_FILE, help="Of a kernel: fixed texts, kept with their best 64.")
@click.option("--sequences", type=click.IntRange(1), help="Prompt groups.  [default: 1024]")
@click.option("--max-new-tokens", type=click.IntRange(1), help="Of a kernel.  [default: 64]")
@click.option("--temperature", type=click.FloatRange(0, 100, min_open=True))
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True))
@click.option("-o", "--output", type=_FILE, required=True, help="The pack, such as x.pack.")
@click.option("--quiet", is_flag=True, help="No progress.")
@format_option
@no_code_option
def measure_command(
    what: str, side: str | None, output: Path, quiet: bool, format_: str, **asked: object
) -> None:
    """Draw with one kernel and keep everything that a candidate needs to be held against it.

    CONTRACT with --side, or a kernel string.  `servanda compare x.pack KERNEL` then needs
    the candidate's engine only.
    """
    if str(output) == STDOUT:
        raise click.UsageError("a pack is no text: it cannot be printed\n  hint: -o x.pack")
    contract, of = pack_contract(PackOptions(what, side, **asked))  # type: ignore[arg-type]
    with watching(quiet) as watch:
        pack = measure_pack(contract, of, output, watch=watch)
    if format_ == "json":
        data = {
            "file": str(output),
            "kernel": str(pack.kernel),
            "groups": pack.groups,
            "tokens": len(pack.drawn.token_N),
            "bytes": output.stat().st_size,
            "digest": pack.digest,
        }
        click.echo(json.dumps(data, indent=1))
        return
    size = output.stat().st_size / (1 << 20)
    click.echo(
        f"{output}: {pack.kernel}, {pack.groups:,} prompt groups, {len(pack.drawn.token_N):,} "
        f"tokens, {size:.1f} MB, digest {pack.digest[:8]}"
    )
    click.echo(f"next: servanda compare {output} KERNEL")
