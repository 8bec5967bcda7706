# `servanda relations`: one kernel against itself, without a reference.

from __future__ import annotations

import shlex
import statistics
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from servanda.cli.options import shared, show_json
from servanda.cli.screen import watching
from servanda.contract.kernel_string import parse_kernel, shown
from servanda.contract.model import Kernel
from servanda.engines import engine_names
from servanda.errors import ContractError
from servanda.runner import run
from servanda.runner.compare.contract import SHIPPED, read_corpus, shipped
from servanda.runner.compare.sides import refuse_missing
from servanda.runner.measurement import Progress
from servanda.runner.probe import encoded
from servanda.runner.relations.judge import Finding
from servanda.runner.relations.observation import Ids
from servanda.runner.relations.relation import Cases
from servanda.runner.relations.run import NAMES, Options, relations
from servanda.runner.relations.subject import Request, Subject
from servanda.theory.sampling import uniforms

_MARK = {"holds": "✓", "violated": "✗", "inconclusive": "?", "untestable": "–"}
_STATES = {"untestable": "not testable: ", "violated": "violated: "}
_FLOAT32_NATS = 1e-3  # rounding of float32 is smaller
_STANDS_OUT = 100.0  # times the median difference of the other relations
_TEXTS = 64  # prompts of the file that are used
_IDS = 1000  # ids of a server that encodes no texts and does not tell its vocabulary


class _IdsType(click.ParamType):
    name = "ids"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Ids:
        words = str(value).split(",")
        if not all(word.strip().isascii() and word.strip().isdigit() for word in words):
            self.fail(f"{value!r} is no list of token ids: write 5,17,8", param, ctx)
        return tuple(map(int, words))


@click.command("relations")
@click.argument("what", metavar="URL|KERNEL|CONTRACT")
@shared("--side", help="[default: infer]")
@click.option(
    "--only",
    type=click.Choice(NAMES),
    multiple=True,
    help="Test this relation, such as cache.  Repeatable.  [default: all]",
)
@click.option(
    "--limit",
    type=click.FloatRange(0),
    metavar="NATS",
    help="Largest allowed difference of a logprob, such as 1e-4; 0 compares bits.  [default: bits, "
    "and a difference that can be rounding is undecided]",
)
@click.option(
    "--alpha",
    type=click.FloatRange(0, 0.5, min_open=True),
    default=0.05,
    show_default=True,
    help="Probability that a test rejects a relation that holds, such as 0.01.",
)
@shared("--prompts", help="[default: the shipped ones]")
@click.option(
    "--longest",
    type=click.IntRange(2),
    default=288,
    show_default=True,
    help="Length of the longest prompt, tokens, such as 1024.",
)
@click.option(
    "--requests",
    type=click.IntRange(2, 1000),
    default=6,
    show_default=True,
    help="Number of requests of relations that need no certain lengths, such as 12.",
)
@shared("--max-new-tokens", default=8)
@shared("--seed")
@click.option(
    "--prompt-ids",
    type=_IdsType(),
    multiple=True,
    metavar="IDS",
    help="Test this request alone, such as 5,17,8; further ones are the requests beside it, "
    "before it, or that fill the cache.",
)
@click.option(
    "--between",
    type=click.IntRange(0),
    default=0,
    metavar="TOKENS",
    show_default=True,
    help="Tokens of other requests between filling the prefix cache and reading it, such as "
    "100000: a cache with tiers moves the prefix to the next one.",
)
@click.option(
    "--update",
    metavar="COMMAND",
    help="Command that lets the server load its own weights again, for the relation update.",
)
@shared("--quiet", "--format", "--no-code")
def relations_command(
    what: str,
    side: str | None,
    only: tuple[str, ...],
    limit: float | None,
    alpha: float,
    prompts: Path | None,
    quiet: bool,
    format_: str,
    update: str | None,
    between: int,
    **how: Any,
) -> None:
    """Compare a kernel with itself: what must not change an answer, and does it?

    It needs no second kernel.  The answer to a request has to be the same once more (replay),
    among other requests (company), after others (order), with a cached prefix (cache), scored by
    prefill, wherever the prompt ends (length), and after an update with equal weights; and
    tokens have to follow the logprobs that are reported with them (draws).  Give a URL, a kernel
    string, or a contract with --side.
    """
    kernel = _kernel(what, side)
    options = Options(only, limit, alpha, update)
    aside = format_ == "json"  # only the data goes to stdout then
    say = partial(click.echo, err=aside)
    say(f"relations  {shown(kernel)}")
    found: list[Finding] = []
    subject = Subject.open(kernel, between)
    try:
        cases = _cases(subject, prompts, **how)
        with watching(quiet) as watch:

            def told(name: str, done: int, total: int) -> None:
                watch(Progress(name, done, total))

            for finding in relations(subject, cases, options, told):
                found.append(finding)
                state = _STATES.get(finding.outcome, "")
                say(f"{_MARK[finding.outcome]} {finding.relation:<8} {state}{finding.answer}")
                if finding.example is not None:
                    say(f"  again: {_command(what, side, finding, options, between)}")
    finally:
        subject.close()
    for sentence in _next(found, limit):
        say(sentence)
    if aside:
        show_json(_data(what, side, found, options, subject))
    outcomes = {one.outcome for one in found}
    if "violated" in outcomes:
        sys.exit(1)
    # undecided, too, where none can be tested
    sys.exit(0 if outcomes <= {"holds", "untestable"} and "holds" in outcomes else 3)


def _kernel(what: str, side: str | None) -> Kernel:
    """The kernel that an argument names.

    Raises:
        ContractError: an invalid kernel string or contract, a missing model, a needless --side.
    """
    if what.endswith((".yaml", ".yml")):
        return getattr(run.load(what).kernels, side or "infer")
    if side is not None:
        raise ContractError("--side names a side of a contract, and this is a kernel")
    kernel = parse_kernel(what, engines=engine_names(), name="KERNEL")
    refuse_missing(kernel, what, "KERNEL")
    return kernel


def _cases(
    subject: Subject,
    prompts: Path | None,
    *,
    longest: int,
    requests: int,
    max_new_tokens: int,
    seed: int,
    prompt_ids: tuple[Ids, ...],
) -> Cases:
    given = None
    if prompt_ids:
        given = Request(prompt_ids[0], max_new_tokens, prompt_ids[1:], seed)
    about = subject.engine.describe()
    if about.context is not None:
        longest = max(2, min(longest, about.context - max_new_tokens - 2))
    largest = subject.kernel.batch_size
    if given is not None:
        texts: list[Ids] = [given.prompt]
    elif about.encodes:
        corpus = read_corpus(prompts or shipped(SHIPPED))
        corpus = replace(corpus, prompts=corpus.prompts[:_TEXTS])
        texts = [ids for ids in encoded(corpus, subject.engine) if ids]
    else:
        drawn = uniforms(seed, "prompt", 0, 8 * longest) * (about.vocab_size or _IDS)
        texts = [tuple(map(int, drawn))]
    return Cases(texts, longest, max_new_tokens, requests, largest, seed, given)


def _command(what: str, side: str | None, finding: Finding, options: Options, between: int) -> str:
    """The command that tests the counterexample alone."""
    request = finding.example
    assert request is not None
    words = ["servanda", "relations", what, *(("--side", side) if side else ())]
    words += ["--only", finding.relation]
    for ids in (request.prompt, *request.others):
        words += ["--prompt-ids", ",".join(map(str, ids))]
    words += ["--max-new-tokens", str(request.width)]
    words += ["--seed", str(request.seed)] if request.seed else []
    words += ["--limit", f"{options.limit:g}"] if options.limit is not None else []
    words += ["--between", str(between)] if between and finding.relation == "cache" else []
    if finding.relation == "update":
        words += ["--update", options.update or ""]
    return shlex.join(words)


def _next(found: list[Finding], limit: float | None) -> list[str]:
    """What decides where differences may be rounding, and which relation stands out."""
    if limit is not None:
        return []
    sizes = {one.relation: one.largest_nats for one in found if one.example and one.largest_nats}
    undecided = [one for one in found if one.outcome == "inconclusive" and one.relation in sizes]
    if not undecided:
        return []
    largest = max(sizes[one.relation] for one in undecided)
    shapes = "rounding in other shapes" if largest < _FLOAT32_NATS else "rounding of 16-bit numbers"
    lines = [
        f"differences of up to {largest:.2g} nats can be {shapes}: --limit {3 * largest:.0e} "
        "accepts them and decides, --limit 0 asks for equal bits"
    ]
    for name, size in sizes.items():
        others = [other for key, other in sizes.items() if key != name]
        if len(others) >= 2 and size > _STANDS_OUT * statistics.median(others):
            lines.append(
                f"{name} stands out: its difference is {size / statistics.median(others):,.0f} "
                "times the median of the other relations"
            )
    return lines


def _data(
    what: str, side: str | None, found: list[Finding], options: Options, subject: Subject
) -> dict[str, Any]:
    return {
        "kernel": what,
        "limit_nats": options.limit,
        "alpha": options.alpha,
        "requests": subject.sent,
        "relations": [
            {
                "relation": one.relation,
                "outcome": one.outcome,
                "answer": one.answer,
                "cases": one.requests,
                "tokens": one.positions,
                "largest_nats": one.largest_nats,
                "p_value": one.p_value,
                "alpha": one.alpha,
                "position": one.position,
                "example": None
                if one.example is None
                else {
                    "prompt_ids": one.example.prompt,
                    "others": one.example.others,
                    "max_new_tokens": one.example.width,
                    "seed": one.example.seed,
                    "command": _command(what, side, one, options, subject.between),
                },
            }
            for one in found
        ],
    }
