# Zeros: a missing logprob that was written as 0.0 looks like certainty.
#
# If one kernel is certain of a token, the other nearly is.  Zero on one side and less than 1/e on
# the other is no rounding.  A writer that omits one token per response omits it at a fixed place,
# so the ends and beginnings of turns are checked separately.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from servanda.rl.dumps.checks.base import LEAST, Finding, FirstPlace, Sums, check, share
from servanda.traces.rollouts import Array, Rollouts, Turns

FAR_NATS = -1.0
UNSOUND = 0.001
SYSTEMATIC = 0.02  # at one place: share of distinguishable tokens, of which there must be LEAST
NEAR_NATS = -0.2  # on the other side: at one place even a likely token counts
TIMES = 10  # smallest ratio to the rate elsewhere
_SIDES = ("sampler", "trainer")


@dataclass
class _Place(Sums):
    """Tokens at one place of a turn with an uncertain other side, and those written as 0."""

    unsure: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SIDES, 0))
    zero: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SIDES, 0))


@check("zeros")
class Zeros(Sums):
    """Counts trained tokens that are exactly 0 on one side and far below on the other."""

    def __init__(self) -> None:
        self.tokens = self.train = self.infer = 0
        self.places = {name: _Place() for name in ("end", "turn", "start", "rest")}
        self.runs = self.early = self.late = 0
        self.first, self.at_ends = FirstPlace(), FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        self.tokens += len(rollouts.trained_K)
        turns = rollouts.turns
        first_T, last_T = turns.trained_T, turns.trained_T + turns.length_T - 1
        places = {
            "end": last_T[turns.final_T],
            "turn": last_T[~turns.final_T],
            "start": first_T[turns.length_T > 1],
        }
        filled = dict.fromkeys(_SIDES, np.zeros(len(rollouts.trained_K), dtype=bool))
        sides = (rollouts.infer_K, rollouts.train_K)
        for side, own_K, other_K in zip(_SIDES, sides, sides[::-1], strict=True):
            unsure_K = other_K < NEAR_NATS
            zero_K = unsure_K & (own_K == 0)
            for name, n in _counted(unsure_K, places).items():
                self.places[name].unsure[side] += n
            if not zero_K.any():
                continue
            for name, n in _counted(zero_K, places).items():
                self.places[name].zero[side] += n
            at = np.concatenate([at_T[zero_K[at_T]] for at_T in places.values()])
            if len(at):
                self.at_ends.add_token(rollouts, int(at.min()))
            filled[side] = zero_K & (other_K < FAR_NATS)
        self.train += int(np.count_nonzero(filled["trainer"]))
        self.infer += int(np.count_nonzero(filled["sampler"]))
        self.first.add(rollouts, filled["trainer"] | filled["sampler"])
        self._beside(rollouts, turns)

    def _beside(self, rollouts: Rollouts, turns: Turns) -> None:
        """Count single sampled tokens beside a turn: the mask is off by one.

        A scored prompt has more of them.
        """
        last_T = turns.first_T + turns.length_T - 1
        sequence_T = rollouts.sequence_of(turns.first_T)
        opens_T = turns.first_T == rollouts.start_S[sequence_T]
        closes_T = last_T == (rollouts.start_S + rollouts.length_S)[sequence_T] - 1
        sides = ("late", turns.first_T, -1, opens_T), ("early", last_T, 1, closes_T)
        for name, at_T, way, edge_T in sides:
            one_T = _drawn(rollouts, at_T + way) & ~_drawn(rollouts, at_T + 2 * way) & ~edge_T
            setattr(self, name, getattr(self, name) + int(one_T.sum()))
        self.runs += len(last_T)

    def systematic(self) -> tuple[str, str] | None:
        """(place, side) with zeros far more often than elsewhere."""
        for side in _SIDES:
            rest = self.places["rest"]
            # very short responses have no tokens elsewhere
            usual = (rest.zero[side] + 1) / (rest.unsure[side] + 1) if rest.unsure[side] else 0.0
            for name in ("end", "turn", "start"):
                place = self.places[name]
                zero, unsure = place.zero[side], place.unsure[side]
                if zero >= LEAST and zero > SYSTEMATIC * unsure and zero > TIMES * usual * unsure:
                    return name, side
        return None

    def finding(self) -> Finding:
        filled = self.train + self.infer
        numbers = {"tokens": filled, "train": self.train, "infer": self.infer}
        if (place := self.systematic()) is not None:
            return Finding("zeros", "unsound", self._text(*place), numbers, self.at_ends.place)
        odd = filled, self.tokens, UNSOUND
        if not filled:
            return Finding(
                "zeros", "ok", "no missing logprob was written as 0", {"tokens": 0}, odd=odd
            )
        text = (
            f"{filled:,} trained tokens have a logprob of exactly 0 on one side and below "
            f"{FAR_NATS:g} on the other (trainer {self.train:,}, sampler {self.infer:,}): "
            "missing values that were written as 0"
        )
        state = "unsound" if share(filled, self.tokens) > UNSOUND else "warning"
        return Finding("zeros", state, text, numbers, self.first.place, odd)

    def _text(self, name: str, side: str) -> str:
        place = self.places[name]
        zero, total = place.zero[side], place.unsure[side]
        turns = sum(self.places[n].zero[side] for n in ("end", "turn"))
        what = "last trained token of sequences"
        if name == "start":
            what = "first trained token of turns"
        elif turns > zero:
            what, zero = "last trained token of turns", turns
            total = sum(self.places[n].unsure[side] for n in ("end", "turn"))
        text = f"the {side} has a logprob of exactly 0 at the {what}, {zero:,} of {total:,} times"
        if name != "start" and self.late > self.runs / 2:
            return f"{text}: the loss mask is off by one, it begins and ends one token late"
        if name == "start" and self.early > self.runs / 2:
            return f"{text}: the loss mask is off by one, it begins and ends one token early"
        if name == "start":
            return f"{text}: the value was not recorded, or the loss mask begins one token early"
        return (
            f"{text}: the end token's logprob was not recorded and written as 0, or the loss mask "
            "ends one token late"
        )


def _counted(flag_K: Array, places: Mapping[str, Array]) -> dict[str, int]:
    """The number of flagged tokens at each place."""
    counts = {name: int(np.count_nonzero(flag_K[at_T])) for name, at_T in places.items()}
    return {**counts, "rest": int(np.count_nonzero(flag_K)) - sum(counts.values())}


def _drawn(rollouts: Rollouts, at_T: Array) -> Array:
    """Whether tokens were sampled but are not trained, [T]."""
    inside_T = (at_T >= 0) & (at_T < len(rollouts.mask_N))
    at_T = np.where(inside_T, at_T, 0)
    return inside_T & ~rollouts.mask_N[at_T] & (rollouts.logp_infer_N[at_T] < 0)
