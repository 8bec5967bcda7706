# `servanda tools heartbeat`: has an endpoint that returns only texts changed?

from __future__ import annotations

import sys
import time
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import click

from servanda.cli.heartbeat_text import report
from servanda.cli.options import FILE, shared
from servanda.cli.stdout import show_json
from servanda.contract.kernel_string import parse_kernel
from servanda.contract.model import Kernel
from servanda.engines import engine_names
from servanda.errors import ContractError, IdentityError
from servanda.runner.compare.prompts import plain_texts
from servanda.runner.compare.sides import refuse_missing
from servanda.runner.heartbeat.baseline import Baseline, read_baseline
from servanda.runner.heartbeat.baseline_source import (
    RecordOptions,
    from_endpoint,
    from_kernel,
    opened,
    prompt_ids,
)
from servanda.runner.heartbeat.beat import Beat
from servanda.runner.heartbeat.beat_state import TESTS, Settings, StateFolder
from servanda.runner.heartbeat.endpoint import Endpoint
from servanda.runner.heartbeat.response_rank import RankScorer

_LEAST = 8  # requests of a beat: the first has six to see whether sampling is obeyed


@click.command("heartbeat")
@click.argument("what", metavar="URL|KERNEL")
@click.option(
    "--record",
    type=FILE,
    help="Make the reference from URL or KERNEL, write it to FILE, and exit.",
)
@click.option("--reference", type=FILE, help="Reference that --record wrote, such as answers.json.")
@shared("--state", default="heartbeat", help="One for each endpoint and reference.")
@click.option(
    "--budget",
    type=click.IntRange(0),
    default=200,
    show_default=True,
    help="Largest number of requests per UTC day, such as 100.",
)
@click.option(
    "--beat",
    "requests",
    type=click.IntRange(_LEAST),
    default=_LEAST,
    show_default=True,
    help="Largest number of requests of one beat, such as 24.",
)
@shared("--every", help="[default: one beat]")
@click.option(
    "--test",
    "tests",
    type=click.Choice(TESTS),
    multiple=True,
    help="Run this test, such as replay.  Repeatable.  [default: all that the reference allows]",
)
@click.option(
    "--alpha",
    type=click.FloatRange(0, 0.5, min_open=True),
    default=0.01,
    show_default=True,
    help="Probability of a false alarm in the life of a state, such as 0.001.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 0.5),
    default=0.02,
    show_default=True,
    help="Total variation from the probabilities of a kernel that is no change, such as 0.05.",
)
@shared("--prompts", help="[default: the shipped ones]")
@click.option("--chat", is_flag=True, help="Record for /v1/chat/completions.")
@shared("--temperature", "--top-p", help="For --record.", default=1.0)
@click.option(
    "--border-temperature",
    type=click.FloatRange(0.01, 100),
    default=0.1,
    show_default=True,
    help="Temperature of first tokens, such as 1, for --record; a low one enlarges small changes.",
)
@shared("--max-new-tokens", default=32, help="For --record.")
@shared("--seed", "--quiet", "--format", "--no-code")
def heartbeat_command(
    what: str, record: Path | None, reference: Path | None, every: float | None, **options: Any
) -> None:
    """Watch an endpoint that returns neither token ids nor logprobs for changes of its answers.

    First make the reference from a trusted kernel, or from the endpoint itself, with --record;
    then run a beat of URL from a scheduler. Each beat sends a few requests and adds to the
    evidence in --state. Three tests share --alpha: first tokens after prompts where two are
    nearly equally likely (border), the rank of whole answers among draws of a reference kernel
    (rank), and answers to equal seeds (replay).

    Exit codes: 0 no evidence of a change so far, 1 changed, 3 nothing was sent, as the budget of
    the day is used up, 4 the endpoint cannot be asked or does not sample as it is asked to.
    """
    kernel = parse_kernel(what, engines=engine_names(), name="URL")
    refuse_missing(kernel, what, "URL")
    if (record is None) == (reference is None):
        raise click.UsageError("give either --record FILE, or the --reference FILE that it wrote")
    if record is not None:
        _record(what, kernel, record, **options)
        return
    assert reference is not None
    if not options["budget"]:
        raise click.BadParameter("--budget 0 sends nothing: give at least 8 requests per day")
    if kernel.url is None:
        raise ContractError(
            f"a heartbeat asks a server, and {what} is none",
            hint="give its URL, such as http://127.0.0.1:8000; --record takes a kernel",
        )
    baseline = read_baseline(reference)
    while True:
        code = _beat(kernel, baseline, str(reference), **options)
        if every is None or code not in (0, 3):
            sys.exit(code)
        time.sleep(every)


def _record(
    what: str,
    kernel: Kernel,
    file: Path,
    *,
    prompts: Path | None,
    chat: bool,
    temperature: float,
    top_p: float,
    border_temperature: float,
    max_new_tokens: int,
    seed: int,
    quiet: bool,
    tests: tuple[str, ...],
    format_: str,
    **_: Any,
) -> None:
    say = partial(click.echo, err=format_ == "json")
    texts = list(dict.fromkeys(plain_texts(prompts)))
    how = RecordOptions(
        temperature, top_p, border_temperature, max_new_tokens, chat=chat, seed=seed
    )
    if kernel.url is None:
        baseline = from_kernel(what, kernel, texts, how)
        draws = "exact probabilities"
    else:
        how = RecordOptions(**{**vars(how), "candidates": 24, "draws": 48})
        most = how.requests(len(texts))
        say(f"record  {what}: up to {most} requests, once")
        told = partial(_told, 0 if quiet else most)
        baseline = from_endpoint(what, kernel, texts, how, not tests or "replay" in tests, told)
        equal, all_ = sum(r.equal for r in baseline.replays), len(baseline.replays)
        draws = f"{how.draws} draws each; {equal} of {all_} seeded answers repeat"
    baseline.write(file)
    second = [(b.p or b.draws)[1] / sum(b.p or b.draws) for b in baseline.borders]
    say(
        f"{file}: {len(baseline.borders)} border prompts, whose second text has a probability of "
        f"{min(second):.2f} to {max(second):.2f}; {draws}"
    )
    say(f"next: servanda tools heartbeat URL --reference {file}")
    if format_ == "json":
        show_json({"reference": str(file), "digest": baseline.digest, "second": second})


def _told(most: int, sent: int) -> None:
    if most and sent % 50 == 0:
        click.echo(f"  {sent} of at most {most} requests", err=True)


def _beat(
    kernel: Kernel,
    baseline: Baseline,
    file: str,
    *,
    state: Path,
    budget: int,
    requests: int,
    tests: tuple[str, ...],
    alpha: float,
    tolerance: float,
    seed: int,
    format_: str,
    **_: Any,
) -> int:
    """One beat; its exit code."""
    tests = _tests(baseline, tests)
    endpoint = Endpoint(kernel, chat=baseline.chat)
    try:
        _refuse_another_model(baseline, endpoint, file)
        settings = Settings(
            baseline.digest, endpoint.url, endpoint.served, tests, alpha, tolerance, seed
        )
        folder = StateFolder(state)
        with folder.locked():
            kept = folder.load(settings, baseline)
            beat = Beat(
                endpoint,
                baseline,
                kept,
                lambda: folder.save(kept),
                lambda: datetime.now(timezone.utc),
                None,
                budget,
                requests,
            )
            if not kept.changed:
                _run(beat)
            return report(beat, format_)
    finally:
        endpoint.close()


def _run(beat: Beat) -> None:
    """Let a beat run, with the kernel of the reference where ranks are tested."""
    if "rank" not in beat.state.settings.tests or beat.left <= 0:
        beat.run()
        return
    held = beat.baseline
    kernel = parse_kernel(held.source, engines=engine_names(), name="reference")
    refuse_missing(kernel, held.source, "reference")
    engine = opened(kernel)
    try:
        ids = prompt_ids(engine, held.prompts, held.chat)
        beat.scorer = RankScorer(engine, kernel, held, ids)
        beat.run()
    finally:
        engine.close()


def _tests(baseline: Baseline, asked: tuple[str, ...]) -> tuple[str, ...]:
    """The tests to run, in their order.

    Raises:
        ContractError: the reference does not allow one that is asked for.
    """
    if "rank" in asked and not baseline.exact:
        raise ContractError(
            "--test rank needs a kernel that scores answers, and the reference is of an endpoint",
            hint="record it from a kernel, or leave out --test rank",
        )
    allowed = [name for name in TESTS if name != "rank" or baseline.exact]
    return tuple(name for name in allowed if not asked or name in asked)


def _refuse_another_model(baseline: Baseline, endpoint: Endpoint, file: str) -> None:
    if baseline.served and baseline.served != endpoint.served:
        raise IdentityError(
            f"{file} is a reference of model {baseline.served!r}, and {endpoint.url} is asked for "
            f"{endpoint.served!r}",
            hint=f"name the model as URL,served={baseline.served}, or record a reference of the "
            "other one",
        )
