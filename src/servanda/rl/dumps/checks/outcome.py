# Columns that know the outcome: advantages that contradict the rewards, and trainers whose logprobs
# were taken after the update.
#
# Within a prompt group.  A, advantage and reward of a response; logprobs from before an update are
# the same whatever the reward.

from __future__ import annotations

import math

import numpy as np

from servanda.rl.dumps.checks.base import Finding, StepSums, Sums, by_squares, check, share
from servanda.traces.rollouts import Rollouts

_CONTRADICT, _PAIRS = 0.25, 100  # share of the pairs of a group with another reward; fewest pairs
_KNOWN, _ERRORS, _GROUPS = 0.3, 5.0, 20  # correlation, Student's t, and groups
_HEAD = 4  # fewest tokens that all responses of a group have


@check("outcome", needs="texts")
class Outcome(Sums):
    """Sums over pairs of responses of a group, and over groups, by step."""

    def __init__(self) -> None:
        self.pairs = self.against = 0
        # groups, sums of A d, of (A d)^2, of A^2 and of d^2, each centred in its group
        self.sums = StepSums()
        self.stale = 0  # chunks with tokens of older weights

    def add(self, rollouts: Rollouts) -> None:
        advantage_N = rollouts.per_token.get("advantage")
        if advantage_N is None:
            return
        self.stale += int((rollouts.per_token.get("staleness", np.zeros(1)) > 0).any())
        n_S = rollouts.trained_S
        first_S = np.cumsum(n_S) - n_S
        reward_S = rollouts.per_sequence.get("reward", np.full(len(rollouts), np.nan))
        members: dict[str, list[int]] = {}
        for s in np.flatnonzero(n_S):
            members.setdefault(rollouts.group_S[s], []).append(int(s))
        advantage_K, ratio_K = advantage_N[rollouts.trained_K], rollouts.ratio_K
        sums = np.zeros(5)
        for own in members.values():
            if len(own) < 2:
                continue
            advantage = np.array(
                [advantage_K[first_S[s] : first_S[s] + n_S[s]].mean() for s in own]
            )
            if not np.isfinite(advantage).all():
                continue
            self._order(reward_S[own], advantage)
            head = min(int(n_S[own].min()), 1 << 12)  # of equal length, for a gap may grow
            gap = np.array([ratio_K[first_S[s] : first_S[s] + head].mean() for s in own])
            if head < _HEAD or not np.isfinite(gap).all():
                continue
            advantage, gap = advantage - advantage.mean(), gap - gap.mean()
            both = float(advantage @ gap)
            sums += 1, both, both**2, advantage @ advantage, gap @ gap
        self.sums.add(rollouts.step, sums)

    def _order(self, reward: np.ndarray, advantage: np.ndarray) -> None:
        """Count the pairs with another reward, and those with the opposite advantage."""
        first, second = np.triu_indices(len(reward), 1)
        higher = np.sign(reward[first] - reward[second])
        better = np.sign(advantage[first] - advantage[second])
        known = np.isfinite(higher) & (higher != 0) & (better != 0)
        self.pairs += int(known.sum())
        self.against += int((better == -higher)[known].sum())

    def finding(self) -> Finding:
        groups, both, square, advantage, gap = self.sums.total(np.zeros(5)).tolist()
        r = both / math.sqrt(advantage * gap) if advantage * gap > 0 else 0.0
        _, t = by_squares(both, square, groups)
        numbers = {"groups": groups, "correlation": r, "t": t}
        if groups >= _GROUPS and abs(r) > _KNOWN and abs(t) > _ERRORS:
            text = (
                f"the log ratio of a response goes with its advantage (correlation {r:.2g} within "
                f"{groups:,.0f} prompt groups, t = {t:+.1f}): the trainer's logprobs were taken "
                "after an update on these responses, or the sides differ at what is rewarded"
            )
            return Finding("outcome", "warning" if self.stale else "unsound", text, numbers)
        if self.pairs >= _PAIRS and self.against > _CONTRADICT * self.pairs:
            text = (
                f"in {100 * share(self.against, self.pairs):.2g} % of {self.pairs:,} pairs of a "
                "prompt group the response with the larger reward has the smaller advantage: are "
                "the advantages those of these rows?"
            )
            return Finding("outcome", "warning", text, numbers)
        return Finding("outcome", "ok", "", numbers)
