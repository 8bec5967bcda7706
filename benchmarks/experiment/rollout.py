# Rollouts: responses that the engine samples by its own decoding, with its own logprobs.
#
# Axes: S sequences, N tokens of all sequences one after another.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scripts.corpus import Sum

from benchmarks.experiment import sums
from benchmarks.experiment.settings import MODEL, Settings
from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines.faults import FAULTS
from servanda.engines.faults.sync import SYNC_FAULTS
from servanda.engines.low_precision.formats import QUANTIZED
from servanda.engines.weight_sync import WeightSync
from servanda.rl.sync_drill.trainee import Rows
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Rollout:
    """Answers of one step.

    Args:
        prompts: token ids of the problems, [P].
        answers: token ids, [S]; at least one.
        logp_N: of the answers' tokens as the engine reports it, nats.
        entropy_N: of the distributions that they were drawn from, nats.
        reward_S: in {0, 1}.
        group_S: the prompt of each answer.
    """

    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...]
    logp_N: Floats
    entropy_N: Floats
    reward_S: Floats
    group_S: NDArray[np.int64]

    @property
    def length_S(self) -> NDArray[np.int64]:
        return np.array([len(answer) for answer in self.answers])


def open_infer(settings: Settings) -> Any:
    """The rollout engine, with the fault in it if it is a fault of an engine."""
    fault = settings.fault if settings.fault in FAULTS else None
    return open_engine(
        Kernel(
            engine="transformers",
            model=MODEL,
            dtype="bfloat16",
            attention="sdpa",
            quantization=settings.engine if settings.engine in QUANTIZED else None,
            batch_size=settings.prompts * settings.answers,
            fault={fault: FAULTS[fault].default} if fault else None,
        )
    )


def sync_of(fault: str, module: Any, engine: Any) -> WeightSync:
    """The trainer's sync, with the fault in it if it is a fault of a sync."""
    if fault not in SYNC_FAULTS:
        return WeightSync(module, engine)
    entry = SYNC_FAULTS[fault]
    return entry.inject(WeightSync, entry.default)(module, engine)


def roll_out(
    engine: Any, problems: list[Sum], answers: int, seed: int, settings: Settings
) -> Rollout:
    """Sample `answers` responses to each problem."""
    repeated = [problem for problem in problems for _ in range(answers)]
    prompts = engine.encode([sums.prompt_of(problem, settings.given) for problem in repeated])
    batch = Batch(tuple(range(len(prompts))), tuple(map(tuple, prompts)), settings.width)
    drawn = engine.generate(batch, Sampling(temperature=settings.temperature), seed)
    texts = engine.decode(drawn.continuations)
    return Rollout(
        prompts=batch.prompts[::answers],
        answers=drawn.continuations,
        logp_N=drawn.columns["logp"],
        entropy_N=drawn.columns["entropy_nats"],
        reward_S=np.array(sums.rewards(repeated, texts)),
        group_S=np.repeat(np.arange(len(problems)), answers),
    )


def scorer(engine: Any) -> Callable[[Rows], list[Any]]:
    """Rows of token ids -> the engine's logprobs of each row's tokens but the first."""

    def score(rows: Rows) -> list[Any]:
        prompts = tuple((row[0],) for row in rows)
        rest = tuple(tuple(row[1:]) for row in rows)
        batch = Batch(tuple(range(len(rows))), prompts, max(map(len, rest)), rest)
        logp_N = engine.score(batch, Sampling(), "prefill").columns["logp"]
        return np.split(logp_N, np.cumsum([len(row) for row in rest])[:-1])

    return score
