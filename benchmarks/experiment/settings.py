# The settings of a run, and the list of all runs.

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.experiment.record import name_of

MODEL = "models/tiny-lm"
ADAPTER_RANK = 8
ARMS = ("none", "tis", "mis", "contract", "monitor")
FAULTS = ("healthy", "never_synced", "tied_head_stale", "one_mlp")
OTHERS = (
    ("healthy", "int4_g32"),
    ("one_layer", "bfloat16"),
    ("norms_stale", "bfloat16"),
    ("wrong_cast", "bfloat16"),
    ("undisclosed_temperature", "bfloat16"),
    ("healthy", "bfloat16_lora"),
    ("adapter_ignored", "bfloat16_lora"),
)


@dataclass(frozen=True)
class Settings:
    """All settings of a run; the first four differ between arms and faults, the rest does not.

    Args:
        fault: "healthy", a fault of a sync or one of the catalogue, at its default.
        engine: bfloat16, int4_g32 (bfloat16 with weights of four bits), or bfloat16_lora (a LoRA
            adapter is trained instead of the weights).
        arm: none, tis (min(w, 2)), mis (w inside [0.5, 2]), monitor, contract (a preflight sync
            test, and the monitor).
        steps: updates; each is one step of AdamW on one batch of fresh answers.
        prompts, answers: of a step; an answer's group are the answers of its prompt.  The prompts
            are the same at each step, so that the policy has time to learn them.
        given: how many of the three digits a prompt shows worked out.
        width: the most tokens of an answer, its end included; also the constant that the sum of
            an answer's losses is divided by.
        temperature: of both policies; the trainer divides its logits by it, too.
        learning_rate: of AdamW, reached after `warmup` steps.
        evaluated: fresh answers to the run's own sums; held_out: sums that are never trained on,
            one answer each; every `evaluate_every` steps, by the trainer's weights in float32.
        checkpoints: updates after which the true bias is worked out, on `checkpoint_prompts` of
            the run's sums.
    """

    fault: str
    engine: str
    arm: str
    seed: int
    steps: int = 30
    prompts: int = 8
    answers: int = 8
    given: int = 2
    width: int = 14
    temperature: float = 1.0
    learning_rate: float = 3e-4
    warmup: int = 5
    evaluated: int = 64
    held_out: int = 64
    evaluate_every: int = 10
    checkpoints: tuple[int, ...] = (0, 10, 30)
    checkpoint_prompts: int = 4

    @property
    def name(self) -> str:
        return name_of(self.fault, self.engine, self.arm, self.seed)

    @property
    def adapter_rank(self) -> int:
        """Of the LoRA adapter; 0 where the weights themselves are trained."""
        return ADAPTER_RANK if self.engine.endswith("_lora") else 0


def matrix(seeds: Iterable[int]) -> list[Settings]:
    """Every fault with every arm, one seed after the other; arm contract after arm monitor."""
    return [
        _settings(fault, "bfloat16", arm, seed)
        for seed in seeds
        for fault in FAULTS
        for arm in ARMS
    ]


def _settings(fault: str, engine: str, arm: str, seed: int) -> Settings:
    """As all others; only two arms have checkpoints, which take a fifth of the time."""
    checkpoints = {} if arm in ("none", "monitor") else {"checkpoints": ()}
    return Settings(fault, engine, arm, seed, **checkpoints)


def others() -> list[Settings]:
    """Every other fault and engine once: without a correction, and under the contract."""
    return [_settings(*pair, arm, 0) for pair in OTHERS for arm in ("none", "contract")]


def quick() -> list[Settings]:
    """Three seeds: `make experiment`."""
    return matrix(range(3))


def full() -> list[Settings]:
    """Five seeds, and the other faults: `make experiment-full`."""
    return [*matrix(range(3)), *others(), *matrix(range(3, 5))]


def repeated(name: str) -> Settings:
    """The settings of a run of the experiment, by its name.

    >>> repeated("one_mlp-bfloat16-tis-3").seed
    3
    """
    fault, engine, arm, seed = name.split("-")
    return _settings(fault, engine, arm, int(seed))
