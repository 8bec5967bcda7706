# Copies: a repeated sequence would count as two samples, but is one.
#
# Short responses may be sampled twice, so only long ones with identical sampler logprobs count as
# copies.  Weights change from step to step: identical sampler logprobs at two steps are one sample
# that was reused, and identical logprobs of both sides are one step that was written again.  Memory
# is bounded: if there are too many digests, half of the hash space is dropped, so that a sequence
# and its copy are kept or dropped together.

from __future__ import annotations

import hashlib

import numpy as np

from servanda.rl.dumps.checks.base import Finding, check, share
from servanda.traces.rollouts import Array, Rollouts

LONG_TOKENS = 32
UNSOUND = 0.1  # share of sequences: more than a trainer repeats to fill its last batch
AGAIN = 0.05  # share of sequences: more than are carried over to a later step
REUSED = 0.01  # share of sequences: reported as a replay buffer; each pair is one sample
DISTINCT = 8  # distinct logprobs of a sequence or a step: nearly certain responses may recur
HELD = 1 << 17  # digests of earlier steps


@check("copies")
class Copies:
    """Counts sequences of at least 32 trained tokens that repeat one of their step or an earlier.

    Shorter ones are compared as whole steps: a step whose sequences are all those of another.
    """

    def __init__(self) -> None:
        self.sequences = self.long = self.repeated = self.elsewhere = 0
        self.again = self.reused = 0
        self.first = self.first_again = ""
        self.twice: dict[int, int] = {}  # step -> the earlier one that it repeats
        self._step: int | None = None
        self._group: dict[bytes, str] = {}  # of one step
        self._drawn: dict[int, tuple[int, int]] = {}  # draw -> step, scores
        self._fresh: dict[int, tuple[int, int]] = {}  # of this step
        self._kept = 1 << 64  # draws below it are held
        self._sum = self._values = 0
        self.steps: dict[int, int] = {}  # sum of a step's digests -> the first step that has it

    def follow(self, earlier: Copies) -> None:
        """Continue after the digests of earlier steps."""
        earlier._close()
        self._drawn, self._kept, self.steps = earlier._drawn, earlier._kept, earlier.steps

    def add(self, rollouts: Rollouts) -> None:
        if rollouts.step != self._step:
            self._close()
            self._step = rollouts.step
        starts = rollouts.start_S.tolist()
        for at, (start, length) in enumerate(zip(starts, rollouts.length_S.tolist(), strict=True)):
            part = slice(start, start + length)
            mask_T = rollouts.mask_N[part]
            self.sequences += 1
            trained = int(mask_T.sum())
            if not trained:
                continue
            infer_K = rollouts.logp_infer_N[part][mask_T]
            digest = hashlib.blake2b(rollouts.token_N[part].tobytes(), digest_size=16)
            digest.update(infer_K.tobytes())
            draw = digest.digest()
            digest.update(rollouts.logp_train_N[part][mask_T].tobytes())
            scores = int.from_bytes(digest.digest()[:8], "little")
            distinct = _distinct(infer_K)
            self._values = max(self._values, distinct)
            self._sum = (self._sum + scores) % (1 << 64)  # whatever their order
            if trained < LONG_TOKENS:
                continue
            self.long += 1
            if distinct >= DISTINCT:
                self._across(int.from_bytes(draw[:8], "little"), scores, rollouts, at)
            group = rollouts.group_S[at]
            before = self._group.setdefault(draw, "")
            if before:
                self.repeated += 1
                self.elsewhere += before != group
                self.first = self.first or rollouts.source_S[at]
            else:
                self._group[draw] = group

    def _across(self, draw: int, scores: int, rollouts: Rollouts, at: int) -> None:
        """Compare a sequence with those of earlier steps."""
        if draw >= self._kept:
            return
        before = self._drawn.get(draw)
        if before is None or before[0] == rollouts.step:  # a step that was written again
            self._fresh[draw] = (rollouts.step, scores)
            return
        self.again += before[1] == scores
        self.reused += before[1] != scores
        self.first_again = self.first_again or f"{rollouts.source_S[at]}, of step {before[0]}"

    def _close(self) -> None:
        """Close a step: its digests now belong to an earlier step."""
        self._note()
        self._group = {}
        self._drawn |= self._fresh
        self._fresh, self._sum, self._values = {}, 0, 0
        while len(self._drawn) > HELD:
            self._kept >>= 1
            self._drawn = {d: known for d, known in self._drawn.items() if d < self._kept}

    def _note(self) -> None:
        if self._step is not None and self._values >= DISTINCT:
            before = self.steps.setdefault(self._sum, self._step)
            if before != self._step:
                self.twice[self._step] = before

    def finding(self) -> Finding:
        self._note()
        numbers = {
            "repeated": self.repeated,
            "other_groups": self.elsewhere,
            "again": self.again,
            "reused": self.reused,
            "steps_again": len(self.twice),
        }
        if self.twice:
            step, before = next(iter(self.twice.items()))
            text = (
                f"{len(self.twice):,} steps have the same sequences and logprobs as another (step "
                f"{step} as step {before}), which is impossible after an update: they were written "
                "again, and count twice"
            )
            return Finding("copies", "unsound", text, numbers, self.first_again)
        if self.again:
            text = (
                f"{self.again:,} of {self.long:,} long sequences have the tokens and both logprobs "
                "of one at an earlier step, to the last digit, which is impossible after an "
                "update: they were written again, and count twice"
            )
            state = "unsound" if share(self.again, self.long) > AGAIN else "warning"
            odd = self.again, self.long, AGAIN
            return Finding("copies", state, text, numbers, self.first_again, odd)
        if self.repeated:
            text = (
                f"{self.repeated:,} of {self.sequences:,} sequences repeat another of their step "
                f"to the last digit ({self.elsewhere:,} under another prompt group): they count "
                "twice"
            )
            if share(self.repeated, self.long) <= UNSOUND:
                return Finding("copies", "warning", text, numbers, self.first)
            if not self.elsewhere:
                text += ". Does the sampler repeat itself (deterministic, or seeded alike), or did"
                text += " every rank write the whole batch?"
            else:
                text += ". Did every rank write the whole batch?"
            odd = self.repeated, self.long, UNSOUND
            return Finding("copies", "unsound", text, numbers, self.first, odd)
        if share(self.reused, self.long) > REUSED:
            text = (
                f"{self.reused:,} of {self.long:,} long sequences were sampled at an earlier step "
                "and used again: the sampler's logprobs are the same to the last digit, so each "
                "pair is one sample"
            )
            return Finding("copies", "warning", text, numbers, self.first_again)
        text = "no sequence occurs twice, in a step or across steps"
        return Finding("copies", "ok", text, numbers, odd=(0, self.long, UNSOUND))


def _distinct(logp_K: Array) -> int:
    """The number of distinct logprobs, counted only as far as needed."""
    few = np.unique(logp_K[:LONG_TOKENS]).size
    return few if few >= DISTINCT else np.unique(logp_K).size
