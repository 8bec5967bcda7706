# Ends: responses that stop without an end token.
#
# An aborted rollout that was kept ends neither at an end token nor at the length limit.  Its
# continuation is not in the dump, and if responses are cut *because* the two sides diverge there,
# the remaining data looks better than the kernels are.

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from servanda.rl.dumps.checks.base import Finding, check, share
from servanda.traces.rollouts import Array, Rollouts

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
