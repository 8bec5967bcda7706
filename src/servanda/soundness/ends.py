# Ends: answers that stop where nothing ended them.
#
# A rollout that was aborted and kept as an answer ends neither in a token that ends others nor at
# the length limit.  What it would have gone on with is not in the dump, and where answers are cut
# *because* the two sides diverge there, what is left looks better than the kernels are.

from __future__ import annotations

from collections import Counter

import numpy as np

from servanda.rollouts import Array, Rollouts
from servanda.soundness.base import Finding, check, share

MANY = 0.01  # of the sequences
_OFTEN = 0.02  # of the early ones: an id that ends so many is an end token
_HELD = 1 << 17  # sequences that are looked at


@check("ends")
class Ends:
    """Counts sequences that are shorter than the longest and do not stop at an end token.

    The tokens that most of the shorter sequences stop at are taken for end tokens.
    """

    def __init__(self) -> None:
        self.sequences = 0
        self._last: list[Array] = []  # chunk -> [S, 3]: id, trained tokens, all tokens
        self._places: list[tuple[str, ...]] = []

    def add(self, rollouts: Rollouts) -> None:
        if self.sequences >= _HELD:
            return
        trained_S = np.bincount(rollouts.sequence_N[rollouts.mask_N], minlength=len(rollouts))
        drawn_S = trained_S > 0
        at_N = np.flatnonzero(rollouts.mask_N)
        last_S = at_N[np.cumsum(trained_S)[drawn_S] - 1]
        ends = rollouts.token_N[last_S], trained_S[drawn_S], rollouts.length_S[drawn_S]
        self.sequences += int(drawn_S.sum())
        self._last.append(np.stack(ends, axis=-1))
        self._places.append(tuple(p for p, d in zip(rollouts.source_S, drawn_S, strict=True) if d))

    def finding(self) -> Finding:
        if not self.sequences:
            return Finding("ends", "ok", "no answer", {"sequences": 0, "cut": 0})
        last_S3 = np.concatenate(self._last)
        early_S = (last_S3[:, 1:] < last_S3[:, 1:].max(axis=0)).all(axis=-1)
        count = Counter(last_S3[early_S, 0].tolist())
        early = count.total()
        ends = [token for token, n in count.most_common() if n > _OFTEN * early]
        numbers = {"sequences": self.sequences, "early": early, "cut": 0}
        if not early:
            return Finding("ends", "ok", "every answer is as long as the longest", numbers)
        if count[ends[0]] <= early / 2 if ends else True:
            text = (
                "no token ends most of the shorter answers (the loss mask may leave it out): "
                "whether some were aborted cannot be told"
            )
            return Finding("ends", "ok", text, numbers)
        cut_S = early_S & ~np.isin(last_S3[:, 0], ends)
        cut = int(cut_S.sum())
        numbers["cut"] = cut
        if not cut:
            return Finding("ends", "ok", "every shorter answer stops at an end token", numbers)
        text = (
            f"{cut:,} of {self.sequences:,} answers are shorter than the longest and do not stop "
            f"at an end token (id {ends[0]} ends {count[ends[0]]:,}): where rollouts were aborted "
            "because the two sides differ, what is left looks better than the kernels are"
        )
        first = [p for places in self._places for p in places][int(cut_S.argmax())]
        state = "warning" if share(cut, self.sequences) > MANY else "ok"
        return Finding("ends", state, text, numbers, first)
