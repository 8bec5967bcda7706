# `servanda promotion ledger`: show, verify and export what was decided.

from __future__ import annotations

import json
import os
import sys
from datetime import datetime, timezone
from pathlib import Path

import click

from servanda.cli.options import format_option, ledger_option
from servanda.cli.output import OutputPath, clear, show
from servanda.cli.promotion_options import ledger_key, opened
from servanda.errors import EvidenceError, MeasurementError
from servanda.gateway.controller import ledger_history
from servanda.promotion.ledger.entry import Entry
from servanda.promotion.ledger.export import export
from servanda.promotion.ledger.hash_chain import line
from servanda.promotion.ledger.open import verify_at
from servanda.promotion.run.history import DELIVERED, disagreements
from servanda.report.table import table

_LONGEST = 60  # letters of what an entry says, in a table
_SAYING = ("why", "text", "reason")  # parts of a body, or of the state in it, that are for people
_HEAD = ("seq", "time (UTC)", "run", "kind", "actor", "what", "hash")


@click.group()
def ledger() -> None:
    """Show, verify or export the record of decisions.

    Whoever set SERVANDA_LEDGER_KEY when the ledger was begun sets it here too.
    """


@ledger.command("show")
@click.option("--run", metavar="NAME", help="Only entries of this run.")
@ledger_option
@format_option
def show_command(run: str | None, where: str, format_: str) -> None:
    """Print the entries, oldest first.

    JSON is one entry a line, as of an export.
    """
    with opened(where, reading=True) as found:
        entries = [*found.entries(run)]
        runs = found.runs()
    if run is not None and run not in runs:
        known = ", ".join(runs) or "none"
        raise EvidenceError(f"no run is named {run!r}", hint=f"the ledger has: {known}")
    if format_ == "json":
        show("\n".join(map(line, entries)))
    else:
        show("\n".join(table([_HEAD, *map(_row, entries)])))


@ledger.command("verify")
@ledger_option
@format_option
def verify_command(where: str, format_: str) -> None:
    """Name every entry that was changed, or that does not follow from those before it.

    Exits 0 where there is none, else 1.
    """
    found = verify_at(where, key=ledger_key())
    said = [*map(str, found.problems)]
    if found.sound:  # what was not changed may still tell what never happened
        with opened(where, reading=True) as store:
            problems = (*disagreements(store), *ledger_history.disagreements(store))
            said += [problem.message for problem in problems]
    if format_ == "json":
        data = {"entries": found.entries, "head": found.head, "problems": said}
        show(json.dumps(data, indent=1))
        sys.exit(1 if said else 0)
    for problem in said:
        show(f"✗ {problem}")
    entries = "1 entry" if found.entries == 1 else f"{found.entries} entries"
    if not said:
        show(f"✓ {entries}, head {found.head}")
        return
    problems = "1 problem" if len(said) == 1 else f"{len(said)} problems"
    show(f"{problems}; {entries} could be read")
    sys.exit(1)


@ledger.command("export")
@ledger_option
@click.option(
    "-o",
    "--output",
    type=OutputPath(),
    help="Write to FILE instead of printing; one that ends in .jsonl can be given as --ledger.",
)
def export_command(where: str, output: Path | None) -> None:
    """Write every entry as a line of JSON.

    The file can be verified by itself.
    """
    with opened(where, reading=True) as found:
        if output is None:
            show("\n".join(map(line, found.entries())))
            return
        clear(output)
        part = output.with_name(f".{output.name}.{os.getpid()}")
        try:
            with part.open("w", encoding="ascii") as file:
                count = export(found, file)
            part.replace(output)
        except OSError as error:
            message = f"{output} cannot be written: {error.strerror or error}"
            raise MeasurementError(message, hint="name another file") from None
        finally:
            part.unlink(missing_ok=True)
    click.echo(f"exported {count} to {output}", err=True)


def _row(entry: Entry) -> tuple[str, ...]:
    told = (entry.run, entry.kind, entry.actor, _what(entry), entry.hash[:8])
    return (str(entry.seq), _time(entry.at), *told)


def _time(at: float) -> str:
    try:
        return datetime.fromtimestamp(at, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{at:g}"  # beyond the calendar


def _what(entry: Entry) -> str:
    """What an entry says, in one short line."""
    state = entry.body.get("state")
    places = (entry.body, state if isinstance(state, dict) else {})
    said = (place.get(name) for place in places for name in _SAYING)
    if entry.kind == DELIVERED:
        effect = str(entry.body.get("key")).removeprefix(f"{entry.run}:")
        left_out = f" ({why})" if (why := entry.body.get("why")) else ""
        said = (f"{effect} to {entry.body.get('sink')}{left_out}",)
    text = next((text for text in said if text and isinstance(text, str)), ", ".join(entry.body))
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
