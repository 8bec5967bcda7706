# Zeros: a missing logprob that was written as 0.0 looks like certainty.
#
# If one kernel is certain of a token, the other nearly is.  Zero on one side and less than 1/e on
# the other is no rounding.  A writer that omits one token per response omits it at a fixed place,
# so the ends and beginnings of turns are checked separately.

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from servanda.rl.dumps.checks.base import LEAST, Finding, FirstPlace, check, share
from servanda.traces.rollouts import Array, Rollouts

FAR_NATS = -1.0
UNSOUND = 0.001
SYSTEMATIC = 0.02  # at one place: share of distinguishable tokens, of which there must be LEAST
NEAR_NATS = -0.2  # on the other side: at one place even a likely token counts
TIMES = 10  # smallest ratio to the rate elsewhere
_SIDES = ("sampler", "trainer")


@dataclass
class _Place:
    """Tokens at one place of a turn with an uncertain other side, and those written as 0."""

    unsure: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SIDES, 0))
    zero: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SIDES, 0))


@check("zeros")
class Zeros:
    """Counts trained tokens that are exactly 0 on one side and far below on the other."""

    def __init__(self) -> None:
        self.tokens = self.train = self.infer = 0
        self.places = {name: _Place() for name in ("end", "turn", "start", "rest")}
        self.runs = self.early = self.late = 0
        self.first, self.at_ends = FirstPlace(), FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        train_N, infer_N, mask_N = rollouts.logp_train_N, rollouts.logp_infer_N, rollouts.mask_N
        filled_train_N = mask_N & (train_N == 0) & (infer_N < FAR_NATS)
        filled_infer_N = mask_N & (infer_N == 0) & (train_N < FAR_NATS)
        self.tokens += int(mask_N.sum())
        self.train += int(filled_train_N.sum())
        self.infer += int(filled_infer_N.sum())
        self.first.add(rollouts, filled_train_N | filled_infer_N)
        self._by_place(rollouts)

    def _by_place(self, rollouts: Rollouts) -> None:
        mask_N, size = rollouts.mask_N, len(rollouts.mask_N)
        if size < 2:
            return
        ends = np.cumsum(rollouts.length_S) - 1
        opens_N, closes_N = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
        opens_N[rollouts.start_S[rollouts.length_S > 0]] = True
        closes_N[ends[rollouts.length_S > 0]] = True
        first_N = rollouts.turn_token_N == 0
        last_N = mask_N & (closes_N | ~np.r_[mask_N[1:], False])
        end_N = last_N & (rollouts.turn_N == _last_turn(rollouts))
        where = {"end": end_N, "turn": last_N & ~end_N, "start": first_N & ~last_N}
        where["rest"] = mask_N & ~first_N & ~last_N
        sides = {
            "sampler": (rollouts.logp_infer_N, rollouts.logp_train_N),
            "trainer": (rollouts.logp_train_N, rollouts.logp_infer_N),
        }
        for side, (own_N, other_N) in sides.items():
            unsure_N = mask_N & (other_N < NEAR_NATS)
            zero_N = unsure_N & (own_N == 0)
            for name, at_N in where.items():
                self.places[name].unsure[side] += int((unsure_N & at_N).sum())
                self.places[name].zero[side] += int((zero_N & at_N).sum())
            self.at_ends.add(rollouts, zero_N & ~where["rest"])
        # one sampled token next to a turn: the mask is off by one (a scored prompt has more of
        # them)
        drawn_N = ~mask_N & (rollouts.logp_infer_N < 0)
        two = np.zeros(2, dtype=bool)
        before_N = np.r_[two[:1], drawn_N[:-1]] & ~np.r_[two, drawn_N[:-2]] & ~opens_N
        after_N = np.r_[drawn_N[1:], two[:1]] & ~np.r_[drawn_N[2:], two] & ~closes_N
        self.runs += int(first_N.sum())
        self.late += int((first_N & before_N).sum())
        self.early += int((last_N & after_N).sum())

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


def _last_turn(rollouts: Rollouts) -> Array:
    """The last turn of the sequence of each token, [N]."""
    turn_N = rollouts.turn_N
    last_S = np.zeros(len(rollouts), dtype=turn_N.dtype)
    np.maximum.at(last_S, rollouts.sequence_N, turn_N)
    return np.repeat(last_S, rollouts.length_S)
