# Outliers: the sequences with the largest difference of the two sides.
#
# Each sequence is tested separately against the limit on mean (1 - w)^+, by an e-value with a
# threshold that grows with the number of sequences, so that a long healthy dump has no finding. An
# average over the dump cannot show one bad sequence in twenty; this test can.  Neither does it show
# the tokens that a filter of the trainer removed before it wrote the dump: their sums are kept too.

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field, replace

import numpy as np

from servanda.contract.model import Contract
from servanda.judgement.breakdown import Removed, SequenceRow
from servanda.judgement.token_profile import Sums
from servanda.rl.dumps.token_fields import ScoredTokens
from servanda.theory.stats.alpha import log_price, look_alpha, step_alpha
from servanda.traces.rollouts import Rollouts

KEPT = 12
_BETS = np.array([3.0, 30.0])  # of the e-value: for many small and for few large deviations
_LIMIT = 0.025  # default as in the presets (5 % of the gradient)


def tv_limit(contract: Contract) -> float:
    """The limit on the mean of (1 - w)^+; twice this is the share of the gradient."""
    limits = [
        float(clause.at_most)
        for clause in contract.statistical
        if clause.metric == "tv" and clause.enforced and isinstance(clause.at_most, float | int)
    ]
    return min(limits, default=_LIMIT)


@dataclass
class Outliers:
    """The sequences with the largest sum of (1 - w)^+ above the limit, and their number.

    Args:
        number: of the step in the dump, from 1; the steps share alpha.
        alpha: probability that any sequence of a conforming dump is called violated.
    """

    limit: float
    number: int = 1
    alpha: float = 0.01
    sequences: int = 0
    beyond: int = 0
    total: float = 0.0
    _worst: list[tuple[float, int, SequenceRow]] = field(default_factory=list)

    def add(
        self, block: Rollouts, tokens: ScoredTokens, *, removed: np.ndarray | None = None
    ) -> None:
        """Add a block of the step; `removed`: sequences removed by a filter, [S]."""
        size, at_K, tv_K, n_S = len(block), tokens.sequence_K, tokens.tv_K, tokens.tokens_S
        tv_S = np.bincount(at_K, tv_K, minlength=size)
        self.total += float(tv_S.sum())
        excess_S = tv_S - self.limit * n_S
        suspects = np.flatnonzero((n_S > 0) & (excess_S > 0))
        log_e = dict.fromkeys(suspects.tolist(), 0.0)
        ends_S = np.cumsum(n_S)
        for s in suspects.tolist():
            x = tv_K[ends_S[s] - n_S[s] : ends_S[s]]
            growth = [
                float(np.log1p(bet * x).sum() - len(x) * math.log1p(bet * self.limit))
                for bet in _BETS
            ]
            log_e[s] = float(np.logaddexp.reduce(growth) - math.log(len(growth)))
        alpha = step_alpha(self.alpha, self.number)
        beyond = {
            s
            for s, value in log_e.items()
            if value >= log_price(look_alpha(alpha, self.sequences + s + 1))
        }
        self.beyond += len(beyond)
        with np.errstate(over="ignore"):
            ratio_K = tokens.log_ratio_K
            sum_S = np.bincount(at_K, ratio_K, minlength=size)
            exp_S = np.bincount(at_K, np.exp(np.abs(ratio_K)), minlength=size)
        # evidence before size: few tokens can differ strongly by chance
        for s in np.argsort(-excess_S, kind="stable")[: 4 * KEPT].tolist():
            if not n_S[s]:
                continue
            rank = float(excess_S[s]) + (1e6 if s in beyond else 0.0)
            if len(self._worst) == KEPT and rank <= self._worst[0][0]:
                continue
            row = SequenceRow(
                block.step,
                block.source_S[s],
                block.group_S[s],
                int(n_S[s]),
                float(sum_S[s]),
                float(exp_S[s] / n_S[s]),
                float(tv_S[s] / n_S[s]),
                float(tv_S[s]),
                s in beyond,
                bool(removed is not None and removed[s]),
            )
            self._keep((rank, -(self.sequences + s), row))
        self.sequences += size

    def join(self, later: Outliers) -> None:
        """Add the sequences of later steps."""
        for rank, at, row in later._worst:
            self._keep((rank, at - self.sequences, row))
        self.sequences += later.sequences
        self.beyond += later.beyond
        self.total += later.total

    def _keep(self, entry: tuple[float, int, SequenceRow]) -> None:
        push = heapq.heappush if len(self._worst) < KEPT else heapq.heappushpop
        push(self._worst, entry)

    def rows(self) -> tuple[SequenceRow, ...]:
        """The worst sequences, worst first, each with its share of the whole sum."""
        ordered = [row for *_, row in sorted(self._worst, key=lambda e: (-e[0], -e[1]))]
        return tuple(
            replace(row, share=row.share / self.total if self.total else 0.0) for row in ordered
        )


@dataclass
class RemovedTokens:
    """The removed sequences and tokens, and the sums of those that both sides scored."""

    sequences: int = 0
    tokens: int = 0
    n: int = 0
    tv: float = 0.0

    def add(
        self, block: Rollouts, removed_N: np.ndarray, kept: Sums, drawn_tv_K: np.ndarray
    ) -> None:
        """Add a block.

        Args:
            kept: sums over its tokens without the removed ones; drawn_tv_K: (1 - w)^+ of all.
        """
        self.sequences += len(np.unique(block.sequence_N[removed_N]))
        self.tokens += int(removed_N.sum())
        self.n += len(drawn_tv_K) - kept.n
        self.tv += float(drawn_tv_K.sum()) - kept.tv

    def join(self, later: RemovedTokens) -> None:
        """Add the tokens of later steps."""
        self.sequences += later.sequences
        self.tokens += later.tokens
        self.n += later.n
        self.tv += later.tv

    def removed(self, sequences: int, trained: int, kept: Sums) -> Removed | None:
        """The summary for reports; None if nothing was removed."""
        if not self.sequences:
            return None
        of = sequences, trained + self.tokens
        if not self.n or not kept.n:
            return Removed(self.sequences, self.tokens, *of)
        own, others = self.tv / self.n, kept.tv / kept.n
        before = (self.tv + kept.tv) / (self.n + kept.n)
        return Removed(self.sequences, self.tokens, *of, own, others, before)
