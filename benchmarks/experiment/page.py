# Writes docs/explanation/experiment.md and its pictures from the committed records.
#
#     python -m benchmarks.experiment.page
#
# tests/experiment/test_page.py holds the committed ones to the records: no number is typed in.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.experiment import pictures, pilot
from benchmarks.experiment.alarms import compared, firings
from benchmarks.experiment.drills import Drilled, read_drills
from benchmarks.experiment.prose import page
from benchmarks.experiment.record import Run, read_runs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "experiment.md"


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
    found = pages(read_runs(), read_drills(), read_runs(pilot.FOLDER))
    return {PAGE.with_name(name): text for name, text in found.items()}


def main() -> None:
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
