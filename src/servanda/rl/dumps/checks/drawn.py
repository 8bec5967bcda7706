# The tokens that the mask leaves out of responses, and the responses that a group lacks.

from __future__ import annotations

from collections import Counter

import numpy as np

from servanda.report.format import count
from servanda.rl.dumps.checks.base import LEAST, Finding, FirstPlace, Sums, check
from servanda.traces.rollouts import Array, Rollouts

# Left out: tokens inside a response that both sides scored, and that are not trained.
#
# A filter that masks tokens on which the sides differ leaves data that looks better than they are.

_LEFT = 50  # fewest tokens
_APART = 0.9  # share of them that differ by more than every trained token of their chunk
_TIMES = 3.0  # ratio of the means


@check("left_out")
class LeftOut(Sums):
    """Sums of |log ratio| of trained tokens, and of others within a response."""

    def __init__(self) -> None:
        self.trained = self.left = self.beyond = 0
        self.trained_nats = self.left_nats = 0.0
        self.first = FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        mask_N = rollouts.mask_N.astype(bool)
        ratio_K = np.abs(rollouts.ratio_K)
        ratio_K = ratio_K[np.isfinite(ratio_K)]
        self.trained += len(ratio_K)
        self.trained_nats += float(ratio_K.sum())
        if not len(ratio_K) or rollouts.turns.number_T.max() < 2:
            return
        # between the first trained token and the last
        inside_N = _between(rollouts, mask_N) & ~mask_N
        at_N = np.flatnonzero(inside_N)
        train_N, infer_N = rollouts.logp_train_N[at_N], rollouts.logp_infer_N[at_N]
        scored = np.isfinite(train_N) & np.isfinite(infer_N) & (train_N != 0) & (infer_N != 0)
        apart_N = np.abs(train_N - infer_N)[scored]
        self.left += len(apart_N)
        self.left_nats += float(apart_N.sum())
        self.beyond += int((apart_N > ratio_K.max()).sum())
        if scored.any():
            sequence = int(rollouts.sequence_of(at_N[scored][:1])[0])
            self.first.place = self.first.place or rollouts.source_S[sequence]

    def finding(self) -> Finding:
        numbers = {"left_out": self.left, "beyond": self.beyond}
        if self.left < _LEFT or not self.trained_nats:
            return Finding("left_out", "ok", "", numbers)
        times = (self.left_nats / self.left) / (self.trained_nats / self.trained)
        text = (
            f"{count(self.left, 'token')} inside the responses have both logprobs and are not "
            f"trained; their mean |log ratio| is {times:.2g} times that of the trained ones"
        )
        if self.beyond > _APART * self.left:
            text += (
                ", and nearly each is further apart than all of those: a filter by the mismatch "
                "was applied to the mask, so the rest shows nothing (write the mask before it)"
            )
            return Finding("left_out", "unsound", text, numbers, self.first.place)
        state = "warning" if times > _TIMES else "ok"
        return Finding("left_out", state, text if state != "ok" else "", numbers, self.first.place)


def _between(rollouts: Rollouts, mask_N: Array) -> Array:
    """Whether a token is behind the first trained token of its sequence, and before the last."""
    before_N = np.cumsum(mask_N)
    start_S, some_S = rollouts.start_S, rollouts.length_S > 0
    base_S = np.zeros(len(rollouts), np.int64)
    base_S[some_S] = before_N[start_S[some_S]] - mask_N[start_S[some_S]]
    before_N = before_N - base_S[rollouts.sequence_N]
    return (before_N > 0) & (before_N < rollouts.trained_S[rollouts.sequence_N])


# Group sizes: responses that are missing from a group were left out.

_USUAL, _FEWEST = 0.05, 3  # share of the groups that have the whole size, and their number


@check("groups", needs="texts")
class GroupSizes(Sums):
    """The sizes of prompt groups, of each step, in all and by the values of each label."""

    def __init__(self) -> None:
        self.sizes: dict[str, Counter[tuple[str, int]]] = {"": Counter()}  # label -> (value, size)
        self._step: int | None = None
        self._open: dict[str, tuple[int, dict[str, str]]] = {}

    def add(self, rollouts: Rollouts) -> None:
        if rollouts.step != self._step:
            self._close()
            self._step = rollouts.step
        for s, group in enumerate(rollouts.group_S):
            n, labels = self._open.get(group) or (0, {k: v[s] for k, v in rollouts.labels.items()})
            self._open[group] = n + 1, labels

    def _close(self) -> None:
        for n, labels in self._open.values():
            for name, value in {"": "", **labels}.items():
                self.sizes.setdefault(name, Counter())[value, n] += 1
        self._step, self._open = None, {}

    def join(self, later: GroupSizes) -> None:
        self._close()
        later._close()
        for name, sizes in later.sizes.items():
            self.sizes.setdefault(name, Counter()).update(sizes)

    def finding(self) -> Finding:
        self._close()
        groups = self.sizes[""].total()
        found = [_incomplete(sizes) for sizes in self.sizes.values() if sizes.total() == groups]
        fewer, usual = min(found, default=(0, 0))
        if fewer < LEAST:
            return Finding("groups", "ok", "")
        text = (
            f"{fewer:,} of {count(groups, 'prompt group')} have fewer responses than the {usual} "
            "of others: if some were left out by their reward, their length or their mismatch, "
            "the dump is a selection"
        )
        return Finding("groups", "warning", text, {"groups": groups, "incomplete": fewer})


def _incomplete(sizes: Counter[tuple[str, int]]) -> tuple[int, int]:
    """How many groups are smaller than the largest of their value of a label, and that size.

    A size that a few groups have is no rule.
    """
    of_value: dict[str, Counter[int]] = {}
    for (value, size), n in sizes.items():
        of_value.setdefault(value, Counter())[size] += n
    fewer, largest = 0, 0
    for own in of_value.values():
        size = max(own)
        if size > 1 and own[size] >= max(_FEWEST, _USUAL * own.total()):
            fewer += own.total() - own[size]
            largest = max(largest, size)
    return fewer, largest
