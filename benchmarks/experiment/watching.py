# What watches a run: the preflight sync test before it, the monitor at each step, and whether the
# engine follows the trainer after each sync.

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.experiment.rollout import Rollout, scorer
from servanda.rl import Follow, Monitor, Step, Trainee, preflight
from servanda.rl.follow.sent_weights import SentWeights

CONTRACT = Path(__file__).with_name("grpo.kernelcontract.yaml")


def drill(module: Any, sync: Any, engine: Any, seed: int) -> dict[str, Any]:
    """The preflight sync test before step 1; it restores the weights bit for bit.

    Returns:
        `Run.preflight`.  Only a violated outcome refuses the run.
    """
    began = time.perf_counter()
    found = preflight(Trainee(module, sync, scorer(engine)), seed=seed)
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


class Followed:
    """Whether the engine follows, by 640 probe tokens after each sync."""

    def __init__(self, module: Any, engine: Any) -> None:
        self.follow = Follow(module)
        self.train, self.infer = SentWeights(module, "bfloat16"), scorer(engine)

    def look(self, version: int) -> dict[str, Any]:
        """An entry of `Run.follow`; version: updates behind the weights."""
        rows = self.follow.probes
        found = self.follow.observe(version, self.train(rows), self.infer(rows))
        low, high = found.interval
        return {
            "version": version,
            "outcome": found.outcome,
            "cause": found.cause,
            "slope": found.slope,
            "low": low,
            "high": high,
        }


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
