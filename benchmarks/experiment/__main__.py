"""Run each run that has no file yet; a killed process resumes with the same command.

python -m benchmarks.experiment [--full] [--out FOLDER] [--part K/N] [--only TEXT]
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from benchmarks.experiment.record import RESULTS, Run, read_alone, write_run
from benchmarks.experiment.settings import Settings, full, quick, repeated

QUICK = Path("runs/experiment")


def line_of(run: Run) -> str:
    """One line: the last rewards, and the step of a halt."""
    if run.same_as and not run.preflight:
        return f"{run.name:<40}no action was due: repeats {run.same_as}"
    if run.same_as:
        found = run.preflight
        return (
            f"{run.name:<40}preflight {found['outcome']} {found['cause']} in "
            f"{found['seconds']:.0f} s; repeats {run.same_as}"
        )
    reward = " ".join(f"{value:.2f}" for value in run.evaluations["trained"])
    halted = "" if run.halted_at is None else f"  halted at step {run.halted_at}"
    return f"{run.name:<40}reward {reward}{halted}  {run.seconds:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="five seeds, and every other fault")
    parser.add_argument("--out", type=Path, help=f"default {QUICK}; with --full, {RESULTS.name}/")
    parser.add_argument("--part", default="1/1", help="this process of how many, e.g. 1/2")
    parser.add_argument("--only", default="", help="only runs whose names contain this text")
    asked = parser.parse_args()
    out = asked.out or (RESULTS if asked.full else QUICK)
    at, parts = map(int, asked.part.split("/"))
    wanted = [one for one in (full() if asked.full else quick()) if asked.only in one.name]
    mine = wanted[at - 1 :: parts]
    for one in mine:
        if not (out / f"{one.name}.json").exists():
            _run(one, out)
    for one in mine:  # last, since another process may be at them
        repeats = read_alone(out / f"{one.name}.json").same_as
        if repeats and not (out / f"{repeats}.json").exists():
            _run(repeated(repeats), out)


def _run(settings: Settings, out: Path) -> None:
    from benchmarks.experiment.training import as_unguarded, train  # imports torch

    unguarded = out / f"{dataclasses.replace(settings, arm='none').name}.json"
    run = None
    if settings.arm == "monitor" and unguarded.exists():
        run = as_unguarded(settings, read_alone(unguarded))
    run = run or train(settings)
    write_run(run, out)
    print(line_of(run), flush=True)


if __name__ == "__main__":
    main()
