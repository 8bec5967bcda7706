# One run of the experiment as a file: its settings, the statistics of each step, and the true bias
# at checkpoints.  Checks, tables and pictures are made from these files alone.
#
# One sign everywhere: log_ratio = logp_train - logp_infer; w = exp(log_ratio).

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
RESULTS = Path(__file__).parent / "results"
CONTRACT = Path(__file__).with_name("grpo.kernelcontract.yaml")  # of the runs


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        name: FAULT-ENGINE-ARM-SEED, also the name of the file.
        settings: fault ("healthy" or a name of the catalogue), engine ("bfloat16", "int4_g32"),
            arm ("none", "tis", "mis", "monitor", "contract"), seed, steps, prompts and answers
            (of each) a step, width (the most tokens of an answer), learning_rate, evaluated and
            held_out (sums of an evaluation), and checkpoints (updates before each of them).
        versions: of python, numpy, torch, transformers and servanda.
        same_as: the run whose steps these are; "" where they are its own.  The arm "contract" is
            a preflight sync test and then the arm "monitor": of the same run if the test passes,
            else of the healthy run with the same seed, since the sync is then repaired.  The arm
            "monitor" is the arm "none" if the contract asked for no action.  `read_run` fills
            the steps in.
        preflight: {} without a preflight sync test; else outcome ("holds", "violated",
            "inconclusive"), exit_code, cause, sentence, syncs, seconds, and refused (whether the
            run did not start).
        steps: name -> one value per step, [steps] or fewer if the run was halted; null if a step
            has none (never 0).  The names:
            step              0, 1, ...: the number of updates behind these weights
            reward_mean       of the step's responses, sampled by the engine
            groups_mixed      share of prompt groups with two different rewards: the others teach
                              nothing
            entropy_nats      mean over tokens, of the engine's distribution
            loss, grad_norm   before the update; grad_norm before any clipping
            tokens, sequences of the step
            weight_mean       mean over tokens of what a token's loss was multiplied with
            weight_zero       share of tokens with weight 0
            seconds           wall seconds of the step
            and of STATISTICS (statistics.py), everything that a threshold check reads.
        evaluations: {"step": [...], "trained": [...], "held_out": [...]}: mean reward of the
            trainer's own weights, in float32: of `evaluated` fresh answers to the run's sums, and
            of one answer to each of `held_out` sums that are never trained on.  The last is at the
            end, or where the run was halted.
        monitor: one entry a step, in every arm: {"outcome", "action": [...], "would": [...],
            "masked": [...], "cells": [[clause, slice, outcome, value, low, high, n], ...]} of the
            statistical cells that are enforced; none in the arms "tis" and "mis".  Only the arm
            "monitor" acts on it; in others it observes, and halts nothing.
        follow: of the arm "none" one entry at the start and after each sync: {"version" (updates
            behind the weights), "outcome", "cause", "slope", "low", "high"}, as
            servanda.rl.Follow has them.
        halted_at: the step at which the arm halted the run, before its update; else null.
        checkpoints: the true bias, one entry for each checkpoint: "step", the norm of the gradient
            ("signal"), the mass that was not enumerated ("rest_p", "rest_q"), and by weighting the
            bias and its bound, by logits and by all parameters.
        seconds: of the whole run, wall.
    """

    name: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str] = field(default_factory=dict)
    same_as: str = ""
    preflight: Mapping[str, Any] = field(default_factory=dict)
    steps: Mapping[str, list[Any]] = field(default_factory=dict)
    evaluations: Mapping[str, Any] = field(default_factory=dict)
    monitor: list[Mapping[str, Any]] = field(default_factory=list)
    follow: list[Mapping[str, Any]] = field(default_factory=list)
    halted_at: int | None = None
    checkpoints: list[Mapping[str, Any]] = field(default_factory=list)
    seconds: float | None = None
    schema: int = SCHEMA


def name_of(fault: str, engine: str, arm: str, seed: int) -> str:
    """The name of a run.

    >>> name_of("one_mlp", "bfloat16", "tis", 3)
    'one_mlp-bfloat16-tis-3'
    """
    return f"{fault}-{engine}-{arm}-{seed}"


def read_run(path: Path) -> Run:
    """Read a run; where its steps are those of another, they are read from that one's file.

    Raises:
        ValueError: the file is of another schema.
        FileNotFoundError: it, or the run that it repeats, is not there.
    """
    raw = json.loads(path.read_text())
    if raw["schema"] != SCHEMA:
        raise ValueError(f"{path}: schema {raw['schema']}, and this reads {SCHEMA}")
    run = Run(**raw)
    if not run.same_as:
        return run
    other = read_run(path.with_name(f"{run.same_as}.json"))
    kept = ("steps", "evaluations", "monitor", "follow", "halted_at", "checkpoints")
    return dataclasses.replace(run, **{name: getattr(other, name) for name in kept})


def read_runs(folder: Path = RESULTS) -> list[Run]:
    """Every run of a folder, by name."""
    return [read_run(path) for path in sorted(folder.glob("*.json"))]
