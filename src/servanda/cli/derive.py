# `servanda contract derive`: from a budget to the contract that keeps it; nothing is measured.

from __future__ import annotations

import math
import os
import textwrap
from pathlib import Path
from typing import Any, get_args

import click
from pydantic import ValidationError

from servanda.authoring.derive.budget import Request
from servanda.authoring.derive.derivation import Derivation
from servanda.authoring.derive.derivation import derive as derived
from servanda.authoring.derive.sizes import MOST
from servanda.authoring.template import name_of
from servanda.cli.options import PRINTS, given, shared, show
from servanda.cli.output import refuse_place, write_text
from servanda.contract.kernel_string import moved_path, parse_kernel
from servanda.contract.model import Kernel
from servanda.contract.objective import GroupAdvantage, Weighting
from servanda.engines import engine_names
from servanda.engines.table import TableEngine
from servanda.errors import ContractError, Problem
from servanda.judgement import plan as planning
from servanda.judgement.rewards import REWARDS, file_and_function
from servanda.registry import did_you_mean
from servanda.runner import load
from servanda.runner.compare.contract import read_corpus
from servanda.runner.compare.sides import refuse_missing
from servanda.theory.bounds.gradient import Loss
from servanda.theory.divergence.precision import CAPTURES
from servanda.traces.corpus import Corpus

_WIDTH = 98
_SUFFIX = ".kernelcontract.yaml"
_WEIGHTINGS = ("naive", *Weighting.model_fields)
_OF_BIAS = ("advantage", "group_size", "score_norm", "weighting", "loss")


def _kernel(_: click.Context, param: click.Parameter, text: str) -> Kernel:
    """The kernel of a kernel string, whose files are there."""
    option = param.opts[0]
    kernel = parse_kernel(text, engines=engine_names(), name=option)
    refuse_missing(kernel, text, option)
    if kernel.engine == "table" and Path(kernel.model or "").is_dir():
        raise ContractError(
            f"{option}: {kernel.model} is a folder, and a table is a JSON file",
            hint="give the file in it, such as table:p.json",
        )
    return kernel


def _score_norm(text: str) -> float | str:
    try:
        return text if text == "logit_space" else float(text)
    except ValueError:
        raise click.BadParameter(f"--score-norm is a number, or logit_space: {text!r}") from None


def _weighting(text: str) -> Weighting | None:
    """tis=2, or mis=0.5,2; None where every token counts alike."""
    name, _, values = text.partition("=")
    if name not in _WEIGHTINGS:
        hint = did_you_mean(name, _WEIGHTINGS)
        if name == "is":
            hint = "importance weights have no largest value, so no sample bounds them: tis=2"
        raise click.BadParameter(f"no weighting is named {name!r}\n  hint: {hint}")
    if name == "naive":
        if values:
            raise click.BadParameter(f"naive corrects nothing and takes no value: {text!r}")
        return None
    try:
        numbers = tuple(float(number) for number in values.split(","))
        return Weighting.model_validate({name: numbers if numbers[1:] else numbers[0]})
    except (ValueError, ValidationError):
        example = "tis=2" if name in ("tis", "clip") else f"{name}=0.5,2"
        raise click.BadParameter(f"{text!r} is no weighting; write {example}") from None


@click.command("derive")
@click.option(
    "--train", callback=_kernel, metavar="KERNEL", required=True, help="Kernel of the trainer."
)
@click.option(
    "--infer",
    callback=_kernel,
    metavar="KERNEL",
    required=True,
    help="Kernel that generates the responses.",
)
@shared("--prompts", required=True)
@shared("--golden")
@shared("--max-new-tokens", name="tokens", required=True)
@click.option(
    "--reward-drift",
    type=float,
    metavar="R",
    help="Budget: largest drift of any reward of whole responses, such as 0.05.",
)
@click.option(
    "--reward-range",
    type=(float, float),
    default=(0.0, 1.0),
    metavar="LO HI",
    help="Smallest and largest reward, such as -1 1.  [default: 0 1]",
)
@click.option(
    "--reward-gap",
    metavar="OF",
    default="",
    help="Measure the budget on your own reward: exact_answer, contains_answer, FILE.py:FUNCTION.",
)
@click.option(
    "--policy-gradient-bias",
    "bias",
    type=float,
    metavar="B",
    help="Budget: largest bias of the token-level gradient, such as 0.1.",
)
@click.option("--advantage", type=float, metavar="A", help="Largest |advantage|, such as 1.")
@click.option(
    "--group-size",
    type=click.IntRange(2),
    help="Group size of GRPO, such as 8, which bounds the advantage.",
)
@click.option(
    "--score-norm",
    type=_score_norm,
    metavar="X|logit_space",
    help="Largest norm of grad log p, such as 1.41, or logit_space.",
)
@click.option(
    "--weighting",
    type=_weighting,
    metavar="NAME=C",
    help="Importance weighting of the loss: naive, tis=2, mis=0.5,2, clip=0.2, ...",
)
@click.option(
    "--loss",
    type=click.Choice(get_args(Loss)),
    default="token_mean",
    show_default=True,
    help="Normalisation of the loss.",
)
@click.option(
    "--clip-range",
    type=(float, float),
    metavar="LO HI",
    help="PPO clip range below and above 1, such as 0.2 0.28.",
)
@click.option(
    "--ratio-share",
    type=float,
    metavar="S",
    help="Share of the clip range that the kernel mismatch may use, such as 0.25.",
)
@click.option(
    "--confidence",
    type=click.FloatRange(0.5, 1, min_open=True, max_open=True),
    default=0.95,
    show_default=True,
    help="Confidence of the verdict, such as 0.95.",
)
@shared("--claim", default="population")
@click.option(
    "--aligned", is_flag=True, help="Declare that the kernels agree operation by operation."
)
@click.option(
    "--most",
    type=click.IntRange(64),
    default=MOST,
    show_default=True,
    help="Largest number of prompt groups per run.",
)
@shared("-o", help=PRINTS)
@shared("--force", "--no-code")
def derive(
    train: Kernel,
    infer: Kernel,
    prompts: Path,
    golden: Path | None,
    reward_gap: str,
    advantage: float | None,
    group_size: int | None,
    output: Path | None,
    force: bool,
    **budget: Any,
) -> None:
    """Write the contract that keeps a budget, each limit with its reason; nothing is measured.

    Enforced clauses certify the budget itself.  Monitored clauses are early warnings.
    KERNEL is a kernel string, such as transformers:models/tiny-lm@bfloat16.
    """
    refuse_place(output, force)
    if budget["bias"] is None and (idle := given(_OF_BIAS)):
        raise click.UsageError(
            f"{', '.join(idle)}: without --policy-gradient-bias nothing here is made of it\n"
            "  hint: give --policy-gradient-bias B, or leave it out"
        )
    if advantage is not None and group_size is not None:
        raise click.UsageError("--advantage and --group-size say the same thing: give one")
    group = GroupAdvantage.model_validate({"group_size": group_size}) if group_size else None
    place = output.parent if output is not None else Path()
    corpus = read_corpus(prompts)
    if golden is not None:
        read_corpus(golden)
    rows = [len(lines) for lines in corpus.groups]
    file, colon, function = reward_gap.rpartition(":")
    derivation = derived(
        Request(
            name=name_of(output.name.removesuffix(_SUFFIX)) if output else "derived",
            train=_moved(train, place),
            infer=_moved(infer, place),
            prompts=_beside(prompts, place),
            golden=None if golden is None else _beside(golden, place),
            lines=(max(rows), sum(rows) / len(rows)),
            reward_of=f"{_beside(file, place)}:{function}" if colon else reward_gap,
            advantage=group or advantage,
            capture=min(map(_capture, (train, infer)), key=lambda name: CAPTURES[name]),
            **budget,
        )
    )
    _refuse_unanswered(reward_gap, corpus)
    _refuse_unfit(derivation.text, place)
    if output is None:
        show(derivation.text.rstrip("\n"))
    else:
        write_text(output, derivation.text)
    # where your reward is compared, train answers too
    each = budget["tokens"] * sum(rows) / len(rows) * (2 if reward_gap else 1)
    for line in _lines(derivation, output, each):
        click.echo(line, err=output is None)


def _refuse_unanswered(of: str, corpus: Corpus) -> None:
    """A reward that is nowhere, or that reads what a line of the prompts has not."""
    file = file_and_function(of)
    if file is not None and not Path(file[0]).is_file():
        raise ContractError(
            f"--reward-gap: there is no file {file[0]}",
            hint="name FILE.py:FUNCTION from where you are, called as FUNCTION(prompt, answer)",
        )
    needs = REWARDS[of].needs if of in REWARDS else ""
    line = next((p.line for p in corpus.prompts if p.answer is None), None) if needs else None
    if line is not None:
        raise ContractError(
            f"--reward-gap {of} reads the {needs!r} of each line, and {corpus.file}:{line} has "
            "none",
            hint="give --prompts a file whose lines all have one, or --reward-gap "
            "FILE.py:FUNCTION, a reward that does without",
        )


def _refuse_unfit(text: str, place: Path) -> None:
    """Refuse a text in which `servanda contract lint` would find a problem, before it is written.

    No one has seen it yet, so no problem points into it.
    """
    try:
        contract = load.read(text.encode(), "the derived contract", place)
        planning.make_plan(contract, *load.corpora(contract))
    except ContractError as error:
        hint = (
            "servanda contract lint would refuse this contract; change the budget, texts or kernels"
        )
        problems = [Problem(problem.message, hint=hint) for problem in error.problems]
        raise ContractError.all(problems) from None


def _lines(derivation: Derivation, output: Path | None, each: float) -> list[str]:
    """What was derived, why some of it is only watched, and what it will take.

    Args:
        each: new tokens of a prompt group, at most.
    """
    lines = [f"wrote      {output}"] if output is not None else []
    lines += [f"enforced   {clause}" for clause in derivation.enforced]
    lines += [f"monitored  {clause}" for clause in derivation.monitored]
    if derivation.monitored:
        lines.append(
            "           none of them is needed to keep a budget: they warn, and fail nothing"
        )
    for clause in derivation.left_out:
        lines += textwrap.wrap(
            f"left out   {clause}", _WIDTH, subsequent_indent=" " * 11, break_on_hyphens=False
        )
    lines.append(
        f"takes      about {derivation.expected:,} prompt groups for a kernel at half the budget; "
        f"at most {derivation.offline[1]:,},"
    )
    lines.append(f"           which is {math.ceil(derivation.offline[1] * each):,} new tokens")
    if output is not None:
        lines += [
            f"next       servanda contract explain --chain {output}",
            f"           servanda check {output}",
        ]
    return lines


def _moved(kernel: Kernel, place: Path) -> Kernel:
    """A kernel as a contract in that folder names it."""
    if kernel.model is None:
        return kernel
    model = moved_path(lambda path: _beside(path, place), kernel.model)
    return kernel.model_copy(update={"model": model})


def _capture(kernel: Kernel) -> str:
    """What the kernel's logprobs will be recorded in, as far as that is known beforehand."""
    return TableEngine(kernel).describe().capture if kernel.engine == "table" else "float64"


def _beside(path: str | Path, place: Path) -> str:
    """A path as a file of a folder says it."""
    return Path(os.path.relpath(path, place)).as_posix()
