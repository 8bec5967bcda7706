# Copies: a repeated sequence would count as two samples, but is one.
#
# Short responses may be sampled twice, so only long ones with identical logprobs count as copies.
# Weights change from step to step: identical sampler logprobs at two steps are one sample that was
# reused, and identical logprobs of both sides are one step that was written again.  A logprob
# depends on everything before its token, so that a column of other tokens, or of the same answer
# after another prompt, was copied.  Memory is bounded: if there are too many digests, half of the
# hash space is dropped, so that a sequence and its copy are kept or dropped together.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from servanda.rl.dumps.checks.base import Finding, FirstPlace, check, digest, share
from servanda.traces.rollouts import Array, Rollouts

LONG_TOKENS = 32
UNSOUND = 0.1  # share of sequences: more than a trainer repeats to fill its last batch
AGAIN = 0.05  # share of sequences: more than are carried over to a later step
REUSED = 0.01  # share of sequences: reported as a replay buffer; each pair is one sample
FOREIGN = 0.01  # share of sequences with a column of another one: chance gives none
DISTINCT = 8  # distinct logprobs of a sequence or a step: nearly certain responses may recur
HELD = 1 << 18  # columns that are compared, two of a sequence

# number in the dump, step, digest of the tokens, of both columns, place; whether of the trainer
_Sequence = tuple[int, int, int, int, str, bool]


@dataclass
class _Repeats:
    """Counts of sequences with a column of an earlier one.

    Args:
        again: of an earlier step, with the same tokens and both columns; reused: with another of
            the trainer.
        sampler, trainer: with other tokens, or after another prompt.
        at, first: number and place of the first one.
    """

    again: int = 0
    reused: int = 0
    sampler: int = 0
    trainer: int = 0
    at: float = math.inf
    first: str = ""

    def add(self, sequence: _Sequence, first: _Sequence) -> None:
        (at, step, words, scores, place, trainer), (_, before, as_written, as_before, *_) = (
            sequence,
            first,
        )
        if words != as_written:
            self.trainer += trainer
            self.sampler += not trainer
        elif trainer or step == before:  # or a step that was written again
            return
        else:
            self.again += scores == as_before
            self.reused += scores != as_before
        if at < self.at:
            self.at, self.first = at, f"{place}, of step {before}"

    def join(self, later: _Repeats, after: int) -> None:
        """Add those of the sequences after the first `after`."""
        for name in ("again", "reused", "sampler", "trainer"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        if after + later.at < self.at:
            self.at, self.first = after + later.at, later.first


@check("copies")
class Copies:
    """Counts sequences of at least 32 trained tokens that repeat one of their step or an earlier.

    Shorter ones are compared as whole steps: a step whose sequences are all those of another.
    """

    def __init__(self) -> None:
        self.sequences = self.long = self.repeated = self.elsewhere = 0
        self.first = FirstPlace()
        self.steps: dict[int, int] = {}  # sum of a step's digests -> the first step that has it
        self.twice: dict[int, int] = {}  # step -> the earlier one that it repeats
        self._step: int | None = None
        self._group: dict[tuple[int, int], str | None] = {}  # of one step
        self._sum = self._values = 0
        self._drawn: dict[int, _Sequence] = {}  # digest of a column -> its first sequence
        self._more: list[tuple[int, _Sequence]] = []  # later sequences with these columns
        self._kept = 1 << 64  # digests below it are held
        self._dropped = _Repeats()  # repeats of columns that are no longer held

    def add(self, rollouts: Rollouts) -> None:
        if rollouts.step != self._step:
            self._close()
            self._step = rollouts.step
        token_N = np.ascontiguousarray(rollouts.token_N)
        # all zeros are one value, and all NaN
        infer_K, train_K = ((x + 0.0).view(np.int64) for x in (rollouts.infer_K, rollouts.train_K))
        lengths = zip(rollouts.length_S.tolist(), rollouts.trained_S.tolist(), strict=True)
        end = last = 0
        for at, (length, trained) in enumerate(lengths):
            part, end = slice(end, end + length), end + length
            own, last = slice(last, last + trained), last + trained
            if not trained:
                continue
            words, infer, train = map(digest, (token_N[part], infer_K[own], train_K[own]))
            scores = digest(np.array([infer, train], np.uint64))
            distinct = _distinct(infer_K[own])
            self._values = max(self._values, distinct)
            self._sum = (self._sum + scores) % (1 << 64)  # whatever their order
            if trained < LONG_TOKENS:
                continue
            self.long += 1
            place, group = rollouts.source_S[at], rollouts.group_S[at]
            known = self.sequences + at, rollouts.step, words, scores, place
            if distinct >= DISTINCT:
                self._hold(infer, (*known, False))
            if _distinct(train_K[own]) >= DISTINCT:
                self._hold(train ^ 1, (*known, True))  # no key of a sampler's column
            before = self._group.setdefault((words, infer), None)
            if before is None:
                self._group[words, infer] = group
            else:
                self.repeated += 1
                self.elsewhere += before != group
                self.first.place = self.first.place or place
        self.sequences += len(rollouts)
        self._drop()

    def join(self, later: Copies) -> None:
        self._close()
        later._close()
        for draw, (at, step, words, scores, place, trainer) in chain(
            later._drawn.items(), later._more
        ):
            known = self.sequences + at, step, words, scores, place, trainer
            self._hold(draw, known)
        self._dropped.join(later._dropped, self.sequences)
        if later._kept < self._kept:
            self._keep(later._kept)
        self._drop()
        for name in ("sequences", "long", "repeated", "elsewhere"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.first.join(later.first)
        self.twice |= later._twice(self.steps)
        for sum_, step in later.steps.items():
            self.steps.setdefault(sum_, step)

    def _hold(self, draw: int, sequence: _Sequence) -> None:
        if draw in self._drawn:
            self._more.append((draw, sequence))
        elif draw < self._kept:
            self._drawn[draw] = sequence

    def _drop(self) -> None:
        while len(self._drawn) + len(self._more) > HELD:
            self._keep(self._kept >> 1)

    def _keep(self, kept: int) -> None:
        """Hold only the draws below a number; repeats of the others are counted now."""
        self._kept = kept
        for draw, sequence in self._more:
            if draw >= kept:
                self._dropped.add(sequence, self._drawn[draw])
        self._more = [held for held in self._more if held[0] < kept]
        self._drawn = {draw: held for draw, held in self._drawn.items() if draw < kept}

    def _close(self) -> None:
        """Close a step: its digests now belong to an earlier step."""
        self._note()
        self._step, self._group, self._sum, self._values = None, {}, 0, 0

    def _note(self) -> None:
        if self._step is not None and self._values >= DISTINCT:
            before = self.steps.setdefault(self._sum, self._step)
            if before != self._step:
                self.twice[self._step] = before

    def _twice(self, earlier: Mapping[int, int]) -> dict[int, int]:
        """Step -> the step that it repeats, after steps with these sums."""
        known = {s: earlier[sum_] for sum_, s in self.steps.items() if earlier.get(sum_, s) != s}
        return known | {step: known.get(first, first) for step, first in self.twice.items()}

    def _repeats(self, earlier: Mapping[int, _Sequence]) -> _Repeats:
        """The sequences that occur at an earlier step, after these draws."""
        found = replace(self._dropped)
        held = chain(self._drawn.items(), self._more) if earlier else self._more
        for draw, sequence in held:
            found.add(sequence, earlier.get(draw) or self._drawn[draw])
        return found

    def finding(self, before: Copies | None = None) -> Finding:
        """The finding for these steps, after those of `before`."""
        self._note()
        twice = self._twice({} if before is None else before.steps)
        repeats = self._repeats({} if before is None else before._drawn)
        numbers = {
            "repeated": self.repeated,
            "other_groups": self.elsewhere,
            "again": repeats.again,
            "reused": repeats.reused,
            "foreign": max(repeats.sampler, repeats.trainer),
            "steps_again": len(twice),
        }
        if twice:
            step, first = min(twice.items())
            text = (
                f"{len(twice):,} steps have the same sequences and logprobs as another (step "
                f"{step} as step {first}), which is impossible after an update: they were written "
                "again, and count twice"
            )
            return Finding("copies", "unsound", text, numbers, repeats.first)
        if foreign := max(repeats.sampler, repeats.trainer):
            sides = {"sampler": repeats.sampler, "trainer": repeats.trainer}
            named = " and ".join(f"the {side}'s on {n:,}" for side, n in sides.items() if n)
            text = (
                f"on {foreign:,} of {self.long:,} long sequences the logprobs are those of another "
                f"sequence, to the last digit, though the tokens or the prompt differ ({named}): a "
                "column was copied, or a buffer was written again"
            )
            state = "unsound" if foreign > max(1, FOREIGN * self.long) else "warning"
            odd = foreign, self.long, FOREIGN
            return Finding("copies", state, text, numbers, repeats.first, odd)
        if repeats.again:
            text = (
                f"{repeats.again:,} of {self.long:,} long sequences have the tokens and both "
                "logprobs of one at an earlier step, to the last digit, which is impossible after "
                "an update: they were written again, and count twice"
            )
            state = "unsound" if share(repeats.again, self.long) > AGAIN else "warning"
            odd = repeats.again, self.long, AGAIN
            return Finding("copies", state, text, numbers, repeats.first, odd)
        if self.repeated:
            text = (
                f"{self.repeated:,} of {self.sequences:,} sequences repeat another of their step "
                f"to the last digit ({self.elsewhere:,} under another prompt group): they count "
                "twice"
            )
            if share(self.repeated, self.long) <= UNSOUND:
                return Finding("copies", "warning", text, numbers, self.first.place)
            if not self.elsewhere:
                text += ". Does the sampler repeat itself (deterministic, or seeded alike), or did"
                text += " every rank write the whole batch?"
            else:
                text += ". Did every rank write the whole batch?"
            odd = self.repeated, self.long, UNSOUND
            return Finding("copies", "unsound", text, numbers, self.first.place, odd)
        if share(repeats.reused, self.long) > REUSED:
            text = (
                f"{repeats.reused:,} of {self.long:,} long sequences were sampled at an earlier "
                "step and used again: the sampler's logprobs are the same to the last digit, so "
                "each pair is one sample"
            )
            return Finding("copies", "warning", text, numbers, repeats.first)
        text = "no sequence occurs twice, in a step or across steps"
        return Finding("copies", "ok", text, numbers, odd=(0, self.long, UNSOUND))


def _distinct(bits_K: Array) -> int:
    """How many values a column has, counted only as far as needed."""
    distinct = len(set(bits_K[:LONG_TOKENS].tolist()))
    return distinct if distinct >= DISTINCT else len(set(bits_K.tolist()))


# Ends: responses that stop without an end token.
#
# An aborted rollout that was kept ends neither at an end token nor at the length limit.  Its
# continuation is not in the dump, and if responses are cut *because* the two sides diverge there,
# the remaining data looks better than the kernels are.


MANY = 0.01  # of the sequences
_OFTEN = 0.02  # least share of the shorter responses that an end token ends
_MOST, _TIMES = 0.1, 5  # that of the most frequent one; and least ratio of rates, ends to elsewhere
_HELD = 1 << 17  # sequences that are examined
_IDS = 1 << 18  # ids of larger vocabularies are counted together


@check("ends", needs="texts", asks="whether responses stop at an end token")
class Ends:
    """Counts sequences shorter than the longest of their step that do not stop at an end token.

    A token at which most of the shorter sequences stop, or many if it is rare within them, counts
    as an end token.
    """

    def __init__(self) -> None:
        self.sequences = 0
        self._last: list[Array] = []  # chunk -> [S, 4]: step, trained tokens, all tokens, id
        self._drawn = np.zeros(0, dtype=np.int64)  # how often each id was drawn
        self._places: list[tuple[str, ...]] = []

    def add(self, rollouts: Rollouts) -> None:
        if self.sequences >= _HELD:
            return
        trained_S = rollouts.trained_S
        drawn_S = trained_S > 0
        last_S = rollouts.token_N[rollouts.trained_K[np.cumsum(trained_S)[drawn_S] - 1]]
        step_S = np.full(len(last_S), rollouts.step)
        ends = step_S, trained_S[drawn_S], rollouts.length_S[drawn_S], last_S
        self.sequences += len(last_S)
        self._draw(np.bincount(_ids(rollouts.token_N[rollouts.trained_K])))
        self._last.append(np.stack(ends, axis=-1))
        self._places.append(tuple(p for p, d in zip(rollouts.source_S, drawn_S, strict=True) if d))

    def join(self, later: Ends) -> None:
        for last, places in zip(later._last, later._places, strict=True):
            if self.sequences >= _HELD:
                return
            self.sequences += len(last)
            self._last.append(last)
            self._places.append(places)
        self._draw(later._drawn)

    def __getstate__(self) -> dict[str, Any]:
        fewest = np.min_scalar_type(int(self._drawn.max(initial=0)))
        return {**vars(self), "_drawn": self._drawn.astype(fewest)}  # an eighth of the bytes

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "_drawn": state["_drawn"].astype(np.int64)})

    def _draw(self, count_D: Array) -> None:
        if len(count_D) > len(self._drawn):
            self._drawn = np.pad(self._drawn, (0, len(count_D) - len(self._drawn)))
        self._drawn[: len(count_D)] += count_D

    def finding(self) -> Finding:
        if not self.sequences:
            return Finding("ends", "ok", "no answer", {"sequences": 0, "cut": 0})
        last_S4 = np.concatenate(self._last)
        _, step_S = np.unique(last_S4[:, 0], return_inverse=True)
        longest = np.zeros((step_S.max() + 1, 2), dtype=np.int64)
        np.maximum.at(longest, step_S, last_S4[:, 1:3])
        early_S = (last_S4[:, 1:3] < longest[step_S]).all(axis=-1)
        count = Counter(last_S4[early_S, 3].tolist())
        early = count.total()
        numbers = {"sequences": self.sequences, "early": early}
        if not early:
            text = "every response is as long as the longest"
            return Finding("ends", "ok", text, {**numbers, "cut": 0})
        ends = [token for token, n in count.most_common() if n > _OFTEN * early]
        if not ends or count[ends[0]] <= early / 2:  # then only tokens rare within responses
            often_E = self._drawn[_ids(np.array(ends))] / self._drawn.sum() if ends else ()
            ends = [e for e, n in zip(ends, often_E, strict=True) if count[e] / early >= _TIMES * n]
        if not ends or count[ends[0]] < _MOST * early:
            numbers["untold"] = early
            text = (
                f"no token ends many of the {early:,} shorter responses (the loss mask may leave "
                "it out), so this check cannot tell whether some were aborted"
            )
            return Finding("ends", "ok", text, numbers)
        cut_S = early_S & ~np.isin(last_S4[:, 3], ends)
        cut = int(cut_S.sum())
        numbers["cut"] = cut
        if not cut:
            return Finding("ends", "ok", "every shorter response stops at an end token", numbers)
        text = (
            f"{cut:,} of {self.sequences:,} responses are shorter than the longest and do not stop "
            f"at an end token (id {ends[0]} ends {count[ends[0]]:,}): if rollouts were aborted "
            "because the two sides differ, the dump looks better than the kernels are"
        )
        first = [p for places in self._places for p in places][int(cut_S.argmax())]
        state = "warning" if share(cut, self.sequences) > MANY else "ok"
        return Finding("ends", state, text, numbers, first)


def _ids(token_K: Array) -> Array:
    return token_K.astype(np.int64, copy=False) & (_IDS - 1)
