"""The pilot: at which learning rate does a healthy run learn, and a broken sync hurt?

    python -m benchmarks.experiment.pilot

The arm is always "none", so that no arm is favoured; every run of the experiment then has the
rate that `chosen` gives.  The last lines are the rewards; the runs are kept in results/pilot.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from pathlib import Path

from benchmarks.experiment.record import RESULTS, Run, read_runs, write_run
from benchmarks.experiment.settings import Settings

RATES = (3e-4, 7e-4, 1e-3)
FAULTS = ("healthy", "one_mlp", "tied_head_stale")
SEEDS = (0, 1)
FOLDER = RESULTS / "pilot"
LEARNT = 0.9
KEPT = ("step", "reward_mean", "groups_mixed", "abs_d_mean", "k3", "seconds")  # of the steps


def settings() -> list[Settings]:
    """Every run of the pilot: all but the rate as in the experiment, without checkpoints."""
    return [
        Settings(fault, "bfloat16", "none", seed, learning_rate=rate, checkpoints=())
        for seed in SEEDS
        for rate in RATES
        for fault in FAULTS
    ]


def file_of(one: Settings, folder: Path) -> Path:
    """A run's file: its name and its rate."""
    return folder / f"{one.name}-{one.learning_rate:g}.json"


def lines(runs: Iterable[Run]) -> list[str]:
    """A line for each rate and fault: the rewards on the training problems, by seed."""
    shown: dict[tuple[float, str], list[str]] = {}
    for run in runs:
        key = (run.settings["learning_rate"], run.settings["fault"])
        reward = " ".join(f"{value:.2f}" for value in run.evaluations["trained"])
        shown.setdefault(key, []).append(reward)
    return [f"{rate:<8g}{fault:<17}{'   '.join(some)}" for (rate, fault), some in shown.items()]


def chosen(runs: Iterable[Run]) -> float:
    """The largest rate at which the healthy policy ends at LEARNT or better with every seed."""
    ends: dict[float, list[float]] = {}
    for run in runs:
        if run.settings["fault"] == "healthy":
            last = run.evaluations["trained"][-1]
            ends.setdefault(run.settings["learning_rate"], []).append(last)
    return max(rate for rate, some in ends.items() if min(some) >= LEARNT)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--part", default="1/1", help="this process of how many, e.g. 1/2")
    asked = parser.parse_args()
    at, parts = map(int, asked.part.split("/"))
    from benchmarks.experiment.training import train

    for one in settings()[at - 1 :: parts]:
        path = file_of(one, asked.out)
        if not path.exists():
            run = train(one)
            kept = {name: run.steps[name] for name in KEPT}
            small = dataclasses.replace(run, name=path.stem, monitor=[], steps=kept)
            write_run(small, asked.out)
            print(path.stem, *lines([run]), sep="  ", flush=True)
    print("mean reward on the training problems every ten steps, one seed after the other")
    runs = read_runs(asked.out)
    print(*sorted(lines(runs)), f"chosen: {chosen(runs):g}", sep="\n")


if __name__ == "__main__":
    main()
