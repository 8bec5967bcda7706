# `servanda tools kld`: base files of llama.cpp, compared with any kernel, or written of it.

from __future__ import annotations

from pathlib import Path

import click

from servanda.cli.options import FILE, shared, show_as
from servanda.cli.screen import watching
from servanda.contract.kernel_string import parse_kernel
from servanda.engines import engine_names
from servanda.engines.foreign_code import refuse_code_of_kernel
from servanda.engines.kld_file import read_kld
from servanda.report.format import number, percent
from servanda.runner.kld import KldReport, compared_kld, written_kld
from servanda.runner.load import read_corpus
from servanda.runner.measurement import Progress
from servanda.runner.probe import encoded
from servanda.runner.run import spawn


@click.command("kld")
@click.argument("kernel", metavar="KERNEL")
@click.option("--base", type=FILE, help="Base file that the kernel is compared with.")
@click.option("--texts", type=FILE, help="Texts of a new base file, such as prompts.jsonl.")
@click.option("--save-base", "output", type=FILE, help="The new base file, such as base.kld.")
@click.option(
    "--context",
    type=click.IntRange(4, 1 << 20),
    default=512,
    show_default=True,
    help="Tokens of each text of a new base file, as -c of llama-perplexity.",
)
@click.option(
    "--bos",
    type=click.IntRange(0),
    help="Id of the token that begins each text, for models whose GGUF file has add_bos_token.",
)
@shared("--quiet", "--format", "--no-code")
def kld_command(
    kernel: str,
    base: Path | None,
    texts: Path | None,
    output: Path | None,
    context: int,
    bos: int | None,
    quiet: bool,
    format_: str,
) -> None:
    """Compare a kernel with a base file of llama.cpp, or write one.

    A base file (llama-perplexity --kl-divergence-base FILE) holds texts and the log probabilities
    of the whole vocabulary after each token of their second halves. With --base, the texts are
    scored by the kernel of any engine that gives full logits, and the statistics of
    llama-perplexity --kl-divergence are printed, with the mean total variation. With --texts and
    --save-base, a base file of the kernel is written, which llama-perplexity reads.
    """
    if (base is None) == (output is None) or (output is None) != (texts is None):
        raise click.UsageError(
            "give --base FILE to compare, or --texts FILE --save-base FILE to write"
        )
    named = parse_kernel(kernel, engines=engine_names())
    refuse_code_of_kernel(named, "kernel")
    known = read_kld(base) if base is not None else None
    with watching(quiet) as watch:
        watch(Progress("loading the kernel", 0, 1))
        engine = spawn(named, "kernel")
        try:
            watch(Progress("loading the kernel", 1, 1))
            if known is not None:
                found = compared_kld(known, engine, bos=bos, batch_size=named.batch_size)
                show_as(format_, found, "\n".join(_lines(known.path, found)))
            elif texts is not None and output is not None:
                ids = encoded(read_corpus(texts), engine)
                options = {"bos": bos, "batch_size": named.batch_size}
                count = written_kld(output, engine, ids, width=context, **options)
                size = output.stat().st_size / (1 << 20)
                text = f"{output}: {count} texts of {context} tokens, {size:.1f} MiB"
                data = {"file": str(output), "texts": count, "context": context}
                show_as(format_, data, text)
        finally:
            engine.close()


def _lines(path: Path, found: KldReport) -> list[str]:
    quantiles = ", ".join(f"p{100 * q:g} {number(v)}" for q, v in found.kld_quantiles.items())
    return [
        f"{path}: {found.texts} texts, {found.positions:,} positions",
        f"mean KLD           {number(found.kld_nats)} ± {number(found.kld_error_nats)} nats, "
        "KL(base || kernel)",
        f"quantiles of KLD   {quantiles}, max {number(found.kld_max)}",
        f"mean tv            {number(found.tv)}",
        f"same top token     {percent(found.same_top)}",
        f"ln PPL ratio       {found.log_ppl_ratio_nats:+.3g} (kernel over base)",
    ]
