# Writes docs/explanation/experiment.md and its pictures from the records.
#
#     python -m benchmarks.experiment.page            from the committed records
#     python -m benchmarks.experiment.page FOLDER     of the runs in a folder, into that folder
#
# tests/experiment/test_page.py holds the committed ones to the records: no number is typed in.

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.experiment import pictures
from benchmarks.experiment.alarms import compared, firings
from benchmarks.experiment.drills import DRILLS, Drilled, read_drills
from benchmarks.experiment.prose import page
from benchmarks.experiment.record import RESULTS, Run, read_alone, read_run, read_runs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "experiment.md"
PILOT = "pilot"  # folder of its runs, beside the others


def recorded(folder: Path = RESULTS) -> list[Run]:
    """Every run on record.

    A run that repeats a missing one has only its preflight test.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(read_run(path))
        except FileNotFoundError:
            found.append(read_alone(path))
    return found


def pages(runs: Sequence[Run], drills: Sequence[Drilled], tried: Sequence[Run]) -> dict[str, str]:
    """The page and its pictures, by their file names.

    Args:
        tried: runs of the pilot.
    """
    fired = firings(runs)
    steps = max(run.settings["steps"] for run in runs)
    points = pictures.points_of(runs)
    return {
        PAGE.name: page(runs, drills, tried, fired, points),
        "experiment_rewards.svg": pictures.rewards(
            runs, compared(runs), "trained", "Reward on the training problems"
        ),
        "experiment_guards.svg": pictures.timeline(fired, steps),
        "experiment_truth.svg": pictures.truth(points),
    }


def files() -> dict[Path, str]:
    """Every committed file that is written from the committed records."""
    found = pages(recorded(), read_drills(), read_runs(RESULTS / PILOT))
    return {PAGE.with_name(name): text for name, text in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the page of the experiment.")
    parser.add_argument("folder", type=Path, nargs="?", help="of runs; default the committed ones")
    folder: Path | None = parser.parse_args().folder
    if folder is None:
        found = files()
    else:
        drills, tried = read_drills(folder / "drills" / DRILLS.name), read_runs(folder / PILOT)
        own = pages(recorded(folder), drills, tried)
        found = {folder / name: text for name, text in own.items()}
    for path, text in found.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
