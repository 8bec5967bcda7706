# Copies: a sequence that is there twice in a step counts as two draws, and is one.
#
# Short answers may well be drawn twice, so only long ones with the very same sampler's logprobs
# are taken for copies.

from __future__ import annotations

import hashlib

from servanda.rollouts import Rollouts
from servanda.soundness.base import Finding, check, share

LONG_TOKENS = 32
UNSOUND = 0.1  # of the sequences: more than a trainer repeats to fill its last batch


@check("copies")
class Copies:
    """Counts sequences of at least 32 trained tokens that repeat one of the same step."""

    def __init__(self) -> None:
        self.sequences = self.long = self.repeated = self.elsewhere = 0
        self.first = ""
        self._step: int | None = None
        self._group: dict[bytes, str] = {}  # of one step

    def add(self, rollouts: Rollouts) -> None:
        if rollouts.step != self._step:
            self._step, self._group = rollouts.step, {}
        starts = rollouts.start_S.tolist()
        for at, (start, length) in enumerate(zip(starts, rollouts.length_S.tolist(), strict=True)):
            part = slice(start, start + length)
            mask_T = rollouts.mask_N[part]
            self.sequences += 1
            if mask_T.sum() < LONG_TOKENS:
                continue
            self.long += 1
            digest = hashlib.blake2b(rollouts.token_N[part].tobytes(), digest_size=16)
            digest.update(rollouts.logp_infer_N[part][mask_T].tobytes())
            group = rollouts.group_S[at]
            before = self._group.setdefault(digest.digest(), "")
            if before:
                self.repeated += 1
                self.elsewhere += before != group
                self.first = self.first or rollouts.source_S[at]
            else:
                self._group[digest.digest()] = group

    def finding(self) -> Finding:
        numbers = {"repeated": self.repeated, "other_groups": self.elsewhere}
        if not self.repeated:
            return Finding("copies", "ok", "no sequence is there twice in a step", numbers)
        text = (
            f"{self.repeated:,} of {self.sequences:,} sequences repeat another of their step to "
            f"the last digit ({self.elsewhere:,} under another prompt group): they count twice"
        )
        if share(self.repeated, self.long) <= UNSOUND:
            return Finding("copies", "warning", text, numbers, self.first)
        text += ". Did every rank write the whole batch?"
        return Finding("copies", "unsound", text, numbers, self.first)
