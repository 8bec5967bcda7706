# Writes docs/explanation/experiment.md, its pictures, and the README's table from the records.
#
#     python -m benchmarks.experiment.page
#
# tests/experiment/test_page.py holds all of them to the records: no number here is typed in.

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.experiment import pictures, tables
from benchmarks.experiment.alarms import compared, firings
from benchmarks.experiment.drills import Drilled, read_drills
from benchmarks.experiment.prose import page
from benchmarks.experiment.record import RESULTS, Run, read_alone, read_run
from benchmarks.experiment.tables import BEGIN, END

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "experiment.md"
README = ROOT / "README.md"


def recorded(folder: Path = RESULTS) -> list[Run]:
    """Every run on record.

    Of a run that repeats one that is not there yet, only what was seen before its first step.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(read_run(path))
        except FileNotFoundError:
            found.append(read_alone(path))
    return found


def block(runs: Sequence[Run]) -> str:
    """The table that the page and the README share."""
    return tables.faults_by_guards(firings(runs), tables.SHORT)


def put(text: str, table: str) -> str:
    """A text with the table between its markers.

    Raises:
        ValueError: the markers do not stand there once, in order.

    >>> put(f"a {BEGIN} old {END} b", "new")
    'a <!-- faults x guards -->\\n\\nnew\\n\\n<!-- end of faults x guards --> b'
    """
    found = re.findall(f"{BEGIN}.*?{END}", text, re.S)
    if len(found) != 1:
        raise ValueError(f"{BEGIN} ... {END} stands there {len(found)} times, and not once")
    return text.replace(found[0], f"{BEGIN}\n\n{table}\n\n{END}")


def files(runs: Sequence[Run], drills: Sequence[Drilled], readme: str) -> dict[Path, str]:
    """Every file that is written from the records."""
    told = firings(runs)
    steps = max(run.settings["steps"] for run in runs)
    points = pictures.points_of(runs)
    table = block(runs)
    return {
        PAGE: put(page(runs, drills, told, points), table),
        README: put(readme, table),
        PAGE.with_name("experiment_rewards.svg"): pictures.rewards(
            runs, compared(runs), "trained", "Reward on the sums of the run"
        ),
        PAGE.with_name("experiment_guards.svg"): pictures.timeline(told, steps),
        PAGE.with_name("experiment_truth.svg"): pictures.truth(points),
    }


def write(paths: Iterable[Path] = ()) -> None:
    """Write every file, or those of them that are named."""
    found = files(recorded(), read_drills(), README.read_text(encoding="utf-8"))
    for path in paths or found:
        path.write_text(found[path], encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    write()
