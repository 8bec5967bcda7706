# `servanda promotion ledger`: show, verify and export what was decided.

from __future__ import annotations

import sys
from datetime import datetime, timezone
from pathlib import Path

import click

from servanda.cli.commands import HINTS
from servanda.cli.options import PRINTS, shared, show, show_json
from servanda.cli.output import clear
from servanda.cli.promotion import ledger_key, opened
from servanda.contract.text_file import whole
from servanda.errors import EvidenceError, MeasurementError
from servanda.gateway.controller import ledger_history
from servanda.promotion.ledger.entry import Entry, line
from servanda.promotion.ledger.export import export
from servanda.promotion.ledger.ledger import verify_at
from servanda.promotion.run.history import DELIVERED, disagreements
from servanda.registry import cut
from servanda.report.format import count
from servanda.report.table import table

_LONGEST = 60  # letters of what an entry says, in a table
_TEXTS = ("why", "text", "reason")  # parts of a body, or of the state in it, that are for people
_HEAD = ("seq", "time (UTC)", "run", "kind", "actor", "decision", "hash")
_KINDS = {"looked": "evaluated", DELIVERED: "delivered", "overrode": "overridden"}


class _Verbs(click.Group):
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().get_command(ctx, cmd_name)
        if found is None and (hint := HINTS.get(cmd_name)):
            raise click.UsageError(f"there is no command {cmd_name!r}\n  hint: {hint}", ctx)
        return found


@click.group(cls=_Verbs)
def ledger() -> None:
    """Show, verify or export the record of decisions.

    A ledger that was started with SERVANDA_LEDGER_KEY needs the same key here.
    """


@ledger.command("show")
@click.option("--run", metavar="NAME", help="Only the entries of this promotion or gateway run.")
@shared("--ledger", "--format")
def show_command(run: str | None, where: str, format_: str) -> None:
    """Print the entries, oldest first.

    JSON is one entry per line, as `ledger export` writes it.
    """
    with opened(where, reading=True) as store:
        entries = [*store.entries(run)]
        runs = store.runs()
    if run is not None and run not in runs:
        known = ", ".join(runs) or "none"
        raise EvidenceError(f"no run is named {run!r}", hint=f"the ledger has: {known}")
    if format_ == "json":
        show("\n".join(map(line, entries)))
    else:
        show("\n".join(table([_HEAD, *map(_row, entries)])))


@ledger.command("verify")
@shared("--ledger", "--format")
def verify_command(where: str, format_: str) -> None:
    """Re-derive every decision from the recorded evidence, and check every hash.

    Names each entry that was changed, or that does not follow from the entries before it.
    """
    result = verify_at(where, key=ledger_key())
    problems = [*map(str, result.problems)]
    if result.sound:  # an entry may have its hash and still not follow from the others
        with opened(where, reading=True) as store:
            both = (*disagreements(store), *ledger_history.disagreements(store))
            problems += [problem.message for problem in both]
    if format_ == "json":
        show_json({"entries": result.entries, "head": result.head, "problems": problems})
    else:
        for problem in problems:
            show(f"✗ {problem}")
        entries = "1 entry" if result.entries == 1 else f"{result.entries} entries"
        counted = count(len(problems), "problem")
        show(
            f"{counted}; {entries} could be read"
            if problems
            else f"✓ {entries}, head {result.head}"
        )
    if problems:
        sys.exit(1)


@ledger.command("export")
@shared("--ledger")
@shared("-o", help=PRINTS)
def export_command(where: str, output: Path | None) -> None:
    """Write every entry as a line of JSON.

    A file whose name ends in .jsonl can be given as --ledger, for `show` and `verify`.
    """
    with opened(where, reading=True) as store:
        if output is None:
            show("\n".join(map(line, store.entries())))
            return
        clear(output)
        refused = MeasurementError.of_system(
            f"{output} cannot be written", hint="name another file"
        )
        with refused, whole(output) as part, part.open("w", encoding="ascii") as file:
            count = export(store.entries(), file)
    click.echo(f"exported {count} to {output}", err=True)


def _row(entry: Entry) -> tuple[str, ...]:
    what = (
        entry.run,
        _KINDS.get(entry.kind, entry.kind),
        entry.actor,
        _what(entry),
        entry.hash[:8],
    )
    return (str(entry.seq), _time(entry.at), *what)


def _time(at: float) -> str:
    try:
        return datetime.fromtimestamp(at, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{at:g}"  # beyond the calendar


def _what(entry: Entry) -> str:
    state = entry.body.get("state")
    places = (entry.body, state if isinstance(state, dict) else {})
    texts = (place.get(name) for place in places for name in _TEXTS)
    if entry.kind == DELIVERED:
        effect = str(entry.body.get("key")).removeprefix(f"{entry.run}:")
        left_out = f" ({why})" if (why := entry.body.get("why")) else ""
        texts = (f"{effect} to {entry.body.get('sink')}{left_out}",)
    text = next((text for text in texts if text and isinstance(text, str)), ", ".join(entry.body))
    return cut(" ".join(text.split()), _LONGEST)
