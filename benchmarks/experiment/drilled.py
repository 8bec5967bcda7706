# The preflight sync test on the experiment's model: its diagnosis of each fault, and its cost.
#
#     python -m benchmarks.experiment.drilled [--out FOLDER]     every fault, a minute; drills.json
#
# It needs no training: trainer and engine have equal weights when it begins, as at step 0.

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.experiment.alarms import HEALTHY
from benchmarks.experiment.drills import DRILLS, Drilled, write_drills
from benchmarks.experiment.policy import open_policy
from benchmarks.experiment.rollout import scorer
from benchmarks.experiment.settings import MODEL
from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines.faults.sync import SYNC_FAULTS
from servanda.engines.weight_sync import WeightSync
from servanda.rl.sync_drill.drill import preflight
from servanda.rl.sync_drill.report import Preflight
from servanda.rl.sync_drill.trainee import Trainee

_RANK = 8  # of the adapter, for the faults of adapters


def drilled(fault: str) -> Drilled:
    """Test one fault of a sync, or none, in bfloat16; weights begin equal."""
    module = open_policy(MODEL, _RANK if fault.startswith("adapter") else 0, seed=0)
    engine: Any = open_engine(
        Kernel(engine="transformers", model=MODEL, dtype="bfloat16", attention="sdpa")
    )
    entry = None if fault == HEALTHY else SYNC_FAULTS[fault]
    broken: Any = entry.inject(WeightSync, entry.default) if entry else WeightSync
    sync = broken(module, engine)
    score = scorer(engine)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    found: Preflight = preflight(Trainee(module, sync, score))
    after = module.state_dict()
    rows = [list(range(41))] * 16  # as many tokens as the test scores
    began = time.perf_counter()
    score(rows)
    return Drilled(
        fault,
        found.outcome,
        found.cause,
        found.sentence,
        found.found.distance,
        found.poison.distance,
        found.poison.limit,
        [group.name for group in found.groups if group.deaf],
        found.syncs,
        found.tokens,
        round(found.seconds, 2),
        round(time.perf_counter() - began, 3),
        all(torch.equal(before[name], after[name]) for name in before),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Run the preflight sync test on every fault of a sync."
    )
    parser.add_argument("--out", type=Path, default=DRILLS.parent, help="folder of drills.json")
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    tests = []
    for fault in (HEALTHY, *SYNC_FAULTS):
        tests.append(drilled(fault))
        print(asdict(tests[-1]), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    write_drills(tests, out / DRILLS.name)


if __name__ == "__main__":
    main()
