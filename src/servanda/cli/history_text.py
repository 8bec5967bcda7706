# The runs of a contract as text: the runs, and their values by cell, newest last.

from __future__ import annotations

from collections.abc import Iterator, Sequence

from servanda.judgement.clauses.base import CellVerdict
from servanda.report.cell_text import GLYPH, limit, limit_sign, of_cell, where
from servanda.report.format import count, line
from servanda.report.table import table
from servanda.runner.run_history.agreement_class import agreement_class
from servanda.runner.run_history.history_gate import Gate, promise
from servanda.runner.run_history.run_record import ContractRuns, History, Key, RunRecord

SHOWN = 6  # runs that a table of values has; the JSON and the page have all
RUN_HEADS = ("#", "ended", "infer kernel", "outcome", "class", "file")


def history_lines(
    history: History, gates: Sequence[Gate], last: int, slice_: str | None
) -> Iterator[str]:
    """Everything, contract by contract."""
    for i, of in enumerate(history.contracts):
        if i:
            yield ""
        yield title(of)
        runs = list(enumerate(of.runs, start=1))
        rows = table([RUN_HEADS, *(run_row(n, run) for n, run in runs[-SHOWN:])], right={0})
        yield from (f"  {row}" for row in rows)
        if len(runs) > SHOWN:
            yield f"  {len(runs) - SHOWN} earlier runs: --format json and html have all"
        yield f"  {class_line(of)}"
        yield ""
        rows = table(value_rows(of, SHOWN, slice_), right=range(2, 2 + SHOWN))
        yield from (f"  {row}" for row in rows)
        yield from gate_lines([gate for gate in gates if gate.contract == of.name])
    yield from (f"not read: {text}" for text in history.unread)
    if gates:
        yield promise(last)


def title(of: ContractRuns) -> str:
    """The contract and its numbers of runs and builds."""
    texts = len({run.verdict.key.contract for run in of.runs})
    parts = [count(len(of.runs), "run"), f"{count(len(of.builds), 'build')} of the infer kernel"]
    if texts > 1:
        parts.append(f"{texts} versions of its text")
    return f"{line(of.name)}: {', '.join(parts)}"


def run_row(n: int, run: RunRecord) -> tuple[str, ...]:
    """The columns of RUN_HEADS."""
    outcome = f"{GLYPH[run.verdict.outcome]} {run.verdict.outcome}"
    of_pair = agreement_class(run.verdict).name
    return (f"{n}", run.when, line(run.build), outcome, of_pair, line(run.place))


def class_line(of: ContractRuns) -> str:
    """The class of the newest run, with its reason."""
    found = agreement_class(of.newest.verdict)
    return f"class of the newest run: {found.name} ({found.reason})"


def value_rows(of: ContractRuns, shown: int | None, slice_: str | None = None) -> list[list[str]]:
    """A heading, and a row for each cell: its name, limit, and value in each of the last runs.

    Args:
        shown: number of runs; None: all.  slice_: only this slice.
    """
    first = max(len(of.runs) - shown, 0) if shown is not None else 0
    cells = [run.cells() for run in of.runs]
    rows = [["clause and slice", "limit", *(f"#{n + 1}" for n in range(first, len(of.runs)))]]
    for key in of.cell_keys(slice_):
        known = next(found[key] for found in reversed(cells) if key in found)
        values = [entry(found.get(key)) for found in cells[first:]]
        rows.append([cell_name(known), bound(known), *values])
    return rows


def cell_name(cell: CellVerdict) -> str:
    """A cell in words: clause, statistic and slice."""
    what = " ".join(part for part in (cell.aggregate, cell.metric) if part)
    return line(f"{cell.clause}: {what}, {where(cell)}")


def bound(cell: CellVerdict) -> str:
    """The limit with its sign; "" if the cell has none."""
    return f"{limit_sign(cell)} {limit(cell)}" if cell.limit is not None else ""


def entry(cell: CellVerdict | None) -> str:
    """The outcome and the value of a cell; "" if it was not measured."""
    return f"{GLYPH[cell.outcome]} {of_cell(cell, cell.value)}" if cell is not None else ""


def gate_lines(gates: Sequence[Gate]) -> Iterator[str]:
    """The answer of the gate for a contract."""
    for gate in gates:
        yield ""
        yield f"{gate.outcome.upper()}: the newest run is {gate_reason(gate)}."
        if len(gate.worse) > 1:
            rest = [cell_name(cell) for cell in gate.worse[1:4]]
            more = f" and {len(gate.worse) - 4} more" if len(gate.worse) > 4 else ""
            yield f"  also worse than in all of them: {'; '.join(rest)}{more}"
        yield from (f"  {note}" for note in gate.notes)


def gate_reason(gate: Gate) -> str:
    """The reason of a gate, after "the newest run is"."""
    compared = gate.false_alarms is not None
    return gate.reason if compared else f"not compared: {gate.reason}"


def cell_json(key: Key, cell: CellVerdict) -> dict[str, object]:
    """A cell for JSON."""
    names = ("metric", "aggregate", "outcome", "enforced", "value", "interval", "limit", "floor")
    found = {name: getattr(cell, name) for name in names}
    return {"clause": key[0], "slice": key[1], **found, "limit_sign": limit_sign(cell)}
