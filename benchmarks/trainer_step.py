"""What the monitor adds to a training step of TRL: CPU seconds of a step with it, over one without.

    .venvs/trl/bin/python -m benchmarks.trainer_step [--rounds 15] [--model models/tiny-lm]

One GRPO run, whose steps take turns: without the monitor, with it, with a scored share of the
sequences, and with all of them scored.  A ratio is the median over the rounds of two neighbouring
steps; its interval holds the median of all rounds with 95 %.  Needs the environment of
`make test-rl`.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-not-found]
from transformers import TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

from benchmarks.speed_rows import outer
from servanda.rl import Monitor
from servanda.rl.monitor.batch import SHARE
from servanda.rl.trl import Monitored, rollouts

ROOT = Path(__file__).parents[1]
PLAIN = "without the monitor"
# score_share of a mode; None: the logprobs of the loss
MODES = {
    PLAIN: None,
    "default: the logprobs of the loss": None,
    f"score_share={SHARE:g}": SHARE,
    "score_share=1": 1.0,
}


class Trainer(Monitored, GRPOTrainer):
    """Takes the modes in turn, one a step."""

    mode = PLAIN

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.mode == PLAIN:
            self._batches += 1
            return GRPOTrainer._generate_and_score_completions(self, inputs)
        self.score_share = MODES[self.mode]
        return super()._generate_and_score_completions(inputs)


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.trainer: Any = None
        self.seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        self.scored: dict[str, list[float]] = {mode: [] for mode in MODES}
        self._began = self._wall = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.mode = [*MODES][state.global_step % len(MODES)]
        self._began, self._wall = time.process_time(), time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        mode, wall = self.trainer.mode, time.perf_counter() - self._wall
        self.seconds[mode].append(time.process_time() - self._began)
        scoring = 0.0 if mode == PLAIN else self.trainer._scoring
        self.scored[mode].append(scoring / wall)


def timed(model: str, rounds: int, sequences: int, tokens: int, folder: str) -> Clock:
    """Train for so many rounds of all modes, and one more that warms up."""
    clock = Clock()
    clock.trainer = Trainer(
        model=model,
        args=GRPOConfig(
            folder,
            bf16=False,
            use_cpu=True,
            max_steps=len(MODES) * (rounds + 1),
            logging_steps=1000,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            per_device_train_batch_size=sequences,
            max_completion_length=tokens,
            learning_rate=1e-6,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["12 + 7 =", "def sum("] * sequences}),
        reward_funcs=lambda completions, **_: [float(len({*text})) for text in completions],
        rollout_func=rollouts(f"transformers:{model}@bfloat16"),
        monitor=Monitor("trl"),
        callbacks=[clock],
    )
    clock.trainer.train()
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ROOT / "models" / "tiny-lm"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shape", default="64x32", help="sequences x tokens of a step")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    sequences, tokens = map(int, asked.shape.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        clock = timed(asked.model, asked.rounds, sequences, tokens, folder)
    seconds = {mode: steps[1:] for mode, steps in clock.seconds.items()}
    left_out = outer(asked.rounds)
    print(f"{asked.shape}, {asked.rounds} rounds\n")
    print(f"| | ms a step | times {PLAIN} | scoring, of the elapsed time |\n|---|---|---|---|")
    for mode, own in seconds.items():
        ratio = sorted(a / b for a, b in zip(own, seconds[PLAIN], strict=True))
        scored = statistics.median(clock.scored[mode][1:])
        print(
            f"| {mode} | {1e3 * statistics.median(own):.0f} | {statistics.median(ratio):.3f} "
            f"({ratio[left_out]:.3f} to {ratio[-1 - left_out]:.3f}) | {100 * scored:.1f} % |"
        )


if __name__ == "__main__":
    main()
