# `servanda contract derive`: from a budget to the contract that keeps it; nothing is measured.

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import click
from pydantic import ValidationError

from servanda.authoring.derive.budget import Request
from servanda.authoring.derive.derivation import Derivation
from servanda.authoring.derive.derivation import derive as derived
from servanda.authoring.derive.sizes import MOST
from servanda.authoring.template import name_of
from servanda.cli.options import no_code_option
from servanda.cli.output import OUTPUT, refuse_place, write_text
from servanda.contract.kernel_string import parse_kernel
from servanda.contract.model import GroupAdvantage, Kernel, Weighting
from servanda.engines import engine_names
from servanda.engines.table import TableEngine
from servanda.errors import ContractError, Problem
from servanda.judgement import plan as planning
from servanda.judgement.rewards import REWARDS, file_and_function
from servanda.registry import did_you_mean
from servanda.runner import load
from servanda.runner.compare.prompts import read_corpus
from servanda.runner.compare.sides import refuse_missing
from servanda.theory.bounds.gradient import Loss
from servanda.theory.divergence.precision import CAPTURES
from servanda.traces.corpus import Corpus

_FILE = click.Path(path_type=Path)
_WIDTH = 98
_SUFFIX = ".kernelcontract.yaml"
_WEIGHTINGS = ("naive", *Weighting.model_fields)


@click.command("derive")
@click.option("--train", required=True, metavar="KERNEL", help="What the trainer runs.")
@click.option("--infer", required=True, metavar="KERNEL", help="What draws the answers.")
@click.option("--prompts", required=True, type=_FILE, help="Lines of prompts.")
@click.option("--golden", type=_FILE, help="Fixed texts, for the drift of logits.")
@click.option(
    "--max-new-tokens", required=True, type=click.IntRange(1, 1_000_000), help="Of an answer."
)
@click.option("--reward-drift", type=float, metavar="R", help="Of any reward of whole answers.")
@click.option(
    "--reward-range", type=(float, float), default=(0.0, 1.0), show_default="0 1", metavar="LO HI"
)
@click.option(
    "--reward-gap",
    metavar="OF",
    help="Hold the budget on your own reward: exact_answer, contains_answer, FILE.py:FUNCTION.",
)
@click.option(
    "--policy-gradient-bias", type=float, metavar="B", help="Of the token-level gradient."
)
@click.option("--advantage", type=float, metavar="A", help="The largest |advantage|.")
@click.option("--group-size", type=click.IntRange(2), help="GRPO: its bound of the advantage.")
@click.option("--score-norm", metavar="X|logit_space", help="The largest norm of grad log p.")
@click.option("--weighting", metavar="NAME=C", help="naive, tis=2, mis=0.5,2, clip=0.2, ...")
@click.option(
    "--loss",
    type=click.Choice(get_args(Loss)),
    help="What a token's loss is divided by.  [default: token_mean]",
)
@click.option("--clip-range", type=(float, float), metavar="LO HI", help="PPO: of the ratio.")
@click.option("--ratio-share", type=float, metavar="S", help="Of it, that the kernels may use.")
@click.option(
    "--confidence",
    type=click.FloatRange(0.5, 1, min_open=True, max_open=True),
    default=0.95,
    show_default=True,
)
@click.option(
    "--claim",
    type=click.Choice(["population", "realised"]),
    default="population",
    show_default=True,
    help="Of all that such prompts bring forth, or of the tokens measured.",
)
@click.option("--aligned", is_flag=True, help="The kernels agree operation by operation.")
@click.option(
    "--most",
    type=click.IntRange(64),
    default=MOST,
    show_default=True,
    help="Prompt groups that a run may have.",
)
@OUTPUT
@click.option("--force", is_flag=True, help="Write over a file that is there.")
@no_code_option
def derive(
    train: str,
    infer: str,
    prompts: Path,
    golden: Path | None,
    max_new_tokens: int,
    reward_drift: float | None,
    reward_range: tuple[float, float],
    reward_gap: str | None,
    policy_gradient_bias: float | None,
    advantage: float | None,
    group_size: int | None,
    score_norm: str | None,
    weighting: str | None,
    loss: Loss | None,
    clip_range: tuple[float, float] | None,
    ratio_share: float | None,
    confidence: float,
    claim: str,
    aligned: bool,
    most: int,
    output: Path | None,
    force: bool,
) -> None:
    """Write the contract that keeps a budget, each limit with its reason; nothing is measured.

    Enforced is what certifies the budget itself.  Monitored is what moves sooner.
    KERNEL is a kernel string, such as transformers:models/tiny-lm@bfloat16.
    """
    refuse_place(output, force)
    given = {
        "--advantage": advantage,
        "--group-size": group_size,
        "--score-norm": score_norm,
        "--weighting": weighting,
        "--loss": loss,
    }
    if policy_gradient_bias is None:
        _refuse_idle(given)
    place = output.parent if output is not None else Path()
    kernels = [_kernel(train, "--train"), _kernel(infer, "--infer")]
    corpus = read_corpus(prompts)
    if golden is not None:
        read_corpus(golden)
    rows = [len(group) for group in corpus.groups]
    there = [
        kernel.model_copy(update={"model": _beside(kernel.model, place)} if kernel.model else {})
        for kernel in kernels
    ]
    found = derived(
        Request(
            name=name_of(output.name.removesuffix(_SUFFIX)) if output else "derived",
            train=there[0],
            infer=there[1],
            prompts=_beside(prompts, place),
            golden=None if golden is None else _beside(golden, place),
            tokens=max_new_tokens,
            lines=(max(rows), sum(rows) / len(rows)),
            reward_drift=reward_drift,
            reward_range=reward_range,
            reward_of=_reward(reward_gap or "", place),
            bias=policy_gradient_bias,
            advantage=_advantage(advantage, group_size),
            score_norm=_score_norm(score_norm),
            weighting=_weighting(weighting),
            loss=loss or "token_mean",
            clip_range=clip_range,
            ratio_share=ratio_share,
            confidence=confidence,
            claim="realised" if claim == "realised" else "population",
            capture=min(map(_capture, kernels), key=lambda name: CAPTURES[name]),
            aligned=aligned,
            most=most,
        )
    )
    _refuse_unanswered(reward_gap or "", corpus)
    _refuse_unfit(found.text, place)
    if output is None:
        click.echo(found.text, nl=False)
    else:
        write_text(output, found.text)
    # where your reward is compared, train answers too
    each = max_new_tokens * sum(rows) / len(rows) * (2 if reward_gap else 1)
    for line in _said(found, output, each):
        click.echo(line, err=output is None)


def _refuse_idle(given: Mapping[str, object]) -> None:
    """Options that say what a bias is made of, where no bias is asked for."""
    idle = [option for option, value in given.items() if value is not None]
    if idle:
        raise click.UsageError(
            f"{', '.join(idle)}: without --policy-gradient-bias nothing here is made of it\n"
            "  hint: give --policy-gradient-bias B, or leave it out"
        )


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

    Nobody has seen it yet, so no problem points into it.
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


def _said(found: Derivation, output: Path | None, each: float) -> list[str]:
    """What was derived, why some of it is only watched, and what it will take.

    Args:
        each: new tokens of a prompt group, at most.
    """
    lines = [f"wrote      {output}"] if output is not None else []
    lines += [f"enforced   {words}" for words in found.enforced]
    lines += [f"monitored  {words}" for words in found.monitored]
    if found.monitored:
        lines.append(
            "           none of them is needed to keep a budget: they warn, and fail nothing"
        )
    for words in found.left_out:
        lines += textwrap.wrap(
            f"left out   {words}", _WIDTH, subsequent_indent=" " * 11, break_on_hyphens=False
        )
    lines.append(
        f"takes      about {found.expected:,} prompt groups for a kernel at half the budget; at "
        f"most {found.offline[1]:,},"
    )
    lines.append(f"           which is {math.ceil(found.offline[1] * each):,} new tokens")
    if output is not None:
        lines += [
            f"next       servanda contract explain --chain {output}",
            f"           servanda check {output}",
        ]
    return lines


def _kernel(text: str, option: str) -> Kernel:
    kernel = parse_kernel(text, engines=engine_names(), name=option)
    refuse_missing(kernel, text, option)
    if kernel.engine == "table" and Path(kernel.model or "").is_dir():
        raise ContractError(
            f"{option}: {kernel.model} is a folder, and a table is a JSON file",
            hint="give the file in it, such as table:p.json",
        )
    return kernel


def _capture(kernel: Kernel) -> str:
    """What the kernel's logprobs will be recorded in, as far as that is known beforehand."""
    return TableEngine(kernel).describe().capture if kernel.engine == "table" else "float64"


def _beside(path: str | Path | None, place: Path) -> str:
    """A path as a file of a folder says it."""
    return Path(os.path.relpath(path or "", place)).as_posix()


def _reward(of: str, place: Path) -> str:
    """A reward by its name, or by the file it is in, as a contract in that folder names it."""
    file, colon, function = of.rpartition(":")
    return f"{_beside(file, place)}:{function}" if colon else of


def _advantage(largest: float | None, group: int | None) -> float | GroupAdvantage | None:
    if largest is not None and group is not None:
        raise click.UsageError("--advantage and --group-size say the same thing: give one")
    return largest if group is None else GroupAdvantage(group_size=group)  # type: ignore[call-arg]


def _score_norm(text: str | None) -> float | str | None:
    if text is None or text == "logit_space":
        return text
    try:
        return float(text)
    except ValueError:
        raise click.BadParameter(f"--score-norm is a number, or logit_space: {text!r}") from None


def _weighting(text: str | None) -> Weighting | None:
    """tis=2, or mis=0.5,2; None where every token counts alike."""
    name, _, values = ("naive" if text is None else text).partition("=")
    if name not in _WEIGHTINGS:
        hint = did_you_mean(name, _WEIGHTINGS)
        if name == "is":
            hint = "importance weights have no largest value, so no sample bounds them: tis=2"
        raise click.BadParameter(f"no weighting is named {name!r}\n  hint: {hint}")
    if name == "naive" and values:
        raise click.BadParameter(f"naive corrects nothing and takes no value: {text!r}")
    if name == "naive":
        return None
    try:
        numbers = [float(value) for value in values.split(",")]
        value = tuple(numbers) if len(numbers) > 1 else numbers[0]
        return Weighting.model_validate({name: value})
    except (ValueError, ValidationError):
        example = "tis=2" if name in ("tis", "clip") else f"{name}=0.5,2"
        raise click.BadParameter(f"{text!r} is no weighting; write {example}") from None
