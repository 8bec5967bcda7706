# Outcomes of the monitor on the uncorrected runs, and why it does not fire where others do.

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from benchmarks.experiment.alarms import Firings, cases_of, chosen
from benchmarks.experiment.guards import FIELD
from benchmarks.experiment.pictures import called
from benchmarks.experiment.record import CONTRACT, Run
from benchmarks.experiment.sections import fires_on_healthy
from benchmarks.experiment.tables import markdown
from servanda.runner import run as runs_of

OUTCOMES = ("holds", "inconclusive", "violated", "error")
WINDOW = 12  # steps of a pooled mean: the tokens of a step are few


def slower(runs: Sequence[Run], told: Firings) -> str:
    """The cases in which most thresholds fire on every run and the monitor never, with values."""
    quiet = [name for name in FIELD if name in told and not fires_on_healthy(told[name])]
    found = []
    for case, seen in told.get("monitor", {}).items():
        rows = [of for name in quiet if (of := told[name][case])]
        loud = sum(of.runs == len(of.first) for of in rows)
        if seen is not None and not seen.runs and 2 * loud > len(rows):
            found += [f"- {line}" for line in _measured(runs, case)]
    if not found:
        return "In no case do most thresholds of other projects fire while the monitor does not."
    return "\n".join(
        [
            "In these cases most thresholds of other projects fire and the monitor does not. On "
            "most steps the measured value is below the contract's limit. On the few steps above "
            "it, the step has too few tokens for a verdict:\n",
            *found,
        ]
    )


def _measured(runs: Sequence[Run], case: str) -> list[str]:
    """The values of the clauses on the whole batch, against their limits."""
    lines = []
    for clause in runs_of.load(CONTRACT).statistical:
        cells = [
            [cell for entry in run.monitor for cell in entry["cells"] if _whole(cell, clause.id)]
            for run in chosen(runs, case, "none")
        ]
        values = [[float(cell[3]) for cell in found] for found in cells if found]
        if not values or clause.at_most is None:
            continue
        beyond = sum(value > clause.at_most for of in values for value in of)
        steps = sum(map(len, values))
        pooled = max(
            (fmean(of[i : i + WINDOW]) for of in values for i in _starts(of)), default=math.nan
        )
        within = f"The largest mean over {WINDOW} consecutive steps is {pooled:.4f}, " + (
            "below the limit: with more tokens the verdict would be *holds*."
            if pooled <= clause.at_most
            else "above the limit: with more tokens the verdict would be *violated*."
        )
        lines.append(
            f"**{called(case)}**, `{clause.id}`: the measured value is above the limit of "
            f"{clause.at_most:g} on {beyond} of {steps} steps. {within}"
        )
    return lines


def _whole(cell: Sequence[object], clause: str) -> bool:
    return cell[0] == clause and cell[1] == "all" and cell[3] is not None


def _starts(values: Sequence[float]) -> range:
    return range(len(values) - WINDOW + 1)


def monitor_table(runs: Sequence[Run]) -> str:
    """Outcomes of the monitor on the uncorrected runs, and the cells that were violated."""
    rows = []
    for case in cases_of(runs):
        told = [entry for run in chosen(runs, case, "none") for entry in run.monitor]
        if not told:
            continue
        red: dict[str, int] = {}
        for entry in told:
            for clause, where, outcome, *_ in entry["cells"]:
                if outcome == "violated":
                    red[f"{clause}[{where}]"] = red.get(f"{clause}[{where}]", 0) + 1
        cells = ", ".join(f"{cell} {n}" for cell, n in red.items())
        answers = [sum(entry["outcome"] == word for entry in told) for word in OUTCOMES]
        rows.append((called(case), *map(str, answers), cells or "-"))
    return markdown(("case", *OUTCOMES, "violated cells, with the number of steps"), rows)
