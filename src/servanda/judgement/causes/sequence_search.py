# Sequence search: whether a few sequences explain a gap, though no field separates them.
#
# Axes: K tokens, Q sequences, J bets.

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from servanda.judgement.causes.slice_search import ALPHA, halves
from servanda.judgement.causes.token_table import Array, TokenTable
from servanda.theory.stats.alpha import log_price
from servanda.theory.stats.bets import POS, weights_above

_TIMES = 3.0  # the gap of similar tokens of other sequences, that those sequences exceed
_MOST_OF_IT = 0.5
_LARGEST = 0.4  # share of the tokens: the rest would be the exception


@dataclass(frozen=True)
class OddSequences:
    """Sequences whose gap is far above that of the others.

    Args:
        sequences: share of all sequences; share: share of the gap's excess over the others.
        log_e: evidence that there are any, of the half that did not choose, nats.
        worst: places of the worst, worst first.
        index: of the sequences in the table.
    """

    sequences: float
    share: float
    log_e: float
    worst: tuple[str, ...]
    index: tuple[int, ...]


def find_sequences(
    table: TokenTable, limit: float = 0.0, alpha: float = ALPHA
) -> OddSequences | None:
    """The few sequences that explain most of the gap; None if all are alike.

    Args:
        limit: on the mean of |p - q| / (p + q).
        alpha: probability of an answer although no sequence has, token by token, a mean above
            both `limit` and _TIMES that of similar tokens in the first half's other sequences.
    """
    chosen_K, tested_K = halves(table)
    ordinary_K = _ordinary(table, chosen_K)
    if not ordinary_K.any():
        return None
    base_K = table.expected(ordinary_K)
    bound_K = np.minimum(np.maximum(limit, _TIMES * base_K), 0.99)
    tested_Q = np.unique(table.sequence_K[tested_K])
    log_e_Q = _evidence(table, bound_K)
    size = len(log_e_Q)
    if not len(tested_Q):
        return None
    log_e = float(np.logaddexp.reduce(log_e_Q[tested_Q]) - math.log(len(tested_Q)))
    if log_e < log_price(alpha):
        return None
    own_Q = np.bincount(table.sequence_K, minlength=size) > 0
    odd_Q = own_Q & (log_e_Q > log_price(alpha))
    over_Q = np.bincount(table.sequence_K, table.gap_K - base_K, minlength=size)
    in_odd_K = odd_Q[table.sequence_K]
    share = float(over_Q[odd_Q].sum() / max(over_Q.sum(), 1e-300))
    if share < _MOST_OF_IT or in_odd_K.mean() > _LARGEST:
        return None
    order = [int(q) for q in np.argsort(-over_Q) if odd_Q[q]]
    return OddSequences(
        float(odd_Q.sum() / own_Q.sum()),
        min(share, 1.0),
        log_e,
        tuple(table.source_Q[q] for q in order[:3] if q < len(table.source_Q)),
        tuple(order),
    )


def _ordinary(table: TokenTable, chosen_K: Array) -> Array:
    """Tokens of the half that chooses, in the half of its sequences with the smaller rates."""
    base_K = table.expected(chosen_K)
    size = int(table.sequence_K.max()) + 1
    x_Q, b_Q = (
        np.bincount(table.sequence_K[chosen_K], v[chosen_K], minlength=size)
        for v in (table.gap_K, base_K)
    )
    some_Q = b_Q > 0
    rate_Q = np.where(some_Q, x_Q / np.where(some_Q, b_Q, 1.0), np.inf)
    middle = float(np.median(rate_Q[some_Q]))
    return chosen_K & (rate_Q <= middle)[table.sequence_K]


def _evidence(table: TokenTable, bound_K: Array) -> Array:
    """Log e-value of each sequence that its tokens exceed their bounds, [Q]."""
    weight_J = weights_above()
    size = int(table.sequence_K.max()) + 1
    growth_JQ = np.stack(
        [
            np.bincount(
                table.sequence_K,
                np.log1p(bet * table.gap_K) - np.log1p(bet * bound_K),
                minlength=size,
            )
            for bet in POS
        ]
    )
    top_Q = growth_JQ.max(axis=0)
    return top_Q + np.log(weight_J @ np.exp(growth_JQ - top_Q))
