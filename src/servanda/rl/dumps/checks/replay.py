# Replay: the trainer's forward pass used the experts that the sampler recorded.
#
# A trainer that replays (R3, arXiv 2510.11370) has the recorded experts in every layer of every
# token.  One that routes by itself has others where rounding decides.  Where the trainer's rows
# equal a neighbour of the sampler more often than their own row, they are misaligned: the shares
# are compared sequence by sequence, see `paired_shares`.
# Axes: N tokens of all sequences, S sequences, L layers, K experts of a token.

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from servanda.rl.dumps.checks.base import Finding, FirstPlace, StepSums, Sums, check
from servanda.rl.dumps.checks.line_up import LAGS
from servanda.rl.dumps.checks.paired_shares import ERROR, chance, share, signs, told_before
from servanda.rl.dumps.checks.routes import OTHERS, known, some
from servanda.theory.stats.alpha import shared
from servanda.traces.rollouts import REPLAYS, ROUTE, ROUTE_TRAIN, UNROUTED, Array, Rollouts

# Where affected sequences are: how many, of which steps, and of which ranks.


_RANK = re.compile(r"rank_?(\d+)")
_SHOWN = 4  # most single numbers of a list


class Places(Sums):
    """Counts of affected sequences, and of all, by step and by rank."""

    def __init__(self) -> None:
        self.all = self.affected = 0
        self.steps: Counter[int] = Counter()
        self.of_rank: Counter[str] = Counter()  # rank -> its sequences
        self.ranks: Counter[str] = Counter()  # rank -> its affected sequences

    def add(self, rollouts: Rollouts, among_S: Array, flag_S: Array) -> None:
        """Add sequences.

        Args:
            among_S: those that could be affected; flag_S: those that are.
        """
        self.all += int(among_S.sum())
        if count := int(flag_S.sum()):
            self.affected += count
            self.steps[rollouts.step] += count
        ranks = _ranks(rollouts)
        self.of_rank.update(ranks[i] for i in np.flatnonzero(among_S))
        self.ranks.update(ranks[i] for i in np.flatnonzero(flag_S))

    @property
    def text(self) -> str:
        """Such as "in 3 of 40 sequences, of steps 2 to 4, all of rank 1"."""
        found = f"in {self.affected:,} of {self.all:,} sequences"
        if self.steps:
            found += f", of step{'s' * (len(self.steps) > 1)} {_listed(sorted(self.steps))}"
        some, known = sorted(filter(None, self.ranks), key=int), {*filter(None, self.of_rank)}
        if len(known) > 1 and some and len(some) < len(known):
            found += f", all of rank{'s' * (len(some) > 1)} {_listed([*map(int, some)])}"
        return found


def _ranks(rollouts: Rollouts) -> tuple[str, ...]:
    """The rank of the trainer that wrote each sequence; "" where it is unknown."""
    labelled = rollouts.labels.get("rank")
    if labelled is not None:
        return tuple(name if name.isdecimal() else "" for name in labelled)
    found = (_RANK.search(source) for source in rollouts.source_S)
    return tuple(match[1] if match else "" for match in found)


def _listed(numbers: list[int]) -> str:
    """Whole numbers in a few words.

    >>> _listed([3, 4, 5, 6, 7]), _listed([1, 4]), _listed([1, 3, 5, 7, 9, 11])
    ('3 to 7', '1, 4', '1, 3, 5, 7 and 2 others')
    """
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    rest = len(numbers) - _SHOWN
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    return f"{shown} and {rest} other{'s' * (rest > 1)}" if rest > 0 else shown


_STRAY = 0.001  # declared: the share of tokens that a replay may miss before the data are unsound
_MOST = 0.5  # more than half of the tokens touched is a warning, as "most tokens" says
_LAYERS_SHOWN = 5  # layers that are named


@check("replay", needs="routes")
class ReplayCheck(Sums):
    """Counts of tokens and of (token, layer) pairs that are known on both sides.

    Of tokens whose trainer says that it replays (`said`) and of all.
    """

    def __init__(self) -> None:
        self.tokens = self.touched = self.said = self.missed = self.pairs = self.shapes = 0
        self.claimed = 0  # tokens that are said to be replayed, without the trainer's experts
        self.at: Counter[int] = Counter()  # layer -> pairs that differ
        self.missed_at: Counter[int] = Counter()  # the same, of tokens that are said to be replayed
        self.lags: Counter[tuple[int, bool]] = Counter()  # (lag, whether the pair is equal)
        # sequences in which more pairs are equal at the lag than at 0, and in which fewer are
        self.shifted = np.zeros((len(OTHERS), 2), np.int64)
        self.gap = StepSums()  # [2, 2]: tokens and sum of |log ratio|, of untouched and of touched
        self.first, self.first_touched = FirstPlace(), FirstPlace()
        self.missing, self.touching = Places(), Places()

    def add(self, rollouts: Rollouts) -> None:
        train_NLK, infer_NLK = (rollouts.per_token.get(name) for name in (ROUTE_TRAIN, ROUTE))
        says_S = rollouts.per_sequence.get(REPLAYS, np.zeros(len(rollouts))) == 1
        if infer_NLK is None or (train_NLK is None and not says_S.any()):
            return
        if train_NLK is None:
            train_NLK = np.full_like(infer_NLK, UNROUTED)
        if train_NLK.shape != infer_NLK.shape:
            self.shapes += 1
            return
        train_NLK, infer_NLK = np.sort(train_NLK), np.sort(infer_NLK)
        known_N = known(train_NLK) & known(infer_NLK)
        differ_NL = (train_NLK != infer_NLK).any(axis=-1) & known_N[:, None]
        touched_N = differ_NL.any(axis=1)
        says_N = says_S[rollouts.sequence_N]
        self.claimed += int((says_N & known(infer_NLK) & ~known(train_NLK)).sum())
        says_N &= known_N
        missed_NL = differ_NL & says_N[:, None]
        self.tokens += int(known_N.sum())
        self.pairs += int(known_N.sum()) * differ_NL.shape[1]
        self.touched += int(touched_N.sum())
        self.said += int(says_N.sum())
        self.missed += int((touched_N & says_N).sum())
        for counts, of_NL in ((self.at, differ_NL), (self.missed_at, missed_NL)):
            counts.update({at: n for at, n in enumerate(of_NL.sum(axis=0).tolist()) if n})
        self._compare(rollouts, train_NLK, infer_NLK, known_N)
        self.touching.add(rollouts, some(rollouts, known_N), some(rollouts, touched_N))
        self.missing.add(rollouts, some(rollouts, says_N), some(rollouts, touched_N & says_N))
        self.first.add_sequence(rollouts, some(rollouts, touched_N & says_N))
        self.first_touched.add_sequence(rollouts, some(rollouts, touched_N))
        self.gap.add(rollouts.step, _gap(rollouts, touched_N, known_N))

    def _compare(
        self, rollouts: Rollouts, train_NLK: Array, infer_NLK: Array, known_N: Array
    ) -> None:
        """Counts of equal pairs at each lag; a prompt that neighbours share counts once."""
        fresh_N, share_S = known_N & ~told_before(rollouts), {}
        for lag in LAGS:
            equal_S, pairs_S = _equal_at(rollouts, train_NLK, infer_NLK, fresh_N, lag)
            equal, pairs = int(equal_S.sum()), int(pairs_S.sum())
            self.lags.update({(lag, True): equal, (lag, False): pairs - equal})
            share_S[lag] = share(equal_S, pairs_S)
        self.shifted = self.shifted + [signs(share_S[lag], share_S[0]) for lag in OTHERS]

    def finding(self) -> Finding:
        if self.shapes:
            text = "the experts of the trainer and those of the sampler are of other models"
            return Finding("replay", "unsound", text)
        if not self.tokens:
            return self._unproven() or Finding("replay", "ok", "")
        p_L = [chance(*of) for of in self.shifted.tolist()]
        sure = [p <= shared(ERROR, len(OTHERS)) for p in p_L]
        best = max(OTHERS, key=lambda lag: (sure[OTHERS.index(lag)], self._equal(lag)))
        numbers = {
            "tokens": float(self.tokens),
            "touched": self.touched / self.tokens,
            "flipped": self.at.total() / self.pairs,
            "p_misaligned": min(1.0, len(OTHERS) * min(p_L)),
        }
        if any(sure):
            text = (
                f"the trainer's experts are misaligned: row t is the sampler's row t{best:+d} "
                f"({_percent(self._equal(best))} of the layers of a token are equal at that lag, "
                f"{_percent(self._equal(0))} at lag 0, {self.touching.text})"
            )
            return Finding("replay", "unsound", text, numbers, self.first_touched.place)
        if self.missed:
            text = (
                "the trainer says that it replays the sampler's experts, and "
                f"{self.missed:,} of {self.said:,} tokens have others "
                f"({_layers(self.missed_at)}; {self.missing.text})"
            )
            odd = self.missed, self.said, _STRAY
            state = "unsound" if self.missed > _STRAY * self.said else "warning"
            return Finding("replay", state, text, numbers, self.first.place, odd)
        if unproven := self._unproven():
            return unproven
        if not self.touched:
            text = (
                f"the trainer's experts are the sampler's, in every layer of {self.tokens:,} tokens"
            )
            return Finding("replay", "ok", text, numbers)
        text = (
            "the trainer routes by itself: other experts than the sampler's in "
            f"{_percent(numbers['flipped'])} of the layers of a token, and in one or more layers "
            f"of {_percent(numbers['touched'])} of the tokens ({_layers(self.at)}{self._of_gap()})"
        )
        state = "warning" if numbers["touched"] > _MOST else "ok"
        return Finding("replay", state, text, numbers, self.first_touched.place)

    def _unproven(self) -> Finding | None:
        """That a replay is claimed, and cannot be seen."""
        if self.claimed <= _STRAY * (self.said + self.claimed):
            return None
        text = (
            "the trainer says that it replays the sampler's experts, and of "
            f"{self.claimed:,} tokens its own are not in the dump, so whether it does is unknown: "
            "pass routes_train="
        )
        return Finding("replay", "warning", text)

    def _equal(self, lag: int) -> float:
        equal, other = self.lags[lag, True], self.lags[lag, False]
        return equal / (equal + other) if equal else 0.0

    def _of_gap(self) -> str:
        """What touched tokens have of the sum of |log ratio|."""
        (others, near), (tokens, far) = self.gap.total(np.zeros((2, 2)))
        if not (others and tokens and far):
            return ""
        return (
            f"; their mean |log ratio| is {far / tokens:.2g} nats, that of the others "
            f"{near / others:.2g}, and {_percent(far / (far + near))} of the gap is theirs"
        )


def _percent(share: float) -> str:
    """A share, with two digits where it is small.

    >>> _percent(0.9412), _percent(0.0123), _percent(1.0)
    ('94 %', '1.2 %', '100 %')
    """
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _layers(at: Counter[int]) -> str:
    """The layers with most of the pairs, in their order."""
    most = sorted(layer for layer, _ in at.most_common(_LAYERS_SHOWN))
    more = f" and {len(at) - _LAYERS_SHOWN} others" if len(at) > _LAYERS_SHOWN else ""
    return f"layer{'s' if len(at) > 1 else ''} {', '.join(map(str, most))}{more}"


def _equal_at(
    rollouts: Rollouts, train_NLK: Array, infer_NLK: Array, known_N: Array, lag: int
) -> tuple[Array, Array]:
    """Pairs (token, layer) whose trainer's experts are those of the sampler `lag` rows on; all.

    Of each sequence, [S].
    """
    row_R = np.flatnonzero(known_N)
    row_R = row_R[(row_R + lag >= 0) & (row_R + lag < len(known_N))]
    there_R = row_R + lag
    inside_R = known_N[there_R] & (rollouts.sequence_N[row_R] == rollouts.sequence_N[there_R])
    row_R, there_R = row_R[inside_R], there_R[inside_R]
    equal_RL = (train_NLK[row_R] == infer_NLK[there_R]).all(axis=-1)
    of_R, size = rollouts.sequence_N[row_R], len(rollouts)
    equal_S = np.bincount(of_R, equal_RL.sum(axis=1), minlength=size)
    return equal_S, np.bincount(of_R, minlength=size) * equal_RL.shape[1]


def _gap(rollouts: Rollouts, touched_N: Array, known_N: Array) -> Array:
    """Trained tokens and their sum of |log ratio|, of those that are not touched and that are."""
    ratio_K, at_K = np.abs(rollouts.ratio_K), rollouts.trained_K
    usable_K = np.isfinite(ratio_K) & known_N[at_K]
    sides = (usable_K & ~touched_N[at_K], usable_K & touched_N[at_K])
    return np.array([[side_K.sum(), ratio_K[side_K].sum()] for side_K in sides])
