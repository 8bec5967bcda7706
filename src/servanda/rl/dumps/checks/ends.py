# Ends: responses that stop without an end token.
#
# An aborted rollout that was kept ends neither at an end token nor at the length limit.  Its
# continuation is not in the dump, and if responses are cut *because* the two sides diverge there,
# the remaining data looks better than the kernels are.

from __future__ import annotations

from collections import Counter

import numpy as np

from servanda.rl.dumps.checks.base import Finding, check, share
from servanda.traces.rollouts import Array, Rollouts

MANY = 0.01  # of the sequences
_OFTEN = 0.02  # least share of the shorter responses that an end token ends
_MOST, _TIMES = 0.1, 5  # that of the most frequent one; and least ratio of rates, ends to elsewhere
_HELD = 1 << 17  # sequences that are examined
_APART = 64  # counts of chunks that are kept before they are added up


def _together(counts: list[Array]) -> Array:
    """Counts by id of several chunks, [2, ids] each, as one."""
    id_N, count_N = np.concatenate(counts, axis=-1)
    id_D, at_N = np.unique(id_N, return_inverse=True)
    return np.stack([id_D, np.bincount(at_N, count_N).astype(np.int64)])


@check("ends")
class Ends:
    """Counts sequences shorter than the longest of their step that do not stop at an end token.

    A token at which most of the shorter sequences stop, or many if it is rare within them, counts
    as an end token.
    """

    def __init__(self) -> None:
        self.sequences = 0
        self._last: list[Array] = []  # chunk -> [S, 4]: step, trained tokens, all tokens, id
        self._drawn: list[Array] = []  # [2, ids]: ids, and how often each was drawn; of some chunks
        self._places: list[tuple[str, ...]] = []

    def add(self, rollouts: Rollouts) -> None:
        if self.sequences >= _HELD:
            return
        trained_S = np.bincount(rollouts.sequence_N[rollouts.mask_N], minlength=len(rollouts))
        drawn_S = trained_S > 0
        at_N = np.flatnonzero(rollouts.mask_N)
        last_S = at_N[np.cumsum(trained_S)[drawn_S] - 1]
        step_S = np.full(len(last_S), rollouts.step)
        ends = step_S, trained_S[drawn_S], rollouts.length_S[drawn_S], rollouts.token_N[last_S]
        self.sequences += int(drawn_S.sum())
        drawn = np.unique(rollouts.token_N[rollouts.mask_N], return_counts=True)
        self._drawn.append(np.stack(drawn))
        if len(self._drawn) > _APART:
            self._drawn = [_together(self._drawn)]
        self._last.append(np.stack(ends, axis=-1))
        self._places.append(tuple(p for p, d in zip(rollouts.source_S, drawn_S, strict=True) if d))

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
            id_D, drawn_D = _together(self._drawn)
            often = dict(zip(id_D.tolist(), (drawn_D / drawn_D.sum()).tolist(), strict=True))
            ends = [token for token in ends if count[token] / early >= _TIMES * often[token]]
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
