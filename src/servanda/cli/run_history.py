# `servanda tools history`: the verdicts of a folder over time, and the newest against good ones.

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from servanda.cli.history_page import history_page
from servanda.cli.history_text import cell_json, history_lines
from servanda.cli.options import FILE, PLACE, shared
from servanda.cli.output import clear, write_text
from servanda.cli.stdout import show, show_json
from servanda.cli.verdict_text import show_marked
from servanda.errors import ContractError, EvidenceError
from servanda.judgement.clauses.base import Outcome, worst
from servanda.judgement.verdict import EXIT_CODES
from servanda.report.base import format_of
from servanda.runner.run_history.agreement_class import agreement_class
from servanda.runner.run_history.badge import badge
from servanda.runner.run_history.history_gate import LEAST, Gate, gate, promise
from servanda.runner.run_history.run_record import History, RunRecord, history_of
from servanda.traces.serialization import to_plain

_FORMATS = ("text", "json", "html")
_SERVERS = ("http:/", "https:/")


@click.command()
@click.argument("folder", metavar="DIR|URL", type=PLACE)
@click.option(
    "--gate",
    "gated",
    is_flag=True,
    help="Exit with 1 if the newest run of a contract is worse than its last good runs.",
)
@click.option(
    "--last",
    type=click.IntRange(LEAST, 1000),
    default=10,
    show_default=True,
    help="Good runs that --gate compares with; N of them give at most 1/(N+1) false alarms.",
)
@click.option("--slice", "slice_", help="Show only this slice, such as all.")
@shared("--format", type=click.Choice(_FORMATS), default=None, show_default=False)
@shared("-o")
@click.option(
    "--badge",
    "badge_file",
    type=FILE,
    metavar="FILE",
    help="Also write the class of the newest run as a picture, such as agreement.svg.",
)
def history(
    folder: Path,
    gated: bool,
    last: int,
    slice_: str | None,
    format_: str | None,
    output: Path | None,
    badge_file: Path | None,
) -> None:
    """Show the verdicts below DIR over time: by contract, build and slice, newest last.

    DIR holds run directories, or files named *.verdict.json; a URL names a folder in an object
    store, such as s3://BUCKET/runs.  Nothing is measured.  Exits with 0, and with --gate by the
    newest runs: 1 for worse, 3 for too few good runs, 4 if a file could not be read.
    """
    if str(folder).startswith(_SERVERS):
        raise ContractError(
            f"{folder} cannot be listed: a server of HTTP has no folders",
            hint="download the folder, or name an object store, such as s3://BUCKET/runs",
        )
    for path in (output, badge_file):
        if path is not None:
            clear(path)
    found = history_of(folder)
    if slice_ is not None and not any(of.cell_keys(slice_) for of in found.contracts):
        known = sorted({name for of in found.contracts for _, name in of.cell_keys()})
        raise EvidenceError(
            f"no run has a value on the slice {slice_!r}", hint=f"known: {', '.join(known)}"
        )
    if badge_file is not None and len(found.contracts) > 1:
        raise EvidenceError(
            f"{folder} holds runs of {len(found.contracts)} contracts, and a badge is that of one",
            hint=f"give the folder of one: {', '.join(of.name for of in found.contracts)}",
        )
    gates = [gate(of, last) for of in found.contracts] if gated else []
    format_ = format_ or (format_of(output.name) if output else None) or "text"
    if format_ not in _FORMATS:
        raise click.BadParameter(f"{output}: a history is text, json or html")
    if format_ == "json":
        data = _data(found, gates, last, slice_)
        _write_json(data, output)
    elif format_ == "html":
        page = history_page(found, gates, last, slice_)
        show(page) if output is None else write_text(output, page)
    else:
        lines = [*history_lines(found, gates, last, slice_)]
        show_marked(lines) if output is None else write_text(output, "\n".join([*lines, ""]))
    if output is not None:
        click.echo(f"history {output}", err=True)
    if badge_file is not None:
        newest = next(iter(found.contracts)).newest.verdict
        write_text(badge_file, badge("kernels", agreement_class(newest).name))
        click.echo(f"badge {badge_file}", err=True)
    if gated:
        outcomes: list[Outcome] = [one.outcome for one in gates]
        if found.unread:
            outcomes.append("error")
        sys.exit(EXIT_CODES[worst(outcomes)])


def _write_json(data: dict[str, Any], output: Path | None) -> None:
    if output is None:
        show_json(data)
        return
    import json

    write_text(output, json.dumps(to_plain(data), indent=1) + "\n")


def _data(found: History, gates: Sequence[Gate], last: int, slice_: str | None) -> dict[str, Any]:
    contracts = [
        {"contract": of.name, "runs": [_run(run, slice_) for run in of.runs]}
        for of in found.contracts
    ]
    data: dict[str, Any] = {"contracts": contracts, "unread": list(found.unread)}
    if gates:
        data["gates"] = [_gate(one) for one in gates]
        data["promise"] = promise(last)
    return data


def _run(run: RunRecord, slice_: str | None) -> dict[str, Any]:
    verdict, agreed = run.verdict, agreement_class(run.verdict)
    cells = [cell_json(key, c) for key, c in run.cells().items() if slice_ in (None, key[1])]
    return {
        "file": run.place,
        "ended": run.when,
        "build": run.build,
        "infer": verdict.key.infer,
        "contract": verdict.key.contract,
        "outcome": verdict.outcome,
        "class": agreed.name,
        "class_reason": agreed.reason,
        "evidence": verdict.evidence,
        "cells": cells,
    }


def _gate(one: Gate) -> dict[str, Any]:
    cells = [cell_json((c.clause, c.slice), c) for c in one.worse]
    return {**vars(one), "worse": cells}
