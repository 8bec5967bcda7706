# What came of a drill.

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from servanda.plain import to_plain

Outcome = Literal["holds", "violated", "inconclusive"]
Mark = Literal["holds", "warns", "violated", "unseen"]

EXIT_CODES: dict[str, int] = {"holds": 0, "violated": 1, "inconclusive": 3}

# Limits.  FOLLOW and RESIDUAL are what a group is judged by; the rest says what can be judged.
DEAF = 0.5  # follow below it, or above 1 / DEAF: an error
OFF = 0.9  # follow below it, or above 1 / OFF: a warning
RESIDUAL_ERROR, RESIDUAL_WARNS = 5.0, 3.0  # floors
# the poison: floors, and the share of what the trainer itself moved; noise all through a network
# is felt more by two kernels than weights that were trained
POISON_FLOORS, POISON_SHARE = 8.0, 1 / 8
POISON_NATS = 0.1  # by which the trainer has to move for an engine to be called deaf as a whole
PLAIN = 3.0  # floors; a deaf group that leaves less is deaf as a whole
NEAR, CLOSE = 0.02, 2.0  # from 1, and floors: what lies beyond is looked at more closely
SEEN = 2.0  # floors by which the trainer's own scores have to move, for a group to be judged
# by which a nudge is meant to move them: floors, but no more nats than that, if it is enough floors
AIM, AIM_LEAST, AIM_NATS = 12.0, 3.0, 1.0


@dataclass(frozen=True)
class AsFound:
    """Both sides before anything was changed, and after a sync of unchanged weights; nats.

    Args:
        distance: mean |engine - trainer| as found.
        idle: the same after one sync.
        moved: mean |engine after the sync - engine as found|.
        engine_noise, train_noise: a side against itself, scored twice.
        floor: what the two sides differ by at equal weights: no less is asked of any group.
        cast: the format in which weights seem to travel, where their rounding explains what
            the two sides differ by; "" for none.
    """

    distance: float
    idle: float
    moved: float
    engine_noise: float
    train_noise: float
    floor: float
    cast: str = ""


@dataclass(frozen=True)
class Poisoned:
    """Both sides after all weights were replaced by noise and synced; nats.

    Args:
        distance: mean |engine - trainer|.
        moved: mean change of the trainer's own scores.
        follow: the engine's change by the trainer's, a slope.
        limit: of the distance.
        fresh: the distance on tokens that were not scored before, where it was looked at.
    """

    distance: float
    moved: float
    follow: float
    limit: float
    mark: Mark
    fresh: float | None = None


@dataclass(frozen=True)
class Part:
    """One part of a group, told from the others by what it does to the trainer's scores."""

    name: str
    follow: float
    spread: float

    @property
    def deaf(self) -> bool:
        # surely: of two parts that multiply each other, a large nudge tells little of either
        return self.follow + 3 * self.spread < DEAF


@dataclass(frozen=True)
class Response:
    """How the engine answered when one group of weights was nudged.

    Args:
        name: of the group, such as layers.1.mlp.
        kind: embed, head, tied, norms, attn, mlp, other, adapter or rest.
        follow: slope of the engine's change on the trainer's: 1 follows, 0 is deaf; NaN where
            the trainer's own scores did not move enough to tell.
        spread: its standard error.
        residual: what the slope leaves over, in floors.
        moved: how far the trainer's own scores moved, in floors.
        size: of the nudge, in spreads of the tensors.
        block: the groups that shared its sync; its own name where it had one to itself.
        parts: a closer look at a group that is not right.
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

    @property
    def mark(self) -> Mark:
        if math.isnan(self.follow):
            return "unseen"
        if any(part.deaf for part in self.parts):
            return "violated"
        if not DEAF <= self.follow <= 1 / DEAF or self.residual >= RESIDUAL_ERROR:
            return "violated"
        # sides that are a floor apart at equal weights tell a slope over m floors to 1 / m
        least = min(OFF, 1 - 1 / max(self.moved, SEEN))
        off = not least - 2 * self.spread <= self.follow <= 1 / least + 2 * self.spread
        return "warns" if off or self.residual >= RESIDUAL_WARNS else "holds"

    @property
    def doubtful(self) -> bool:
        """Whether a closer look is due: it need not be wrong."""
        far = abs(self.follow - 1) > NEAR + 3 * self.spread
        return self.mark != "unseen" and (far or self.residual >= CLOSE)

    @property
    def deaf(self) -> bool:
        return self.follow < DEAF

    @property
    def deaf_as_a_whole(self) -> bool:
        """Nothing of it reaches the engine, so there is no part to tell from the others."""
        return abs(self.follow) < NEAR + 3 * self.spread and self.residual < PLAIN


@dataclass(frozen=True)
class Preflight:
    """What came of a drill; `str` is its transcript.

    Args:
        outcome: violated where anything of the sync is wrong; inconclusive where nothing is,
            and a group could not be seen.
        cause: what is wrong, as servanda.preflight.naming.CAUSES names it; "" where nothing is.
        sentence: the outcome in words.
        groups: one response a group, in the order of the module.
        returned: mean |engine - engine before the drill|, nats, after the last sync.
        syncs: how often the sync ran.
        tokens: that were scored by each side each time.
    """

    outcome: Outcome
    cause: str
    sentence: str
    found: AsFound
    poison: Poisoned
    groups: tuple[Response, ...]
    returned: float
    syncs: int
    tokens: int
    seconds: float
    warnings: tuple[str, ...] = field(default=())

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    def to_json(self) -> dict[str, Any]:
        """Plain data: what JSON can hold."""
        return {"schema": 1, **to_plain(self), "exit_code": self.exit_code}

    def __str__(self) -> str:
        from servanda.preflight.telling import told

        return told(self)
