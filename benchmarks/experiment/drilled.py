# The sync drill on the experiment's model: what it says of each fault of a sync, and its cost.
#
#     python -m benchmarks.experiment.drilled      drills every fault, a minute; writes drills.json
#
# It needs no training: trainer and engine have equal weights when it begins, as at step 0.

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from servanda.preflight.drill import preflight
from servanda.preflight.result import Preflight
from servanda.preflight.trainee import Rows, Trainee

from benchmarks.experiment.alarms import HEALTHY
from benchmarks.experiment.policy import open_policy
from benchmarks.experiment.settings import MODEL
from servanda.contract import Kernel
from servanda.engines import open_engine
from servanda.engines.weight_sync import WeightSync
from servanda.faults.sync import SYNC_FAULTS
from servanda.sampling import Sampling
from servanda.trace import Batch

DRILLS = Path(__file__).parent / "drills.json"
_RANK = 8  # of the adapter, for the fault that forgets adapters


@dataclass(frozen=True)
class Drilled:
    """One drill.

    Args:
        found, poison: mean |d| at equal weights, and after all weights were replaced and synced,
            nats; limit: of the latter.
        deaf: groups that do not follow, by name.
        score_seconds: of one scoring of the probe tokens by the engine, beside it.
        restored: whether every tensor of the trainer has the bits it had before.
    """

    fault: str
    outcome: str
    cause: str
    sentence: str
    found: float
    poison: float
    limit: float
    deaf: list[str]
    syncs: int
    tokens: int
    seconds: float
    score_seconds: float
    restored: bool


def scorer(engine: Any) -> Callable[[Rows], list[Any]]:
    """Rows of token ids -> the engine's logprobs of each row's tokens but the first."""

    def score(rows: Rows) -> list[Any]:
        prompts = tuple((row[0],) for row in rows)
        rest = tuple(tuple(row[1:]) for row in rows)
        batch = Batch(tuple(range(len(rows))), prompts, max(map(len, rest)), rest)
        logp_N = engine.score(batch, Sampling(), "prefill").columns["logp"]
        return np.split(logp_N, np.cumsum([len(row) for row in rest])[:-1])

    return score


def drilled(fault: str) -> Drilled:
    """Drill one fault of a sync, or none, in bfloat16; weights begin equal."""
    module = open_policy(MODEL, _RANK if fault == "adapter_ignored" else 0, seed=0)
    engine: Any = open_engine(
        Kernel(engine="transformers", model=MODEL, dtype="bfloat16", attention="sdpa")
    )
    entry = None if fault == HEALTHY else SYNC_FAULTS[fault]
    broken: Any = entry.inject(WeightSync, entry.default) if entry else WeightSync
    sync = broken(module, engine)
    score = scorer(engine)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    told: Preflight = preflight(Trainee(module, sync, score))
    after = module.state_dict()
    rows = [list(range(41))] * 16  # as many tokens as the drill's own probes
    began = time.perf_counter()
    score(rows)
    return Drilled(
        fault,
        told.outcome,
        told.cause,
        told.sentence,
        told.found.distance,
        told.poison.distance,
        told.poison.limit,
        [group.name for group in told.groups if group.deaf],
        told.syncs,
        told.tokens,
        round(told.seconds, 2),
        round(time.perf_counter() - began, 3),
        all(torch.equal(before[name], after[name]) for name in before),
    )


def write_drills(drills: Sequence[Drilled], path: Path = DRILLS) -> None:
    path.write_text(json.dumps([asdict(drill) for drill in drills], indent=1) + "\n")


def read_drills(path: Path = DRILLS) -> list[Drilled]:
    return [Drilled(**raw) for raw in json.loads(path.read_text())]


def main() -> None:
    torch.set_num_threads(1)
    found = []
    for fault in (HEALTHY, *SYNC_FAULTS):
        found.append(drilled(fault))
        print(asdict(found[-1]), flush=True)
    write_drills(found)


if __name__ == "__main__":
    main()
