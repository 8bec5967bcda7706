# A trainer's declarations: its reward with the range, and its gradient weighting.

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from servanda.contract.clause import form
from servanda.contract.fields import Number, Range, Value, Whole


class Reward(Value):
    """The reward of a whole answer."""

    range: Range = Field((0.0, 1.0), description="[lowest, highest] that the reward can be.")
    of: str | None = Field(
        None,
        description="exact_answer, contains_answer, or FILE.py:FUNCTION beside the contract, "
        "called as FUNCTION(prompt, answer); reward_gap needs it.",
    )


class GroupAdvantage(Value):
    """An advantage that is normalised within a group of answers, as in GRPO."""

    group_size: Whole = Field(ge=2, le=1_000_000, description="Answers of one prompt.")
    std: Literal["sample", "population"] = Field(
        "sample", description="The divisor: n - 1 (sample) or n (population)."
    )


class Weighting(Value):
    """A weighting with a bound; one of these, w being the importance ratio."""

    tis: Number | None = Field(None, ge=1, description="min(w, C): truncated.")
    mis: Range | None = Field(None, description="w inside [low, high], else 0: masked.")
    icepop: Range | None = Field(None, description="w inside [low, high], else 0, per token.")
    reject: Range | None = Field(None, description="1 inside [low, high], else 0.")
    clip: Number | None = Field(None, ge=0, description="w cut to [1 - c, 1 + c].")

    @property
    def given(self) -> dict[str, float | tuple[float, float]]:
        """The written weightings; lint requires exactly one."""
        return {name: value for name, value in self if value is not None}

    @property
    def sound(self) -> bool:
        """Whether it is one weighting, which leaves a ratio of 1 alone; lint refuses others."""
        bands = [value for value in self.given.values() if isinstance(value, tuple)]
        return len(self.given) == 1 and all(low < high and low <= 1 <= high for low, high in bands)


class Gradient(Value):
    """What turns a gap of weights into a bias of the policy gradient."""

    advantage: (
        Annotated[
            Annotated[Number, Field(gt=0), Tag("(scalar)")]
            | Annotated[GroupAdvantage, Tag("(mapping)")],
            Discriminator(form),
        ]
        | None
    ) = Field(None, description="The largest |advantage|, or {group_size: 8}.")
    score_norm: (
        Annotated[
            Annotated[Number, Field(gt=0), Tag("(scalar)")]
            | Annotated[Literal["logit_space"], Tag("(name)")],
            Discriminator(lambda v: "(name)" if isinstance(v, str) else "(scalar)"),
        ]
        | None
    ) = Field(None, description="The largest norm of grad log p, or logit_space (its bound).")
    weighting: (
        Annotated[
            Annotated[Literal["naive", "is"], Tag("(scalar)")]
            | Annotated[Weighting, Tag("(mapping)")],
            Discriminator(form),
        ]
        | None
    ) = Field(None, description="naive, is, {tis: 2.0}, {mis: [0.5, 2]}, {reject: ...}, {clip: c}.")
    loss: Literal["token_mean", "sequence_sum", "sequence_mean"] = Field(
        "token_mean",
        description="What a token's loss is divided by: the tokens of the batch, the answers of "
        "the batch, or the length of its own answer (GRPO).",
    )
    clip_range: Range | None = Field(
        None, description="[low, high]: the ratio is clipped to [1 - low, 1 + high] (PPO)."
    )
    ratio: Literal["bypass", "decoupled"] | None = Field(
        None,
        description="bypass: the clipped ratio is new policy over infer; decoupled: over train.",
    )
