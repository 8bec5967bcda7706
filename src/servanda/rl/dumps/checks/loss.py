# The loss: which weights it gave to the trained tokens, if the dump records them; and what the age
# of the weights adds to the mismatch, if it records their versions.

from __future__ import annotations

import numpy as np

from servanda.judgement.clauses.loss_checks import ALL, LossSums, applied_of
from servanda.rl.dumps.checks.base import Finding, Sums, check
from servanda.theory.bounds.applied_weights import error_of
from servanda.theory.bounds.importance_weights import naive
from servanda.theory.stats.lag_split import LagSplit
from servanda.traces.rollouts import LOSS_MASK, LOSS_WEIGHT, Rollouts

VERSION = "weight_version"  # of Rollouts.per_token
# verl's check_rollout_correction_health alarms beyond these: mean weight, effective sample size
MEAN, EFFECTIVE = (0.5, 2.0), 0.3


@check("loss", needs="loss")
class Loss(Sums):
    """Sums of the recorded weights, by step."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, LossSums]] = []

    def add(self, rollouts: Rollouts) -> None:
        trained = rollouts.trained_K
        columns = {
            name: column[trained]
            for name, column in rollouts.per_token.items()
            if name in (LOSS_WEIGHT, LOSS_MASK)
        }
        train_K, infer_K = rollouts.train_K, rollouts.infer_K
        applied = applied_of(
            train_K,
            infer_K,
            error_of(train_K, infer_K),
            columns,
            rollouts.sequence_of(trained),
        )
        if applied is None:
            return
        sums = LossSums.of(applied, naive(), whole=True)
        if self.steps and self.steps[-1][0] == rollouts.step:
            sums = self.steps.pop()[1] + sums
        self.steps.append((rollouts.step, sums))

    def finding(self) -> Finding:
        sums = LossSums.joined([sums for _, sums in self.steps])
        kept, mean, effective = sums.kept_ratio, sums.mean, sums.effective_ratio
        if kept is None:
            return Finding("loss", "ok", "")  # a dump without these columns has no such finding
        if impossible := sums.impossible():
            return Finding("loss", "unsound", impossible)
        numbers = {"kept": kept}
        text = f"the loss dropped {100 * (1 - kept):.2f} % of the trained tokens"
        if mean is None or effective is None:
            return Finding("loss", "ok", text, numbers)
        numbers |= {"mean_weight": mean, "effective": effective}
        named = sums.fits.best(ALL) if sums.fits.n else "all 1: no correction was applied"
        text += f"; mean weight {mean:.3g}, effective sample size {100 * effective:.3g} %"
        text += f"; its weights are {named}" if named else ""
        low, high = MEAN
        odd = not low <= mean <= high or effective < EFFECTIVE
        return Finding("loss", "warning" if odd else "ok", text, numbers)


@check("lag", needs="loss")
class Lag(Sums):
    """Sums of |log ratio| against staleness, by step."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, LagSplit]] = []

    def add(self, rollouts: Rollouts) -> None:
        lag_N = rollouts.per_token.get("staleness")
        if lag_N is None or VERSION not in rollouts.per_token:
            return
        trained = rollouts.trained_K
        names = {name: i for i, name in enumerate(dict.fromkeys(rollouts.group_S))}
        group_S = np.array([names[name] for name in rollouts.group_S])
        group_K = group_S[rollouts.sequence_of(trained)]
        split = LagSplit.of(np.abs(rollouts.ratio_K), lag_N[trained], group_K, [*names])
        if self.steps and self.steps[-1][0] == rollouts.step:
            split = self.steps.pop()[1] + split
        self.steps.append((rollouts.step, split))

    def finding(self) -> Finding:
        line = sum((split for _, split in self.steps), LagSplit()).line
        if line is None:
            return Finding("lag", "ok", "")
        numbers = {"gap_nats": line.gap, "per_update_nats": line.slope}
        return Finding("lag", "ok", str(line), numbers)
