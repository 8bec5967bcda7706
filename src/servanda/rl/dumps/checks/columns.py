# What each column may hold: logprobs and the loss mask, side by side.

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from servanda.report.format import count
from servanda.rl.dumps.checks.base import LEAST, Finding, FirstPlace, Sums, check, share
from servanda.theory.divergence.precision import CAPTURES, capture_floor, exact_in
from servanda.traces.rollouts import Array, Rollouts, Turns

# Logprob coverage: the share of trained tokens with both logprobs.  Absent is not zero.

_KNOWN_WARN, _KNOWN = 0.9999, 0.999


@check("coverage")
class Coverage(Sums):
    """Counts trained tokens without a logprob; NaN is missing, an infinity is a value."""

    def __init__(self) -> None:
        self.tokens = self.train = self.infer = self.both = 0
        self.first = FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        train_K, infer_K = np.isnan(rollouts.train_K), np.isnan(rollouts.infer_K)
        missing_K, tokens = train_K | infer_K, len(train_K)
        self.tokens += tokens
        self.train += tokens - int(np.count_nonzero(train_K))
        self.infer += tokens - int(np.count_nonzero(infer_K))
        self.both += tokens - int(np.count_nonzero(missing_K))
        self.first.add(rollouts, missing_K)

    def finding(self) -> Finding:
        if not self.tokens:
            return Finding("coverage", "unsound", "the dump has no trained token")
        covered = share(self.both, self.tokens)
        tokens = count(self.tokens, "trained token")
        text = f"both logprobs present on {100 * covered:.2f} % of {tokens}"
        if self.both < self.tokens:
            text = (
                f"both logprobs present on {self.both:,} of {tokens} "
                f"(the trainer's on {self.train:,}, the sampler's on {self.infer:,})"
            )
        state = "unsound" if covered < _KNOWN else "warning" if covered < _KNOWN_WARN else "ok"
        numbers = {"tokens": self.tokens, "both": self.both, "share": covered}
        return Finding("coverage", state, text, numbers, self.first.place)


# Precision: the format of each side's recorded logprobs, and the effect of its rounding.


_BY_BITS = tuple(sorted(CAPTURES, key=CAPTURES.__getitem__))
_STEPS = (
    *((2.0**-k, f"1/{2**k}") for k in range(9)),
    *((10.0**-k, f"{10.0**-k:g}") for k in (1, 2, 3)),
)
_VALUES = 64  # fewest for a grid


class Grid(Sums):
    """The steps of which all logprobs of a side so far are multiples; the coarsest one counts."""

    def __init__(self) -> None:
        self.steps = dict(_STEPS)
        self.values = 0  # that are not 0

    def add(self, logp_K: Array) -> None:
        if not self.steps:
            return
        known_K = logp_K[np.isfinite(logp_K) & (logp_K != 0)]
        self.values += len(known_K)
        for some_K in (known_K[:_VALUES], known_K):  # most often, some are none
            self.steps = {s: name for s, name in self.steps.items() if _on(some_K / s)}

    def join(self, later: Grid) -> None:
        self.values += later.values
        self.steps = {s: name for s, name in self.steps.items() if s in later.steps}

    @property
    def step(self) -> float:
        """0.0 if there is none, or too few values to know one."""
        return max(self.steps, default=0.0) if self.values >= _VALUES else 0.0

    @property
    def text(self) -> str:
        return f"multiples of {self.steps[self.step]}" if self.step else ""


def _on(number_K: Array) -> bool:
    """Whether all are whole, as far as float32 knows them."""
    return bool(np.all(np.abs(number_K - np.rint(number_K)) <= 1e-6 * np.abs(number_K) + 1e-9))


@check("precision")
class Precision:
    """The formats that represent all logprobs of a side so far; the coarsest one counts."""

    def __init__(self) -> None:
        self.sides: dict[str, tuple[str, ...]] = {"train": (), "infer": ()}  # () without values
        self.grids = {"train": Grid(), "infer": Grid()}

    def add(self, rollouts: Rollouts) -> None:
        for side, logp_K in (("train", rollouts.train_K), ("infer", rollouts.infer_K)):
            self._restrict(side, exact_in(logp_K, self.sides[side] or _BY_BITS))
            self.grids[side].add(logp_K)

    def join(self, later: Precision) -> None:
        for side, formats in later.sides.items():
            self._restrict(side, formats)
            self.grids[side].join(later.grids[side])

    def _restrict(self, side: str, formats: tuple[str, ...]) -> None:
        if formats:
            known = self.sides[side] or formats
            self.sides[side] = tuple(name for name in known if name in formats)

    def finding(self) -> Finding:
        train, infer = (next(iter(formats), "") for formats in self.sides.values())
        if not train or not infer:
            return Finding("precision", "warning", "no logprob to tell the precision by")
        numbers = {
            "train_bits": float(CAPTURES[train]),
            "infer_bits": float(CAPTURES[infer]),
        }
        text = f"logprobs recorded in {train} (trainer) and {infer} (sampler)"
        grids = {side: self.grids[side] for side in self.grids if self.grids[side].step}
        if grids:
            named = {"train": "trainer", "infer": "sampler"}
            step = max(grid.step for grid in grids.values())
            text = " and ".join(f"all of the {named[s]}'s are {grids[s].text}" for s in grids)
            # a uniform error of half a step has a variance of step^2 / 12, and k3 is half of it
            text = (
                f"logprobs are rounded: {text}, which alone gives a k3 of {step**2 / 24:.1e} nats"
            )
            return Finding("precision", "warning", text, numbers)
        worse = min(train, infer, key=CAPTURES.__getitem__)
        if CAPTURES[worse] >= CAPTURES["float32"]:
            return Finding("precision", "ok", text, numbers)
        floor = capture_floor("k3_nats", worse)
        text += f": rounding to {worse} alone gives a k3 of {floor:.1e} nats"
        return Finding("precision", "warning", text, numbers)


# Values that a logprob cannot have.


_ROUNDING_NATS = 1e-3  # rounding error of a fused kernel in bfloat16 above 0


@check("values")
class Values(Sums):
    """Counts logprobs of trained tokens that are -inf or above 0.

    An importer converts a number below -10,000, which no softmax gives, to -inf.
    """

    def __init__(self) -> None:
        self.tokens = self.above = self.infinite = 0
        self.impossible = 0  # sampled tokens with reported probability 0
        self.sides = {"trainer": 0, "sampler": 0}
        self.grids = {"trainer": Grid(), "sampler": Grid()}
        self.highest = -np.inf
        self.first = FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        self.tokens += len(rollouts.trained_K)
        for side, logp_K in zip(self.sides, (rollouts.train_K, rollouts.infer_K), strict=True):
            self.grids[side].add(logp_K)
            odd_K = (logp_K > _ROUNDING_NATS) | (logp_K == -np.inf)
            if not odd_K.any():
                continue
            found = logp_K[odd_K]
            infinite, above = int((found < 0).sum()), found[found > 0]
            self.infinite += infinite
            if side == "sampler":
                self.impossible += infinite
            self.above += len(above)
            self.sides[side] += len(above)
            self.highest = max(self.highest, float(above.max(initial=-np.inf)))
            self.first.add(rollouts, odd_K)

    def join(self, later: Values) -> None:
        highest = max(self.highest, later.highest)
        super().join(later)
        self.highest = highest

    def finding(self) -> Finding:
        numbers = {
            "above": self.above,
            "infinite": self.infinite,
            "impossible": self.impossible,
        }
        if not self.above and not self.infinite:
            return Finding("values", "ok", "every logprob is finite and at most 0", numbers)
        parts = []
        if self.above:
            sides = ", ".join(f"{side} {n:,}" for side, n in self.sides.items() if n)
            part = f"{self.above:,} logprobs are above 0 ({sides}; up to {self.highest:.3g} nats)"
            if max(self.sides.values()) > self.tokens / 2:
                part += ": losses, which have the other sign?"
            else:
                part += ", which no distribution has"
            for side, n in self.sides.items():
                if n and (text := self.grids[side].text):
                    part += f"; all values of the {side} are {text}, as of logits in 16 bits"
            parts.append(part)
        if self.impossible:
            parts.append(
                f"the sampler gives {self.impossible:,} of its own tokens a logprob of -inf or "
                "below -10,000: they count as missing, and their weights are infinite"
            )
        if others := self.infinite - self.impossible:
            parts.append(f"{others:,} {'more ' if parts else 'logprobs '}are infinite")
        state = "unsound" if self.above else "warning"
        return Finding("values", state, ", ".join(parts), numbers, self.first.place)


# Zeros: a missing logprob that was written as 0.0 looks like certainty.
#
# If one kernel is certain of a token, the other nearly is.  Zero on one side and less than 1/e on
# the other is no rounding.  A writer that omits one token per response omits it at a fixed place,
# so the ends and beginnings of turns are checked separately.


FAR_NATS = -1.0
_FILLED = 0.001
_IN_RUNS = 0.5  # share of the zeros
SYSTEMATIC = 0.02  # at one place: share of distinguishable tokens, of which there must be LEAST
NEAR_NATS = -0.2  # on the other side: at one place even a likely token counts
TIMES = 10  # smallest ratio to the rate elsewhere
SIDES = ("sampler", "trainer")
_KINDS = (*SIDES, "both")


def _in_runs(rollouts: Rollouts, zero_K: Array) -> int:
    """How many trained tokens with a 0 are next to another one, within a sequence."""
    at_N = np.flatnonzero(rollouts.mask_N.astype(bool))[zero_K]
    next_M = np.diff(at_N) == 1
    next_M &= np.diff(rollouts.sequence_N[at_N]) == 0
    beside = np.zeros(len(at_N), dtype=bool)
    beside[:-1] |= next_M
    beside[1:] |= next_M
    return int(beside.sum())


@dataclass
class _Place(Sums):
    """Tokens at one place of a turn with an uncertain other side, and those written as 0.

    Of "both": those whose logprobs are equal in every bit.
    """

    unsure: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_KINDS, 0))
    zero: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_KINDS, 0))


@check("zeros")
class Zeros(Sums):
    """Counts trained tokens that are exactly 0 on one side and far below on the other."""

    def __init__(self) -> None:
        self.tokens = self.train = self.infer = 0
        self.in_runs = 0  # of those that the sampler has as 0: beside another one
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
        filled = dict.fromkeys(SIDES, np.zeros(len(rollouts.trained_K), dtype=bool))
        sides = (rollouts.infer_K, rollouts.train_K)
        for side, own_K, other_K in zip(SIDES, sides, sides[::-1], strict=True):
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
        unsure_K = rollouts.infer_K < NEAR_NATS
        equal_K = unsure_K & (rollouts.infer_K == rollouts.train_K)
        for name, n in _counted(unsure_K, places).items():
            self.places[name].unsure["both"] += n
        for name, n in _counted(equal_K, places).items():
            self.places[name].zero["both"] += n
        self.train += int(np.count_nonzero(filled["trainer"]))
        self.infer += int(np.count_nonzero(filled["sampler"]))
        self.in_runs += _in_runs(rollouts, filled["sampler"])
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
        """(place, side) with zeros, or of "both" equal values, far more often than elsewhere."""
        for side in _KINDS:
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
            first = self.at_ends.place if place[1] != "both" else ""
            return Finding("zeros", "unsound", self._text(*place), numbers, first)
        odd = filled, self.tokens, _FILLED
        if not filled:
            return Finding(
                "zeros", "ok", "no missing logprob was written as 0", {"tokens": 0}, odd=odd
            )
        reason = "missing values that were written as 0"
        if self.in_runs > _IN_RUNS * filled:
            reason += (
                ", or tokens that the engine did not sample, as most are beside another one: does "
                "the loss mask cover tool results?"
            )
        text = (
            f"{filled:,} trained tokens have a logprob of exactly 0 on one side and below "
            f"{FAR_NATS:g} on the other (trainer {self.train:,}, sampler {self.infer:,}): {reason}"
        )
        state = "unsound" if share(filled, self.tokens) > _FILLED else "warning"
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
        if side == "both":
            return (
                f"the logprobs of both sides are equal in every bit at the {what}, {zero:,} of "
                f"{total:,} times, and hardly ever elsewhere: one was copied there, for a token "
                "that the sampler did not draw"
            )
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


# Piles: one value on many tokens, under several prompts, is no logprob of theirs.
#
# A certain token has a logprob near 0, on both sides, and more tokens are nearly certain than
# exactly so, unless both sides apply one filter.  Zeros without such neighbours were filled in if
# they come in runs alone, or at the ends: padding, or text that was not sampled.
# Other values of one side are a bound or a placeholder.  Columns with few values repeat them by
# themselves, so those are not examined.


CERTAIN_NATS = 1e-3
_NATURAL = 0.1  # least ratio of nearly certain tokens to exactly certain ones
# of the zeros that would be in runs of one or two if each token were one by itself: of filled text
_SHORT = 0.2
_PILE = 0.005  # share of tokens with one value of a side
_SAME, _FILLED_BOTH = 0.01, 0.1  # share of tokens with one value of both: a warning, unsound
_SAMPLE = 4096  # tokens of a chunk
_LEAST_SAMPLE = 200
_PROMPTS_OF_PILE = 3
_DISTINCT = 0.25  # least ratio of values to tokens
_BINS = 1 << 17  # of ids
_MOSTLY = 0.5  # share of the zeros that such ids have


@check("piles")
class Piles(Sums):
    """Counts tokens that are exactly 0 on both sides, and the most frequent values of a sample."""

    def __init__(self) -> None:
        self.tokens = self.sampled = self.zero = self.near = 0
        self.sequences = self.ended = 0  # whose last two trained tokens are one id, 0 on both sides
        self.short = 0  # zeros on both sides in runs of one or two
        self.values: dict[str, Counter[float]] = {s: Counter() for s in (*SIDES, "both")}
        self.grids = {side: Grid() for side in SIDES}
        self.coarse = 0
        self.zeros_of: Counter[int] = Counter()  # id -> tokens that are 0 on both sides
        self.other = np.zeros(_BINS, bool)  # ids with another value
        self.first = FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        infer_K, train_K = rollouts.infer_K, rollouts.train_K
        zero_K = (infer_K == 0) & (train_K == 0)
        near_K = (infer_K > -CERTAIN_NATS) & (train_K > -CERTAIN_NATS) & ~zero_K
        self.tokens += len(zero_K)
        self.zero += int(np.count_nonzero(zero_K))
        self.near += int(np.count_nonzero(near_K))
        last_S = np.cumsum(rollouts.trained_S)[rollouts.trained_S > 1] - 1
        token_K = rollouts.token_N[rollouts.trained_K]
        alike_S = token_K[last_S] == token_K[last_S - 1]  # one id, such as that of padding
        self.sequences += int((rollouts.trained_S > 0).sum())
        self.ended += int((zero_K[last_S] & zero_K[last_S - 1] & alike_S).sum())
        self._by_id(rollouts, zero_K)
        self._by_run(rollouts, zero_K)
        self.first.add(rollouts, zero_K)
        at_M = np.arange(0, len(zero_K), max(1, -(-len(zero_K) // _SAMPLE)))
        self.sampled += len(at_M)
        infer_M, train_M = infer_K[at_M], train_K[at_M]
        self.coarse += any(map(coarse, (infer_M, train_M)))
        for side, grid in self.grids.items():
            grid.add(infer_M if side == "sampler" else train_M)
        names = {name: i for i, name in enumerate(dict.fromkeys(rollouts.group_S))}
        group_S = np.array([names[name] for name in rollouts.group_S], np.int64)
        group_M = group_S[rollouts.sequence_of(rollouts.trained_K[at_M])]
        both_M = np.where(infer_M == train_M, infer_M, np.nan)
        for side, value_M in zip(self.values, (infer_M, train_M, both_M), strict=True):
            self.values[side] += _piled(value_M, group_M)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "other": np.packbits(self.other)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "other": np.unpackbits(state["other"]).astype(bool)})

    def _by_id(self, rollouts: Rollouts, zero_K: Array) -> None:
        id_K = rollouts.token_N[rollouts.trained_K].astype(np.int64) & (_BINS - 1)
        self.other[id_K[~zero_K]] = True
        self.zeros_of.update(id_K[zero_K].tolist())

    def _by_run(self, rollouts: Rollouts, zero_K: Array) -> None:
        if zero_K.any():  # runs of zeros, and how many are of one or two
            at_K = rollouts.trained_K
            next_K = (np.diff(at_K) == 1) & (np.diff(rollouts.sequence_of(at_K)) == 0)
            goes_on_K = np.append(False, next_K & zero_K[1:] & zero_K[:-1])
            run_G = np.bincount(np.cumsum(~goes_on_K)[zero_K])
            self.short += int(run_G[run_G <= 2].sum())

    def _of_ids(self) -> tuple[int, int]:
        """Ids that are 0 on both sides wherever they occur, and their tokens."""
        always = [n for i, n in self.zeros_of.items() if n >= LEAST and not self.other[i]]
        return len(always), sum(always)

    def finding(self) -> Finding:
        return self._zeros() or self._values() or Finding("piles", "ok", "")

    def _zeros(self) -> Finding | None:
        tokens, (ids, of_ids) = count(self.tokens, "trained token"), self._of_ids()
        zero = share(self.zero, self.tokens)
        numbers = {"zero": self.zero, "near": self.near, "ended": self.ended}
        if ids >= LEAST and of_ids > _SAME * self.tokens and of_ids > _MOSTLY * self.zero:
            text = (
                f"{of_ids:,} of {tokens} are of {ids:,} ids that have a logprob of exactly 0 on "
                "both sides wherever they occur: their values were filled in (a part of the "
                "vocabulary that one device holds?)"
            )
            return Finding("piles", "unsound", text, numbers, self.first.place)
        if zero <= _SAME or self.near >= _NATURAL * self.zero:
            return None
        ended = self.ended > self.sequences / 2
        runs = self.short < _SHORT * (1 - zero) ** 2 * (1 + 2 * zero) * self.zero
        text = (
            f"{self.zero:,} of {tokens} have a logprob of exactly 0 on both sides, and only "
            f"{self.near:,} others are nearly certain: "
        )
        if not ended and not runs:
            text += "a filter that both sides apply, or values that were filled in"
            return Finding("piles", "warning", text, numbers, self.first.place)
        text += "padding, or text that was not sampled, under the loss mask"
        if ended:
            text += f" (at the end of {self.ended:,} of {self.sequences:,} sequences)"
        state = "unsound" if ended or zero > _FILLED_BOTH else "warning"
        return Finding("piles", state, text, numbers, self.first.place)

    def _values(self) -> Finding | None:
        grids = any(grid.step for grid in self.grids.values())
        if self.coarse or grids or self.sampled < _LEAST_SAMPLE:
            return None
        for side, least in (("both", _SAME), *((side, _PILE) for side in SIDES)):
            for value, n in self.values[side].most_common(1):
                if (often := share(n, self.sampled)) <= least:
                    continue
                text = (
                    f"{100 * often:.2g} % of {whose(side)} logprobs are exactly {value:.6g}, "
                    "under several prompts: a bound, or a value that was filled in"
                )
                state = "unsound" if side == "both" and often > _FILLED_BOTH else "warning"
                return Finding("piles", state, text, {"share": often})
        return None


def whose(side: str) -> str:
    return "both sides'" if side == "both" else f"the {side}'s"


def coarse(logp_M: Array) -> bool:
    """Whether a column has few values by itself: a small format, or a law with few outcomes."""
    formats = exact_in(logp_M)
    if formats and CAPTURES[formats[0]] < CAPTURES["float32"]:
        return True
    unsure_M = logp_M[logp_M < -CERTAIN_NATS]
    _, n_V = np.unique(unsure_M, return_counts=True)
    others = len(unsure_M) - int(n_V.max(initial=0))  # without the most frequent one
    return len(n_V) < _DISTINCT * others


def _piled(value_M: Array, group_M: Array) -> Counter[float]:
    """How often each value occurs that several prompts have; near 0 every value is common."""
    kept_M = np.isfinite(value_M) & (value_M < -CERTAIN_NATS)
    value_M, group_M = value_M[kept_M], group_M[kept_M]
    value_V, at_M, n_V = np.unique(value_M, return_inverse=True, return_counts=True)
    found: Counter[float] = Counter()
    for v in np.flatnonzero(n_V >= _PROMPTS_OF_PILE):
        if len(np.unique(group_M[at_M == v])) >= _PROMPTS_OF_PILE:
            found[float(value_V[v])] = int(n_V[v])
    return found


# The loss mask: a mask that begins with the sequence covers the prompt, or the dump has no prompts;
# and sequences without trained tokens.


_PROMPTS = 0.001  # share of sequences that begin with a trained token
_EMPTY = 0.5  # share of sequences without a trained token


@check("prompts", needs="texts", asks="whether the loss mask covers a prompt")
class Prompts(Sums):
    """Counts sequences whose first token is trained."""

    def __init__(self) -> None:
        self.sequences = self.trained = 0
        self.first = FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        begins_S = rollouts.length_S > 0
        begins_S[begins_S] = rollouts.mask_N[rollouts.start_S[begins_S]]
        self.sequences += len(rollouts)
        self.trained += int(begins_S.sum())
        self.first.add_sequence(rollouts, begins_S)

    def finding(self) -> Finding:
        numbers = {"sequences": self.sequences, "trained": self.trained}
        odd = self.trained, self.sequences, _PROMPTS
        if not self.trained:
            return Finding("prompts", "ok", "no loss mask covers a prompt", numbers, odd=odd)
        if self.trained == self.sequences:
            text = (
                "every sequence begins with a trained token: the dump has no prompts, or its loss "
                "mask covers them"
            )
            return Finding("prompts", "warning", text, numbers, self.first.place)
        text = (
            f"{self.trained:,} of {self.sequences:,} sequences begin with a trained token: their "
            "loss mask covers the prompt"
        )
        state = "unsound" if share(self.trained, self.sequences) > _PROMPTS else "warning"
        return Finding("prompts", state, text, numbers, self.first.place, odd)


@check("trained", needs="rows")
class Trained(Sums):
    """Counts sequences without a trained token: filtered ones, or a broken mask."""

    def __init__(self) -> None:
        self.sequences = self.empty = self.removed = 0
        self.first = FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        empty_S = rollouts.trained_S == 0
        self.sequences += len(rollouts)
        self.empty += int(empty_S.sum())
        self.first.add_sequence(rollouts, empty_S)
        if rollouts.removed_N is not None:
            told_N = np.isfinite(rollouts.logp_train_N) & np.isfinite(rollouts.logp_infer_N)
            scored_N = rollouts.removed_N & told_N
            self.removed += len(np.unique(rollouts.sequence_N[scored_N]))

    def finding(self) -> Finding:
        numbers = {"sequences": self.sequences, "empty": self.empty}
        if not self.empty:
            return Finding("trained", "ok", "every sequence has trained tokens", numbers)
        text = f"{self.empty:,} of {self.sequences:,} sequences have no trained token"
        if self.removed:
            numbers["removed"] = self.removed
            text += f"; {self.removed:,} of them have both logprobs: a filter removed them"
        state = "warning" if share(self.empty, self.sequences) > _EMPTY else "ok"
        return Finding("trained", state, text, numbers, self.first.place)
