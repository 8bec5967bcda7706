# `servanda compare`: two kernels, no YAML; the contract is what is left over.

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import click

from servanda.cli.cost_table import cost_line, plan_data, plan_lines
from servanda.cli.options import DASH, shared, show, show_json, until
from servanda.cli.referee_text import third_lines
from servanda.cli.screen import next_step, show_marked, show_verdict, watching
from servanda.contract.kernel_string import parse_kernel
from servanda.engines import engine_names
from servanda.engines.http import HTTPEngine
from servanda.errors import MeasurementError
from servanda.judgement.verdict import FORMATS, Verdict
from servanda.runner.compare.contract import (
    CONTRACT,
    Comparison,
    Options,
    compare,
    costed,
    plain_texts,
    plan_of,
    prepare,
)
from servanda.runner.compare.side_distance import pair_score
from servanda.runner.compare.surface import (
    Client,
    LayerResult,
    compare_layers,
    conclusion,
    differs,
    lines,
)
from servanda.runner.probe import Engines
from servanda.runner.ray_engines import engines_on

# The API layers of two servers, compared before their kernels.


_TEXTS = 32  # of the workload, that both tokenizers are asked to encode


def compare_surface(options: Options, say: Callable[..., None]) -> tuple[LayerResult, ...]:
    """What differs above the kernels of two servers, said line by line; () of other kernels.

    Raises:
        ContractError, MeasurementError: as `prepare` and the servers do.
    """
    kernels = {
        name: parse_kernel(text, engines=engine_names(), name=name)
        for name, text in (("A", options.a), ("B", options.b))
    }
    if any(kernel.url is None for kernel in kernels.values()):
        return ()
    texts = plain_texts(options.prompts)[:_TEXTS]
    findings: list[LayerResult] = []
    with ExitStack() as opened:
        a, b = (
            Client(name, opened.enter_context(closing(HTTPEngine(kernel))))
            for name, kernel in kernels.items()
        )
        for finding in compare_layers(a, b, texts):
            findings.append(finding)
            say(*lines(finding))
            if finding.layer == "tokenizer" and finding.outcome == "differs":
                break
    differences = differs(findings)
    say(*([f"surface   ✗ {conclusion(differences)}"] if differences else []), "")
    return differences


_VIOLATED = 1
_MAY = {
    "holds": "B may replace A, as far as this run looked: no limit of preset {} is exceeded",
    "violated": "B may not replace A: it breaks preset {}",
}
_OPEN = "not known yet whether B may replace A by preset {}"


def answer_lines(verdict: Verdict, comparison: Comparison) -> list[str]:
    """Whether B may replace A, and in which settings they differ; before the verdict."""
    said = [f"answer    {_MAY.get(verdict.outcome, _OPEN).format(comparison.preset)}"]
    a, b = (kernel.model_dump() for kernel in comparison.sides.pair)
    odd = [name for name in a if name not in _ASIDE and a[name] != b[name]]
    if not odd or None in (a["model"], b["model"]):
        return said
    named = "; ".join(f"{name} {a[name] or 'unset'} and {b[name] or 'unset'}" for name in odd)
    more = ""
    if len(odd) > 1:
        more = ": change one at a time to see which matters"
    elif a["engine"] == b["engine"] == "transformers" and verdict.outcome != "holds":
        more = f": servanda bisect {comparison.options.a} {comparison.options.b} names the module"
    return [*said, f"settings  A and B differ in {named}{more}"]


# of one kernel, what changes no number or is another role
_ASIDE = ("title", "path", "model")


@click.command("compare")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@shared("--prompts", help="[default: the shipped ones]")
@shared("--golden", "--referee")
@shared("--preset", help="One for serving, such as fp8.")
@shared("--claim", default="realised")
@shared("--sequences", "--max-new-tokens", "--temperature", "--top-p", "--bitwise", "--max-time")
@click.option(
    "--plan",
    is_flag=True,
    help="Print the cost and the effect sizes that the run can detect, and stop.",
)
@shared("--run-dir", help="[default: runs/B-vs-A-...]")
@shared("--fresh", "--ladder", "--save-contract")
@shared("--format", type=click.Choice(sorted(FORMATS)))
@shared("--on", help="Each kernel runs in an actor.")
@shared("--ray-actor", "--quiet", "--no-code")
def compare_command(
    max_time: float | None,
    plan: bool,
    fresh: bool,
    ladder: bool,
    save: Path | None,
    format_: str,
    on: str | None,
    actors: tuple[str, ...],
    quiet: bool,
    **options: object,
) -> None:
    """Compare B, the candidate, with A, which serves today: B generates, A re-scores the tokens.

    \b
    A and B are kernel strings, such as
      transformers:models/tiny-lm@bfloat16+int8_weight_only,attention=sdpa,batch_size=16
    or servers, such as http://127.0.0.1:8000; or A is a baseline file (servanda tools measure -o
    x.pack).  For two servers the API layer is compared first: prompt ids, chat templates, tool
    calls, sampling defaults.
    """
    deadline = until(max_time)
    if plan and format_ not in ("text", "json"):
        raise click.UsageError(f"--plan is printed as text or json, not as {format_}")
    aside = format_ != "text" or str(save) == DASH  # only the verdict, or contract, is on stdout

    def say(*lines: str) -> None:
        if not quiet:
            for line in lines:
                click.echo(line, err=aside)

    request = Options(**options)  # type: ignore[arg-type]
    differences = () if plan else compare_surface(request, say)
    if differences and quiet:  # the exit code stands on it
        click.echo(f"surface   ✗ {conclusion(differences)}", err=aside)
    if differences and differences[0].layer == "tokenizer":
        if format_ == "json":
            show_json({"outcome": "violated", "surface": differences})
        sys.exit(_VIOLATED)
    verdict, third, scored = None, None, ()
    with engines_on(on, actors) as open_, Engines(open_) as engines, watching(quiet) as watch:
        comparison = prepare(request, engines)
        if not plan:
            say(*comparison.said)
        size = plan_of(comparison)
        cost = costed(size, engines, watch=watch)
        if not plan:
            say(f"cost      {cost_line(cost)}", "")
            verdict = compare(
                comparison, engines, watch=watch, deadline=deadline, fresh=fresh, ladder=ladder
            )
            if request.referee is not None and verdict.sequences and not (deadline and deadline()):
                try:
                    third = pair_score(comparison.folder, verdict, open_, watch=watch)
                    scored = (*third_lines(third, "A", "B"),)
                except MeasurementError as error:  # the verdict stands without it
                    scored = (f"scorer    {error.problems[0].message}",)
    if verdict is None:
        if format_ == "json":
            show_json(plan_data(size, cost), err=str(save) == DASH)
        else:
            lines = [*comparison.said, "", *plan_lines(size, cost)]
            show("\n".join(lines), err=aside)
        _save(comparison, save)
        return
    if format_ == "text":
        show_marked([*answer_lines(verdict, comparison), ""], err=str(save) == DASH)
        more = (*next_step(verdict, comparison.folder), *scored)
        show_verdict(verdict, *more, err=str(save) == DASH)
    elif format_ == "json" and third is not None:
        data = json.loads(FORMATS["json"](verdict))
        show_json({**data, "referee": third}, err=str(save) == DASH)
    else:
        show(FORMATS[format_](verdict), err=str(save) == DASH)
    _save(comparison, save)
    contract_file = comparison.folder / CONTRACT
    at = contract_file if save is None or str(save) == DASH else save
    say("", f"contract  {at}  (servanda check {contract_file} --run-dir {comparison.folder})")
    if differences:  # a client that is served otherwise is served otherwise, whatever kernels do
        layers = ", ".join(difference.layer for difference in differences)
        click.echo(f"exit      {_VIOLATED}, for the surface: {layers}", err=aside)
        sys.exit(_VIOLATED)
    sys.exit(verdict.exit_code)


def _save(comparison: Comparison, save: Path | None) -> None:
    if str(save) == DASH:
        show(comparison.text(Path()).rstrip("\n"))
    elif save is not None:
        comparison.save(save)
