# The contract in a run: the preflight sync test before it, and the monitor at each step.

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.experiment.rollout import Rollout
from servanda.rl import Monitor, Step, Trainee, preflight
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch

CONTRACT = Path(__file__).with_name("grpo.kernelcontract.yaml")


def drill(module: Any, sync: Any, engine: Any, seed: int) -> dict[str, Any]:
    """The preflight sync test before step 1; it restores the weights bit for bit.

    Returns:
        `Run.preflight`.  Only a violated outcome refuses the run.
    """

    def score(rows: list[list[int]]) -> list[NDArray[np.float64]]:
        batch = Batch(
            tuple(range(len(rows))),
            tuple((row[0],) for row in rows),
            max(map(len, rows)),
            tuple(tuple(row[1:]) for row in rows),
        )
        trace = engine.score(batch, Sampling(), "prefill")
        return np.split(trace.columns["logp"], np.cumsum(trace.length_S)[:-1])

    began = time.perf_counter()
    found = preflight(Trainee(module, sync, score), seed=seed)
    return {
        "outcome": found.outcome,
        "exit_code": found.exit_code,
        "cause": found.cause,
        "sentence": found.sentence,
        "syncs": found.syncs,
        "seconds": time.perf_counter() - began,
        "refused": found.outcome == "violated",
    }


class Watched:
    """The monitor of a run."""

    def __init__(self, stop: bool) -> None:
        self.monitor = Monitor(CONTRACT, stop=stop)

    def look(
        self,
        rollout: Rollout,
        logp_train_SW: NDArray[np.float64],
        logp_infer_SW: NDArray[np.float64],
        mask_SW: NDArray[np.bool_],
        advantage_S: NDArray[np.float64],
        step: int,
    ) -> Step:
        return self.monitor.observe(
            logp_train_SW,
            logp_infer_SW,
            mask_SW,
            groups=rollout.group_S.tolist(),
            advantages=advantage_S,
            weights=step,
        )


def entry(step: Step, cells: bool) -> dict[str, Any]:
    """One step of `Run.monitor`; `cells`: whether its cells are kept."""
    return {
        "outcome": step.outcome,
        "action": step.action,
        "would": step.would,
        "masked": step.masked,
        "cells": [
            [c.clause, c.slice, c.outcome, c.value, *(c.interval or (None, None)), c.n]
            for c in step.verdict.cells
            if cells and c.enforced and c.section == "statistical"
        ],
    }
