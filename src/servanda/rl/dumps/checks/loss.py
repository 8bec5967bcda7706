# The loss: which weights it gave to the trained tokens, if the dump records them; and what the age
# of the weights adds to the mismatch, if it records their versions.

from __future__ import annotations

import numpy as np

from servanda.judgement.clauses.loss_checks import ALL, LossSums, applied_of
from servanda.rl.dumps.checks.base import Finding, FirstPlace, StepSums, Sums, check
from servanda.theory.bounds.applied_weights import error_of
from servanda.theory.bounds.importance_weights import naive
from servanda.theory.stats.lag_split import LagSplit
from servanda.traces.rollouts import LOSS_MASK, LOSS_WEIGHT, UPDATE, VERSIONS, Array, Rollouts

VERSION = "weight_version"  # of Rollouts.per_token
ENGINES = ("replica", "engine")  # labels of one engine
# verl's check_rollout_correction_health alarms beyond these: mean weight, effective sample size
MEAN, EFFECTIVE = (0.5, 2.0), 0.3
OUTSIDE = 0.001  # share of the tokens in the loss that are not trained
FALLS = 0.01  # share of the responses whose versions fall
BACK = 3  # updates by which an engine's newest version falls
GROWN = 1.5  # ratio of the last third of the steps to the first
LEAST_STEPS = 6
APART, TOKENS = 2.0, 200  # ratio of the mean |log ratio| of mixed responses; fewest tokens
UPDATES = 64  # most updates of a rollout that are told apart; later ones count as the last
MOVED, ERRORS = 1.3, 5.0  # ratio of the last update to the first, and standard errors between them


@check("loss", needs="loss")
class Loss(Sums):
    """Sums of the recorded weights, by step."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, LossSums]] = []
        self.used = self.untrained = 0  # tokens with a weight in the loss; of these, not trained
        self.first = FirstPlace()

    def add(self, rollouts: Rollouts) -> None:
        if (loss_N := rollouts.per_token.get(LOSS_MASK)) is not None:
            begun_N = np.cumsum(rollouts.mask_N)  # behind the first trained token of a sequence
            before_S = np.append(0, begun_N)[rollouts.start_S]
            used_N = (np.nan_to_num(loss_N) != 0) & (begun_N > before_S[rollouts.sequence_N])
            other_N = np.flatnonzero(used_N & ~rollouts.mask_N)
            self.used += int(used_N.sum())
            self.untrained += len(other_N)
            if len(other_N) and not self.first.place:
                self.first.place = rollouts.source_S[int(rollouts.sequence_of(other_N[0]))]
        trained = rollouts.trained_K
        columns = {
            name: column[trained]
            for name, column in rollouts.per_token.items()
            if name in (LOSS_WEIGHT, LOSS_MASK)
        }
        if not columns:
            return
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
        if self.untrained > OUTSIDE * self.used:
            text = (
                f"the loss used {self.untrained:,} tokens that the mask leaves out, of "
                f"{self.used:,}: the two masks are shifted, or of other rows"
            )
            odd = self.untrained, self.used, OUTSIDE
            return Finding("loss", "unsound", text, {}, self.first.place, odd)
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
    """Sums of |log ratio| against staleness, by step; and the versions that occur."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, LagSplit]] = []
        self.versions: list[tuple[int, float, float]] = []  # of each chunk: step, least, largest
        self.oldest: list[float] = []  # of each chunk: the largest staleness
        self.gap = StepSums()  # sum of |d|, and tokens

    def add(self, rollouts: Rollouts) -> None:
        lag_N, version_N = (rollouts.per_token.get(name) for name in ("staleness", VERSION))
        if lag_N is None or version_N is None:
            return
        trained = rollouts.trained_K
        known = np.isfinite(version_N[trained]) & np.isfinite(rollouts.ratio_K)
        if known.any():
            version, ratio = version_N[trained][known], np.abs(rollouts.ratio_K[known])
            ends = float(version.min()), float(version.max())
            self.versions.append((rollouts.step, *ends))
            self.oldest.append(float(np.nanmax(lag_N[trained][known])))
            self.gap.add(rollouts.step, np.array([ratio.sum(), len(ratio)]))
        names = {name: i for i, name in enumerate(dict.fromkeys(rollouts.group_S))}
        group_S = np.array([names[name] for name in rollouts.group_S])
        group_K = group_S[rollouts.sequence_of(trained)]
        split = LagSplit.of(np.abs(rollouts.ratio_K), lag_N[trained], group_K, [*names])
        if self.steps and self.steps[-1][0] == rollouts.step:
            split = self.steps.pop()[1] + split
        self.steps.append((rollouts.step, split))

    def _constant(self) -> Finding | None:
        """That no token tells the age of its weights, if all steps have one version."""
        steps = [step for step, _, _ in self.versions]
        low = min((least for _, least, _ in self.versions), default=0.0)
        if len({*steps}) < 2 or any(most != low for _, _, most in self.versions):
            return None
        text = (
            f"every token of steps {min(steps)} to {max(steps)} was sampled by version {low:g}: "
            "the engine's weights never changed, or the version is not counted, so the age of the "
            "weights is unknown"
        )
        if grown := self._grown():
            text += (
                f"; the mean |log ratio| grows all the same, {grown}: if the trainer was updated, "
                "no sync reached the engine, and if it was not (a learning rate of 0), look at the "
                "engine's caches and at the lengths"
            )
        return Finding("lag", "warning", text, {"constant": low})

    def _grown(self) -> str:
        """From which mean |log ratio| to which it grows over the steps; "" if it does not."""
        mean_S = [total / n for total, n in self.gap.steps]
        third = max(1, len(mean_S) // 3)
        first, last = float(np.mean(mean_S[:third])), float(np.mean(mean_S[-third:]))
        grown = len(mean_S) >= LEAST_STEPS and last > GROWN * first
        return f"from {first:.2g} to {last:.2g} nats" if grown else ""

    def finding(self) -> Finding:
        if constant := self._constant():
            return constant
        if self.oldest and max(self.oldest) == 0 and (grown := self._grown()):
            text = (
                "every token is said to be of the newest weights, and the mean |log ratio| grows "
                f"{grown}: does the version tell what the engine has?"
            )
            return Finding("lag", "warning", text)
        line = sum((split for _, split in self.steps), LagSplit()).line
        if line is None:
            return Finding("lag", "ok", "")
        numbers = {"gap_nats": line.gap, "per_update_nats": line.slope}
        return Finding("lag", "ok", str(line), numbers)


@check("versions", needs="loss")
class Versions(Sums):
    """Counts responses that several weight versions sampled, and their |log ratio|, by step."""

    def __init__(self) -> None:
        self.sums = StepSums()  # [2, 3]: responses, trained tokens and sum of |d|; mixed ones last
        self.largest: list[int] = []
        self.known = self.falls = 0  # sequences with versions of their tokens, and with older later
        self.ahead = 0  # sequences with a version that the trainer of their step does not have
        self.first, self.first_fall, self.first_ahead = FirstPlace(), FirstPlace(), FirstPlace()
        # of each chunk and engine: its name, the step, its newest version, sum of |d|, and tokens
        self.engines: list[tuple[str, int, float, float, int]] = []

    def add(self, rollouts: Rollouts) -> None:
        if (version_N := rollouts.per_token.get(VERSION)) is not None:
            version_K, of_K = (
                version_N[rollouts.trained_K],
                rollouts.sequence_of(rollouts.trained_K),
            )
            ahead_S = np.bincount(of_K[version_K > rollouts.step], minlength=len(rollouts)) > 0
            self.ahead += int(ahead_S.sum())
            self.first_ahead.add_sequence(rollouts, ahead_S)
            self._engines(rollouts, version_K, of_K)
            fall_K = (np.diff(version_K) < 0) & (np.diff(of_K) == 0)
            fall_S = np.bincount(of_K[1:][fall_K], minlength=len(rollouts)) > 0
            self.known += int((rollouts.trained_S > 0).sum())
            self.falls += int(fall_S.sum())
            self.first_fall.add_sequence(rollouts, fall_S)
        many_S = _versions(rollouts)
        if many_S is None:
            return
        ratio_K = np.abs(rollouts.ratio_K)
        ratio_K = np.where(np.isfinite(ratio_K), ratio_K, 0.0)
        parts = np.stack([rollouts.trained_S > 0, rollouts.trained_S, rollouts.sums_S(ratio_K)])
        mixed_S = many_S > 1
        self.sums.add(rollouts.step, np.stack([(parts @ ~mixed_S), (parts @ mixed_S)]))
        self.largest.append(int(many_S.max(initial=0)))
        self.first.add_sequence(rollouts, mixed_S)

    def _engines(self, rollouts: Rollouts, version_K: Array, of_K: Array) -> None:
        ratio_K = np.abs(rollouts.ratio_K)
        known_K = np.isfinite(version_K) & np.isfinite(ratio_K)
        for label in ENGINES:
            values_S = np.array(rollouts.labels.get(label, ()))
            for value in np.unique(values_S):
                own_K = known_K & (values_S[of_K] == value)
                if own_K.any():
                    name, newest = f"{label} {value}", float(version_K[own_K].max())
                    gap = float(ratio_K[own_K].sum())
                    self.engines.append((name, rollouts.step, newest, gap, int(own_K.sum())))

    def _back(self) -> Finding | None:
        """An engine whose newest version falls from one step to the next."""
        for name in dict.fromkeys(name for name, *_ in self.engines):
            rows = [row for of, *row in self.engines if of == name]
            age = np.array([step - version for step, version, _, _ in rows])
            youngest = np.minimum.accumulate(age[::-1])[::-1]  # from each row on
            older = youngest[1:] - np.maximum.accumulate(age)[:-1] >= BACK
            i = int(older.argmax()) + 1 if older.any() else len(rows) - 1
            # at this step and later ones: one late response is not enough
            if not older.any() or rows[i][1] >= rows[i - 1][1] or rows[-1][0] == rows[i][0]:
                continue
            (step, version), newest = rows[i][:2], rows[i - 1][1]
            (_, _, gap, n), (_, _, later, later_n) = (
                np.sum(part, axis=0) for part in (rows[:i], rows[i:])
            )
            text = (
                f"the newest weights of {name} are version {version:g} at step {step}, after "
                f"{newest:g} before"
            )
            if later / later_n > GROWN * gap / n:
                text += ": the engine went back to older weights"
                return Finding("versions", "warning", text)
            text += (
                f", and its mean |log ratio| does not grow ({gap / n:.2g} before, "
                f"{later / later_n:.2g} nats after): its counter was restarted, so the age of its "
                "tokens is unknown"
            )
            return Finding("versions", "unsound", text)
        return None

    def finding(self) -> Finding:
        if self.ahead > FALLS * self.known:
            text = (
                f"{self.ahead:,} of {self.known:,} responses are of weights newer than those of "
                "the trainer at their step: the versions are not those of the tokens"
            )
            odd = self.ahead, self.known, FALLS
            return Finding("versions", "unsound", text, {}, self.first_ahead.place, odd)
        if back := self._back():
            return back
        if self.falls > max(1, FALLS * self.known):
            text = (
                f"in {self.falls:,} of {self.known:,} responses later tokens are of older weights "
                "than earlier ones, which no engine does: the versions are not those of the tokens"
            )
            odd = self.falls, self.known, FALLS
            return Finding("versions", "unsound", text, {}, self.first_fall.place, odd)
        (one, n, gap), (mixed, mixed_n, mixed_gap) = self.sums.total(np.zeros((2, 3)))
        if not mixed:
            return Finding("versions", "ok", "")
        text = (
            f"{mixed:,.0f} of {one + mixed:,.0f} responses mix up to {max(self.largest)} weight "
            "versions"
        )
        if min(n, mixed_n) < TOKENS or not gap:
            return Finding("versions", "ok", text, first=self.first.place)
        times = (mixed_gap / mixed_n) / (gap / n)
        text += (
            f": their mean |log ratio| is {mixed_gap / mixed_n:.2g} nats, {times:.2g} times that "
            "of the others"
        )
        state = "warning" if times > APART else "ok"
        return Finding("versions", state, text, {"times": times}, self.first.place)


def _versions(rollouts: Rollouts) -> Array | None:
    """How many versions the trained tokens of each sequence have, [S]; None if none is known."""
    if (counted_S := rollouts.per_sequence.get(VERSIONS)) is not None:
        return np.nan_to_num(counted_S)
    version_N = rollouts.per_token.get(VERSION)
    if version_N is None:
        return None
    version_K, of_K = version_N[rollouts.trained_K], rollouts.sequence_of(rollouts.trained_K)
    known_K = np.isfinite(version_K)
    pairs = np.unique(np.stack([of_K[known_K], version_K[known_K]]), axis=1)
    return np.bincount(pairs[0].astype(np.int64), minlength=len(rollouts))


@check("updates", needs="loss")
class Updates(Sums):
    """Sums over sequences by the update of their rollout that trained them, by step."""

    def __init__(self) -> None:
        self.sums = StepSums()  # [UPDATES, 3]: sequences, sum of their mean |d|, and of its square

    def add(self, rollouts: Rollouts) -> None:
        update_S = rollouts.per_sequence.get(UPDATE)
        if update_S is None:
            return
        ratio_K = np.abs(rollouts.ratio_K)
        sum_S = rollouts.sums_S(np.where(np.isfinite(ratio_K), ratio_K, 0.0))
        n_S = rollouts.sums_S(np.isfinite(ratio_K).astype(np.float64))
        some_S = (n_S > 0) & np.isfinite(update_S)
        mean_S = sum_S[some_S] / n_S[some_S]
        row_S = np.clip(update_S[some_S].astype(np.int64), 1, UPDATES) - 1
        parts = (np.ones(len(mean_S)), mean_S, mean_S**2)
        columns = [np.bincount(row_S, part, minlength=UPDATES) for part in parts]
        self.sums.add(rollouts.step, np.stack(columns, axis=1))

    def finding(self) -> Finding:
        sums_UC = self.sums.total(np.zeros((UPDATES, 3)))
        known_U = np.flatnonzero(sums_UC[:, 0] > 1)
        if len(known_U) < 2:
            return Finding("updates", "ok", "")
        n_U, total_U, square_U = sums_UC[known_U].T
        mean_U = total_U / n_U
        error_U = np.sqrt(np.maximum(square_U / n_U - mean_U**2, 0.0) / (n_U - 1))
        first, last = mean_U[0], mean_U[-1]
        if not (last > MOVED * first and last - first > ERRORS * np.hypot(error_U[0], error_U[-1])):
            return Finding("updates", "ok", "")
        text = (
            f"the mean |log ratio| is {first:.2g} nats in sequences of the first update of their "
            f"rollout and {last:.2g} in those of update {known_U[-1] + 1}: the trainer's logprobs "
            "are those of its forward passes for the updates (--use-rollout-logprobs of slime), so "
            "they contain what earlier updates changed; --get-mismatch-metrics computes them before"
        )
        return Finding("updates", "warning", text, {"first": first, "last": last})
