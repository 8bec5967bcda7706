# The records of uncorrected runs, completed by whether the engine followed: each run without such
# entries is run again, and its steps have to be the recorded ones.
#
#     python -m benchmarks.experiment.followed [--part K/N]

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

import torch

from benchmarks.experiment.record import RESULTS, Run, read_alone, write_run
from benchmarks.experiment.settings import repeated
from benchmarks.experiment.training import train


def followed(run: Run) -> Run:
    """The record with its entries.

    Raises:
        ValueError: the run did not repeat its record.
    """
    settings = dataclasses.replace(repeated(run.name), checkpoints=(), evaluate_every=10**6)
    with tempfile.TemporaryDirectory() as folder:
        again = read_alone(write_run(train(settings), Path(folder)))
    for name in {*run.steps} & {*again.steps} - {"seconds"}:
        if again.steps[name] != run.steps[name]:
            raise ValueError(f"{run.name}: {name} is not as recorded")
    return dataclasses.replace(run, follow=again.follow)


def main() -> None:
    parser = argparse.ArgumentParser(description="Add to each record whether the engine followed.")
    parser.add_argument("--part", default="1/1", help="this process of how many, e.g. 1/2")
    at, parts = map(int, parser.parse_args().part.split("/"))
    torch.set_num_threads(1)
    for path in sorted(RESULTS.glob("*-none-*.json"))[at - 1 :: parts]:
        run = read_alone(path)
        if run.follow or run.same_as:
            continue
        run = followed(run)
        write_run(run, RESULTS)
        red = [seen["version"] for seen in run.follow if seen["outcome"] == "violated"]
        last = run.follow[-1]
        print(
            f"{run.name}: {red[:1]} {last['outcome']} {last['cause']} {last['slope']}", flush=True
        )


if __name__ == "__main__":
    main()
