# The measurements of a preflight sync test: at equal weights, under noise, group by group.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["holds", "violated", "inconclusive"]
Mark = Literal["holds", "warns", "violated", "unseen"]

# Limits.  A group is judged by its response slope and residual; the others define when it can be.
DEAF = 0.5  # a slope below this, or above 1 / DEAF, is an error
# tolerance of the slope around 1: at a distance of one noise floor at equal weights, the slope of a
# change of m floors has the precision 1 / m, but no better than this
OFF, PART_OFF = 0.04, 0.15
SURE = 4.0  # standard errors by which one tensor of many must exceed a limit
RESIDUAL_ERROR, RESIDUAL_WARNS = 5.0, 3.0  # floors
# random weights: noise floors, of which working syncs need 3.5; and, for kernels whose floor is
# nearly 0, a share of the trainer's own change
POISON_FLOORS, POISON_SHARE = 8.0, 1 / 100
POISON_NATS = 0.1  # least change of the trainer to call an engine not synced as a whole
# share of the trainer's change with random weights below which the engine has not changed
STILL = 0.25
PLAIN = 3.0  # noise floors; a group with a smaller rest is not synced as a whole
NEAR = 0.02  # distance of the slope from 0: not synced as a whole
EXPLAINED = 0.25  # share of the engine's difference that an explanation may leave, or PLAIN floors
# a sync of unchanged weights: multiple of a side's own noise that counts as a change of the engine;
# ratio of distances to the trainer, and nats, that count as damage
_BEYOND, _FARTHER, _LEAST = 3.0, 2.0, 1e-4
SEEN = 2.0  # least change of the trainer's scores to judge a group, noise floors
# target change of a perturbation: noise floors, limited in nats if that is enough
AIM, AIM_LEAST, AIM_NATS = 12.0, 3.0, 1.0


@dataclass(frozen=True)
class Scale:
    """A factor on some of the engine's tensors that explains a response slope other than 1.

    Args:
        tensors: names of the group's parts.
        factor, low, high: the best fit, and its interval of two standard errors.
    """

    tensors: str
    factor: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.tensors} times {self.factor:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True)
class Baseline:
    """Both sides before any change, and after a sync of unchanged weights; nats.

    Args:
        distance: mean |engine - trainer| as found.
        idle: the same after one sync.
        moved: mean |engine after the sync - engine as found|.
        engine_noise, train_noise: the same side, scored twice.
        floor: the noise floor: the difference of the two sides at equal weights.
        cast: the apparent format of transferred weights, if its rounding explains the difference;
            "" for none.
        scale: the tensors that the engine multiplies by a factor, if that explains it.
        exchanged: the two kinds of tensors that change places in the engine; "" for none.
        mixed: whether the same tokens get one of two scores, one of them far from the trainer's.
        own_noise: the trainer, scored twice by its own function in its modules' modes, if it is
            noise that evaluation mode does not have; else 0.
    """

    distance: float
    idle: float
    moved: float
    engine_noise: float
    train_noise: float
    floor: float
    cast: str = ""
    scale: Scale | None = None
    exchanged: str = ""
    mixed: bool = False
    own_noise: float = 0.0

    @property
    def moved_away(self) -> bool:
        """Whether a sync of unchanged weights moved the engine away from the trainer."""
        return self.moved > max(_BEYOND * self._noise, _LEAST) and self.idle > 1.1 * self.distance

    @property
    def damaged(self) -> bool:
        return (
            min(self.moved, self.idle) > _BEYOND * self._noise
            and self.idle > _FARTHER * self.distance
            and self.idle - self.distance > _LEAST
        )

    @property
    def near(self) -> float:
        """The largest difference from before, nats, at which the engine counts as restored."""
        return max(_BEYOND * self.engine_noise, self.floor / 4)

    @property
    def _noise(self) -> float:
        return max(self.engine_noise, self.train_noise)


@dataclass(frozen=True)
class PoisonResult:
    """Both sides after all weights were randomised and synced; nats.

    Args:
        distance: mean |engine - trainer|.
        moved: mean change of the trainer's own scores.
        follow: response slope: of the engine's change on the trainer's.
        limit: on the distance.
        fresh: the distance on tokens never scored before, where it was measured.
        late: number of further syncs of the same weights until they arrived.
        mixed: some rows or calls were scored with these weights, others with the old ones.
        changed: mean change of the engine's scores.
        cause, held: the fault with which the trainer reproduces the engine, and its details: a part
            of a tensor that is left out, or another place or format of all; "" for none.
        shares: a matrix of each kind -> the smallest share of its rows whose loss exceeds the
            limit; see held_weights.seen_shares.
        shown: tensors that it shows one by one; see held_weights.shown_alone.
    """

    distance: float
    moved: float
    follow: float
    limit: float
    mark: Mark
    fresh: float | None = None
    late: int = 0
    mixed: bool = False
    changed: float = 0.0
    cause: str = ""
    held: str = ""
    shares: Mapping[str, float] = field(default_factory=dict)
    shown: tuple[str, ...] = ()

    @property
    def still(self) -> bool:
        """Whether the engine did not change, or as noise does."""
        return self.changed < STILL * self.moved

    @property
    def cached(self) -> bool:
        """Whether tokens never scored before get scores of other weights."""
        return self.fresh is not None and self.fresh < self.distance / 4


@dataclass(frozen=True)
class Part:
    """One part of a group, distinguished by its effect on the trainer's scores.

    Args:
        name: a tensor of the group, one use of a tied tensor, or rows of the vocabulary.
        follow: response slope, as of a Response.
        spread: its standard error, valid for tokens of unequal noise.
        moved: its effect on the tokens that it changes, in noise floors.
    """

    name: str
    follow: float
    spread: float
    moved: float = math.inf

    @property
    def deaf(self) -> bool:
        # clearly: for two parts that multiply each other, a large perturbation shows little of
        # either
        return self.follow + SURE * self.spread < DEAF

    @property
    def partly_deaf(self) -> bool:
        # of what no probe reaches, such as an expert without a token, nothing is sure
        off = max(PART_OFF, 1 / self.moved) if self.moved else math.inf
        return self.follow + SURE * self.spread < 1 - off

    @property
    def unseen(self) -> bool:
        """Whether it changes the trainer's scores too little to determine its slope."""
        return not SURE * self.spread < DEAF


@dataclass(frozen=True)
class Response:
    """How the engine responded when one group of weights was perturbed.

    Args:
        name: the group, such as layers.1.mlp.
        kind: embed, head, tied, norms, attn, mlp, other, adapter or rest.
        follow: response slope: of the engine's change on the trainer's; 1 is synced, 0 is not
            synced; NaN where the trainer's own scores did not change enough to tell.
        spread: its standard error.
        residual: the change that the slope does not explain, in noise floors.
        moved: change of the trainer's own scores, in noise floors.
        size: the perturbation, in standard deviations of the tensors.
        block: the groups that shared its sync; its own name where it had its own.
        parts: each tensor of it, use of a tied one, and range of rows of a vocabulary.
        late: number of further syncs of the same weights until it was synced.
        mixed: some rows or calls were scored with these weights, others with the old ones.
        lost: the parts that are not synced: without them the trainer reproduces the engine.
        scale: the factor with which it does.
        stopped: the sync did not change the engine, although earlier ones did.
        left: the part of the engine's change that is unexplained, in noise floors.
    """

    name: str
    kind: str
    layer: int | None
    follow: float
    spread: float
    residual: float
    moved: float
    size: float
    block: str
    parts: tuple[Part, ...] = ()
    late: int = 0
    mixed: bool = False
    lost: tuple[str, ...] = ()
    scale: Scale | None = None
    stopped: bool = False
    left: float = 0.0

    @property
    def mark(self) -> Mark:
        if math.isnan(self.follow):
            return "unseen"
        if self.explained or any(part.deaf or part.partly_deaf for part in self.parts):
            return "violated"
        if not DEAF <= self.follow <= 1 / DEAF or self.residual >= RESIDUAL_ERROR:
            return "violated"
        off = max(OFF, 1 / max(self.moved, SEEN)) + 2 * self.spread
        beyond = not 1 - off <= self.follow <= 1 / (1 - min(off, DEAF))
        return "warns" if beyond or self.residual >= RESIDUAL_WARNS else "holds"

    @property
    def explained(self) -> bool:
        """Whether a fault was found that reproduces the engine's change on the trainer."""
        return bool(self.late or self.mixed or self.lost or self.scale or self.stopped)

    @property
    def deaf(self) -> bool:
        return self.follow < DEAF

    @property
    def deaf_as_a_whole(self) -> bool:
        """Whether no part of it reaches the engine."""
        return abs(self.follow) < NEAR + 3 * self.spread and self.residual < PLAIN
