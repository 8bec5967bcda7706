# `servanda relations`: one kernel against itself, without a reference.

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from servanda.cli.options import FILE, shared, show_json
from servanda.cli.screen import watching
from servanda.contract.kernel_string import parse_kernel, shown
from servanda.contract.model import Kernel
from servanda.engines import engine_names
from servanda.engines.http import HTTPEngine
from servanda.engines.http.transport import StatusError
from servanda.errors import ContractError
from servanda.report.format import duration
from servanda.runner import run
from servanda.runner.compare.contract import SHIPPED, read_corpus, shipped
from servanda.runner.compare.sides import refuse_missing
from servanda.runner.measurement import Progress
from servanda.runner.probe import encoded
from servanda.runner.relations.client import ClientRequest
from servanda.runner.relations.judge import LEAST, Finding, Rounding
from servanda.runner.relations.observation import Ids
from servanda.runner.relations.relation import MORE, Cases
from servanda.runner.relations.run import NAMES, WIDTH, Options, expected, relations
from servanda.runner.relations.subject import Request, Subject
from servanda.theory.sampling import uniforms

_MARK = {"holds": "✓", "violated": "✗", "inconclusive": "?", "untestable": "–"}
_STATES = {"untestable": "not testable: ", "violated": "violated: "}
_CROWD = 64  # requests that are sent to a server at once, unless its kernel string says how many
_TEXTS = 64  # prompts of the file that are used
_NO_ENDPOINT = (404, 405, 501)
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
    help="Test this relation, such as batching.  Repeatable.  [default: all]",
)
@click.option(
    "--limit",
    type=click.FloatRange(0, min_open=True),
    metavar="NATS",
    help="Largest allowed logit noise, such as 1e-4.  [default: twice the kernel's own rounding]",
)
@click.option(
    "--equal-bits",
    "bitwise",
    is_flag=True,
    help="Ask for equal bits: a difference of any size is a violation.",
)
@click.option(
    "--rounding",
    type=click.Choice([*LEAST]),
    help="Rounding of the kernel's number format, such as 16-bit.  [default: as the kernel says, "
    "or as its differences show]",
)
@click.option(
    "--alpha",
    type=click.FloatRange(0, 0.5, min_open=True),
    default=0.05,
    show_default=True,
    help="Probability that sampling is rejected where tokens follow their logprobs, such as 0.01.",
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
    "--like",
    type=FILE,
    metavar="FILE",
    help="Body of a request that your client sends, such as request.json: the relation client "
    "sends it as it is.",
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
    bitwise: bool,
    rounding: Rounding | None,
    alpha: float,
    prompts: Path | None,
    quiet: bool,
    format_: str,
    update: str | None,
    between: int,
    like: Path | None,
    **how: Any,
) -> None:
    """Test the self-consistency of one engine: what must not change an answer, and does it?

    It needs no second engine.  The answer to a request has to be the same once more (replay),
    scored by prefill (prefill-decode), wherever the prompt ends (prompt-length), among other
    requests (batching), as one of several choices and streamed (client), with a cached prefix
    (prefix-cache), after others (order), and after an update with equal weights; and tokens have
    to follow the logprobs that are reported with them (sampling).  Differences up to twice the
    engine's own rounding hold.  Give a URL, a kernel string, or a contract with --side.
    """
    if bitwise and limit is not None:
        raise click.UsageError("--equal-bits allows no difference: leave out --limit")
    kernel = _kernel(what, side)
    options = Options(only, limit, bitwise, rounding, alpha, update)
    aside = format_ == "json"  # only the data goes to stdout then
    say = partial(click.echo, err=aside)
    say(f"relations  {shown(kernel)}")
    found: list[Finding] = []
    subject = Subject.open(_crowded(kernel), between)
    try:
        if like is not None:
            subject.like = _own(like, subject)
        cases = _cases(subject, prompts, **how)
        say(_cost(subject, cases, options))
        with watching(quiet) as watch:

            def told(name: str, done: int, total: int) -> None:
                watch(Progress(name, done, total))

            for finding in relations(subject, cases, options, told):
                found.append(finding)
                state = _STATES.get(finding.outcome, "")
                say(f"{_MARK[finding.outcome]} {finding.relation:<14} {state}{finding.answer}")
                if finding.example is not None:
                    say(f"  again: {_command(what, side, finding, options, between, like)}")
    finally:
        subject.close()
    outcome = _outcome(found)
    say(_verdict(outcome, found))
    if aside:
        show_json(_data(what, side, found, options, subject, outcome, like))
    sys.exit({"holds": 0, "violated": 1}.get(outcome, 3))


def _crowded(kernel: Kernel) -> Kernel:
    """The kernel with room for many requests at once, where the size was not stated."""
    if kernel.url is None or "batch_size" in kernel.model_fields_set:
        return kernel
    return kernel.model_copy(update={"batch_size": _CROWD})


def _cost(subject: Subject, cases: Cases, options: Options) -> str:
    """The requests of each relation, and how long all of them take at the pace of the first."""
    counts = expected(subject, cases, options)
    began = time.perf_counter()
    subject.alone(next(cases.some(cases.requests)))
    each = time.perf_counter() - began
    named = ", ".join(f"{name} {n}" for name, n in counts.items())
    total = sum(counts.values())
    return f"about {total:,} requests, {duration(total * each)} at the pace of the first: {named}"


def _outcome(found: Sequence[Finding]) -> str:
    outcomes = {one.outcome for one in found}
    if "violated" in outcomes:
        return "violated"
    # undecided, too, where none can be tested
    return (
        "holds" if outcomes <= {"holds", "untestable"} and "holds" in outcomes else "inconclusive"
    )


def _verdict(outcome: str, found: Sequence[Finding]) -> str:
    """All relations in one line."""

    def named(state: str) -> str:
        return ", ".join(one.relation for one in found if one.outcome == state)

    parts = [f"{word} {named(word)}" for word in ("violated", "inconclusive") if named(word)]
    parts += [f"not testable: {named('untestable')}"] if named("untestable") else []
    holds = sum(one.outcome == "holds" for one in found)
    return f"{outcome.upper()}: {'; '.join([f'{holds} of {len(found)} relations hold', *parts])}"


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
        room = about.context - max(max_new_tokens, WIDTH) - MORE
        longest = max(2, min(longest, room))
    largest = subject.kernel.batch_size
    if given is not None:
        texts: list[Ids] = [given.prompt]
    elif not (texts := _encoded(subject, prompts) if about.encodes else []):
        drawn = uniforms(seed, "prompt", 0, 8 * longest) * (about.vocab_size or _IDS)
        texts = [tuple(map(int, drawn))]
    own = subject.like is not None
    return Cases(texts, longest, max_new_tokens, requests, largest, seed, given, like=own)


def _encoded(subject: Subject, prompts: Path | None) -> list[Ids]:
    """The prompts as token ids; none of a server that encodes no texts."""
    corpus = read_corpus(prompts or shipped(SHIPPED))
    corpus = replace(corpus, prompts=corpus.prompts[:_TEXTS])
    try:
        return [ids for ids in encoded(corpus, subject.engine) if ids]
    except StatusError as refused:
        if prompts is None and refused.status in _NO_ENDPOINT:
            return []
        raise


def _own(path: Path, subject: Subject) -> ClientRequest:
    """The user's own request.

    Raises:
        ContractError: no server, or no such request.
        MeasurementError: the server makes no ids of it.
    """
    if not isinstance(subject.engine, HTTPEngine):
        raise ContractError(
            "--like is a request to a server, and this kernel is none", hint="give a URL"
        )
    return ClientRequest.read(path, subject.engine)


def _command(
    what: str,
    side: str | None,
    finding: Finding,
    options: Options,
    between: int,
    like: Path | None,
) -> str:
    """The command that tests the counterexample alone."""
    request = finding.example
    assert request is not None
    words = ["servanda", "relations", what, *(("--side", side) if side else ())]
    words += ["--only", finding.relation]
    if like is not None and finding.relation == "client":
        words += ["--like", str(like)]
    else:
        for ids in (request.prompt, *request.others):
            words += ["--prompt-ids", ",".join(map(str, ids))]
    words += ["--max-new-tokens", str(request.width)]
    words += ["--seed", str(request.seed)] if request.seed else []
    limit = finding.limit_nats if options.limit is None else options.limit
    if options.bitwise:
        words += ["--equal-bits"]
    elif limit is not None:
        words += ["--limit", f"{limit:g}"]
    words += ["--between", str(between)] if between and finding.relation == "prefix-cache" else []
    if finding.relation == "update":
        words += ["--update", options.update or ""]
    return shlex.join(words)


def _data(
    what: str,
    side: str | None,
    found: Sequence[Finding],
    options: Options,
    subject: Subject,
    outcome: str,
    like: Path | None,
) -> dict[str, Any]:
    return {
        "kernel": what,
        "outcome": outcome,
        "alpha": options.alpha,
        "requests": subject.sent,
        "relations": [
            {
                "relation": one.relation,
                "outcome": one.outcome,
                "answer": one.answer,
                "answers": one.answers,
                "tokens": one.positions,
                "tokens_in_all": one.of,
                "tv": one.moved,
                "noise_nats": one.noise_nats,
                "limit_nats": one.limit_nats,
                "largest_nats": one.largest_nats,
                "alpha": one.alpha,
                "position": one.position,
                "example": None
                if one.example is None
                else {
                    "prompt_ids": one.example.prompt,
                    "others": one.example.others,
                    "max_new_tokens": one.example.width,
                    "seed": one.example.seed,
                    "command": _command(what, side, one, options, subject.between, like),
                },
            }
            for one in found
        ],
    }
