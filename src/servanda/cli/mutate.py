# `servanda contract test --mutate`: its options, and what is printed of mutated contracts.

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from servanda.authoring.contract_test.files import PreparedTest
from servanda.authoring.mutation.report import render
from servanda.authoring.mutation.result import Mutation
from servanda.authoring.mutation.run import discard, mutate, never
from servanda.cli.options import shared, together, until
from servanda.cli.progress import watching
from servanda.cli.stdout import show, show_json
from servanda.engines.faults import FAULTS

_WORST = (130, 1, 3, 0)  # of the exit codes of several contracts, the first that is there

mutate_options = together(
    click.option(
        "--mutate",
        is_flag=True,
        help="Mutation test: move every limit and inject every fault, and count those that a test "
        "detects.",
    ),
    click.option(
        "--only",
        type=click.Choice(["limits", "faults"]),
        help="With --mutate: one of the two kinds.  Moving limits runs no kernel.",
    ),
    shared(
        "--fault",
        name="faults",
        multiple=True,
        help="With --mutate; repeatable.  [default: all of the catalogue]",
    ),
    click.option(
        "--at-least",
        type=click.FloatRange(0, 1),
        help="With --mutate: exit 1 if the mutation score is lower than this, such as 0.8.",
    ),
    shared("--max-time", "--quiet"),
)


def refuse_without(mutate: bool, format_: str, **given: object) -> None:
    """Refuse options that apply only to --mutate, and formats that it lacks.

    Raises:
        click.UsageError: one is given without it, or goes with no other.
    """
    for name, value in given.items():
        if not mutate and name != "quiet" and value not in (None, ()):
            option = {"faults": "fault"}.get(name, name.replace("_", "-"))
            raise click.UsageError(f"--{option} goes with --mutate")
    if mutate and format_ not in ("text", "json"):
        raise click.UsageError(f"--mutate is told as text or json, not as {format_}")
    if given.get("faults") and given.get("only") == "limits":
        raise click.UsageError("--fault says which fault, and --only limits injects none")
    for name in given.get("faults") or ():  # type: ignore[attr-defined]
        if name not in FAULTS:
            hint = f"{FAULTS.hint(name)} (`servanda demo --fault list` shows them all)"
            raise click.UsageError(f"there is no fault {name!r}\n  hint: {hint}")


def run_mutations(
    tests: Sequence[PreparedTest],
    *,
    only: Any = None,
    faults: Sequence[str] = (),
    at_least: float | None = None,
    max_time: float | None = None,
    format_: str = "text",
    quiet: bool = False,
) -> int:
    """Mutate contract after contract, print what was found, and give the exit code.

    Args:
        tests: that pass; those of one contract are taken together.
        only: "limits", "faults", or None for both.
        faults: names of the catalogue; none is every one.
        at_least: the score that each contract needs.
        max_time: seconds, for all of them together.
        format_: "text" or "json".

    Raises:
        ContractError, MeasurementError: as `mutation.mutate` does.
    """
    deadline = until(max_time) or never
    mutations: list[Mutation] = []
    by_contract: dict[Path, list[PreparedTest]] = {}
    for test in tests:
        by_contract.setdefault(test.path.resolve(), []).append(test)
    for k, own in enumerate(by_contract.values(), start=1):
        of = f"contract {k} of {len(by_contract)}" if len(by_contract) > 1 else ""
        with watching(quiet, run=of) as watch:
            result = mutate(
                own[0].contract,
                own,
                only=only,
                faults=faults,
                watch=watch,
                deadline=deadline,
                say=discard if quiet else partial(click.echo, err=True),
            )
        mutations.append(result)
        if format_ == "text":
            show(f"{render(result)}{_wanted(result, at_least)}")
        if result.stopped == "interrupted":
            break
    if format_ == "json":
        show_json([result.to_dict(at_least) for result in mutations])
    codes = {result.exit_code(at_least) for result in mutations}
    return next((code for code in _WORST if code in codes), 0)


def _wanted(result: Mutation, at_least: float | None) -> str:
    if at_least is None or result.score is None:
        return ""
    word = "enough" if result.score >= at_least else "not enough"
    return f"; {at_least:g} is wanted: {word}"
