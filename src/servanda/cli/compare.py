# `servanda compare`: two kernels, no YAML; the contract is what is left over.

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from servanda.cli.cost_table import cost_line, plan_lines
from servanda.cli.options import max_time_option, no_code_option, until
from servanda.cli.progress import watching
from servanda.cli.surface import looked
from servanda.engines.worker import spawn
from servanda.report.base import FORMATS
from servanda.runner.compare.contract import CONTRACT, Options, compare, costed, plan_of, prepare
from servanda.runner.compare.surface.difference import conclusion
from servanda.runner.probe import Engines

_FILE = click.Path(path_type=Path)
_VIOLATED = 1


@click.command("compare")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--prompts", type=_FILE, help="Lines of prompts.  [default: the shipped ones]")
@click.option("--golden", type=_FILE, help="Fixed texts, compared exactly on full logits.")
@click.option("--preset", metavar="NAME", help="Limits; `servanda contract presets` lists them.")
@click.option("--referee", metavar="KERNEL", help="Re-scores both A and B.")
@click.option(
    "--claim",
    type=click.Choice(["realised", "population"]),
    default="realised",
    show_default=True,
    help="Of the tokens measured, or of all that such prompts bring forth.",
)
@click.option("--sequences", type=click.IntRange(1), help="Prompt groups at most.")
@click.option("--max-new-tokens", type=click.IntRange(1), help="New tokens of a sequence.")
@click.option("--temperature", type=click.FloatRange(0, 100, min_open=True))
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True))
@click.option("--bitwise", is_flag=True, help="A and B compute the same bits, I declare.")
@max_time_option
@click.option("--plan", is_flag=True, help="Show the cost and what it decides, and stop.")
@click.option("--run-dir", type=_FILE, help="Where to measure.  [default: runs/B-vs-A-...]")
@click.option("--fresh", is_flag=True, help="Open a new attempt, judged at a smaller alpha.")
@click.option("--save-contract", "save", type=_FILE, help="Write the contract to FILE, too.")
@click.option(
    "--format", "format_", type=click.Choice(sorted(FORMATS)), default="text", show_default=True
)
@click.option("--quiet", is_flag=True, help="Only the verdict.")
@no_code_option
def compare_command(
    max_time: float | None,
    plan: bool,
    fresh: bool,
    save: Path | None,
    format_: str,
    quiet: bool,
    **asked: object,
) -> None:
    """Compare B, the candidate, with A, what serves today: B draws, A re-scores.

    \b
    A and B are kernel strings, such as
      transformers:models/tiny-lm@bfloat16+int8_weight_only,attention=sdpa,batch_size=16
    or servers, such as http://127.0.0.1:8000; or A is a reference pack (servanda tools measure -o
    x.pack).  Of two servers, what clients meet before the kernels is compared first: prompt ids,
    chat templates, tool calls, sampling defaults.
    """
    deadline = until(max_time)
    aside = format_ != "text"  # only the verdict goes to stdout then

    def say(*lines: str) -> None:
        if not quiet:
            for line in lines:
                click.echo(line, err=aside)

    with Engines(spawn) as engines, watching(quiet) as watch:
        wanted = Options(**asked)  # type: ignore[arg-type]
        odd = () if plan else looked(wanted, say)
        if odd and quiet:  # the exit code stands on it
            click.echo(f"surface   ✗ {conclusion(odd)}", err=aside)
        if odd and odd[0].layer == "tokenizer":
            sys.exit(_VIOLATED)
        comparison = prepare(wanted, engines)
        if plan:
            ready = plan_of(comparison)
            cost = costed(ready, engines, watch=watch)
            click.echo("\n".join([*comparison.said, "", *plan_lines(ready, cost)]))
            if save is not None:
                comparison.save(save)
            return
        say(*comparison.said)
        say(f"cost      {cost_line(costed(plan_of(comparison), engines, watch=watch))}", "")
        verdict = compare(comparison, engines, watch=watch, deadline=deadline, fresh=fresh)
    try:
        click.echo(FORMATS[format_](verdict))
    except BrokenPipeError:  # whoever reads has seen enough; the exit code still counts
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if save is not None:
        comparison.save(save)
    kept = comparison.folder / CONTRACT
    say("", f"contract  {save or kept}  (servanda check {kept} --run-dir {comparison.folder})")
    if odd:  # a client that is served otherwise is served otherwise, whatever the kernels do
        layers = ", ".join(f.layer for f in odd)
        click.echo(f"exit      {_VIOLATED}, for the surface: {layers}", err=aside)
        sys.exit(_VIOLATED)
    sys.exit(verdict.exit_code)
