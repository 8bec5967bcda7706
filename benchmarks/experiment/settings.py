# What one run is set to, and which runs there are.

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.experiment.record import name_of

MODEL = "models/tiny-lm"


@dataclass(frozen=True)
class Settings:
    """Everything that a run follows from; the same for every arm and fault but for the first four.

    Args:
        fault: "healthy", a fault of a sync or one of the catalogue, at its default.
        engine: bfloat16, or int4_g32 (bfloat16 with weights of four bits).
        arm: none, tis (min(w, 2)), mis (w inside [0.5, 2]), monitor, contract (drill and monitor).
        steps: updates; each is one step of AdamW on one batch of fresh answers.
        prompts, answers: of a step; an answer's group are the answers of its prompt.  The prompts
            are the same at each step, so that the policy has time to learn them.
        given: how many of the three digits a prompt has worked out already.
        width: the most tokens of an answer, its end included; also the constant that the sum of
            an answer's losses is divided by.
        temperature: of both policies; the trainer divides its logits by it, too.
        learning_rate: of AdamW, reached after `warmup` steps.
        evaluated: fresh answers to the run's own sums; held_out: sums that are never trained on,
            one answer each; every `evaluate_every` steps, by the trainer's weights in float32.
        checkpoints: updates after which the true bias is worked out, on `checkpoint_prompts` of
            the run's sums.
        adapter_rank: of a LoRA adapter that is trained instead of the weights; 0 for none.
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
    learning_rate: float = 7e-4
    warmup: int = 5
    evaluated: int = 64
    held_out: int = 64
    evaluate_every: int = 10
    checkpoints: tuple[int, ...] = (0, 10, 30)
    checkpoint_prompts: int = 4
    adapter_rank: int = 0

    @property
    def name(self) -> str:
        return name_of(self.fault, self.engine, self.arm, self.seed)
