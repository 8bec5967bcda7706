# The history gate: the newest run of a contract against its last good runs.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from servanda.judgement.clauses.base import CellVerdict, Outcome, worst
from servanda.report.cell_text import limit_sign, of_cell, where
from servanda.report.format import count, line, number
from servanda.runner.run_history.rank_rule import margin, worse
from servanda.runner.run_history.run_record import ContractRuns, Key, RunRecord

LEAST = 3  # fewest good runs that may be asked for


@dataclass(frozen=True)
class Gate:
    """The newest run of a contract against its good runs.

    Args:
        outcome: the worse of the comparison and of the newest run's own verdict.
        reason: the comparison in a sentence; notes: what was left out, or differs.
        good: files of the good runs; newest: file of the newest.
        worse: cells of the newest run that are worse than in every good run, worst first; they
            explain the outcome where it is violated.
        false_alarms: largest probability that a run like the good ones is called worse.
    """

    contract: str
    outcome: Outcome
    reason: str
    newest: str
    good: tuple[str, ...] = ()
    worse: tuple[CellVerdict, ...] = ()
    false_alarms: float | None = None
    notes: tuple[str, ...] = ()


def gate(of: ContractRuns, last: int) -> Gate:
    """The answer of the gate.

    Args:
        last: number of good runs to compare with.
    """
    newest = of.newest
    good = good_runs(of)[-last:]
    names = tuple(run.place for run in good)
    if len(good) < last:
        reason = (
            f"{count(len(good), 'good run')} of this contract on the same prompts before the "
            f"newest, and {last} are needed"
        )
        return _answer(of, Gate(of.name, "inconclusive", reason, newest.place, names))
    keys, notes = _compared(newest, good)
    notes += _differences(newest, good)
    if not keys:
        reason = "no enforced cell has a value in the newest run and in every good run"
        return _answer(of, Gate(of.name, "inconclusive", reason, newest.place, names, notes=notes))
    runs = [run.cells() for run in (*good, newest)]
    value_RC = [[_badness(cells[key]) for key in keys] for cells in runs]
    floor_RC = [[cells[key].floor or 0.0 for key in keys] for cells in runs]
    cells = _worse_cells(keys, runs, value_RC, floor_RC)
    found = worse(value_RC, floor_RC)
    if found:
        reason = f"worse than each of the last {last} good runs: {_words(cells[0], runs[:-1])}"
    elif cells:
        reason = (
            f"not worse than the last {last} good runs: {_words(cells[0], runs[:-1])}, and a good "
            "run stands out as far from the others"
        )
    else:
        reason = (
            f"not worse than the last {last} good runs: no cell is worse than in all of them by "
            "more than its noise floor"
        )
    outcome: Outcome = "violated" if found else "holds"
    rate = 1 / (last + 1)
    return _answer(of, Gate(of.name, outcome, reason, newest.place, names, cells, rate, notes))


def promise(last: int) -> str:
    """The statistics of the gate in one sentence."""
    return (
        f"The newest run is called worse if it exceeds all {last} good runs on some cell by a "
        "larger share of the range than any good run exceeds the others on any cell; "
        f"for a run like the good ones the probability is at most 1/{last + 1}."
    )


def good_runs(of: ContractRuns) -> list[RunRecord]:
    """Earlier runs that hold, of the same text and prompts; each measurement once."""
    newest = of.newest
    key = newest.verdict.key
    found: dict[str, RunRecord] = {}
    for run in of.runs[:-1]:
        same = (run.verdict.key.contract, run.verdict.key.corpus) == (key.contract, key.corpus)
        if same and run.verdict.outcome == "holds" and run.measurement != newest.measurement:
            found.pop(run.measurement, None)  # it has the place of its last verdict
            found[run.measurement] = run
    return [*found.values()]


def _answer(of: ContractRuns, found: Gate) -> Gate:
    """The gate is never better than the newest run's own verdict."""
    own = of.newest.verdict.outcome
    outcome = worst([found.outcome, own])
    if own in ("violated", "error", "inconclusive"):
        note = f"the newest run's own verdict is {own}"
        return replace(found, outcome=outcome, notes=(note, *found.notes))
    return found


def _compared(newest: RunRecord, good: Sequence[RunRecord]) -> tuple[list[Key], tuple[str, ...]]:
    """The enforced cells that all runs have a value of, and a note on those that some lack."""
    have = [run.cells() for run in (*good, newest)]
    wanted = dict.fromkeys(
        (c.clause, c.slice)
        for run in (newest, *good)
        for c in run.verdict.cells
        if c.enforced and c.section != "observability" and c.outcome != "not applicable"
    )
    keys = [key for key in wanted if all(key in cells for cells in have)]
    lacking = [f"{clause}[{slice_}]" for clause, slice_ in wanted if (clause, slice_) not in keys]
    if not lacking:
        return keys, ()
    more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
    shown = line(", ".join(lacking[:3]))
    return keys, (f"not compared, because a run has no value: {shown}{more}",)


def _differences(newest: RunRecord, good: Sequence[RunRecord]) -> tuple[str, ...]:
    """What else than the infer kernel may explain a difference."""
    notes = []
    for name, words in (("weights", "the weights"), ("train", "the train kernel")):
        mine = getattr(newest.verdict.key, name)
        other = sum(getattr(run.verdict.key, name) != mine for run in good)
        if other:
            notes.append(f"{words} differed in {other} of the {count(len(good), 'good run')}")
    return tuple(notes)


def _badness(cell: CellVerdict) -> float:
    """The value, larger is worse."""
    assert cell.value is not None
    return -cell.value if limit_sign(cell) == "≥" else cell.value


def _worse_cells(
    keys: Sequence[Key],
    runs: Sequence[Mapping[Key, CellVerdict]],
    value_RC: Sequence[Sequence[float]],
    floor_RC: Sequence[Sequence[float]],
) -> tuple[CellVerdict, ...]:
    *good, newest = value_RC
    margins = {
        key: margin(newest[c], [row[c] for row in good], floor_RC[-1][c])
        for c, key in enumerate(keys)
    }
    found = sorted((key for key in keys if margins[key] > 0), key=lambda key: -margins[key])
    return tuple(runs[-1][key] for key in found)


def _words(cell: CellVerdict, good: Sequence[Mapping[Key, CellVerdict]]) -> str:
    values = [other.value or 0.0 for cells in good if (other := cells[cell.clause, cell.slice])]
    low, high = (of_cell(cell, value) for value in (min(values), max(values)))
    limit = f"limit {limit_sign(cell)} {number(cell.limit)}" if cell.limit is not None else ""
    span = f"{low} to {high}" if low != high else low
    what = line(f"{cell.clause} ({cell.aggregate} {cell.metric})".replace("( ", "("))
    shown = f"{of_cell(cell, cell.value)} against {span}"
    return f"{what} on {where(cell)} is {shown}" + (f", {limit}" if limit else "")
