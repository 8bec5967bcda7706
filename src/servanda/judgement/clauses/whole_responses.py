# Clauses about whole responses: the share of them that is further off than a limit, and a finding
# that needs no share, of tokens that the noise of the others cannot give.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from servanda.contract.clause import Clause
from servanda.contract.model import Contract
from servanda.judgement.clauses.base import (
    GUARDS,
    Array,
    Cell,
    CellVerdict,
    Interim,
    Kind,
    Reads,
    View,
    blank,
)
from servanda.judgement.clauses.chain_metrics import CHAIN, Lack
from servanda.judgement.clauses.gradient import SequenceCertificate
from servanda.judgement.clauses.statistical import Certificate, Feed, Grown, share_beyond
from servanda.judgement.slices.rules import Known
from servanda.theory.stats.tails import (
    ALPHA,
    FAR,
    KEPT,
    LEAST,
    RESPONSE_NATS,
    TOKEN_NATS,
    FarToken,
    Tails,
    counted,
    falls,
    finds,
)


def _mean(ratio_K: Array, start_R: Array, n_R: Array) -> Array:
    return np.add.reduceat(np.abs(ratio_K), start_R) / n_R


def _product(ratio_K: Array, start_R: Array, _: Array) -> Array:
    return np.abs(np.add.reduceat(ratio_K, start_R))


def _largest(ratio_K: Array, start_R: Array, _: Array) -> Array:
    return np.maximum.reduceat(np.abs(ratio_K), start_R)


MEAN = "response_abs_log_ratio_nats"
OUTLIERS = "outlier_tokens"
# metric -> its value of each response that has a token
_OF: Mapping[str, Callable[[Array, Array, Array], Array]] = {
    MEAN: _mean,
    "response_log_weight_nats": _product,
    "response_largest_nats": _largest,
}


def of_responses(metric: str, ratio_K: Array, n_S: Array) -> Array:
    """A metric of each response, [S]; NaN without a token that both sides scored.

    Args:
        ratio_K: log p - log q of these tokens, by response, nats; n_S: their number.
    """
    value_S = np.full(len(n_S), np.nan)
    some_S = n_S > 0
    if some_S.any():
        n_R = n_S[some_S]
        value_S[some_S] = _OF[metric](ratio_K, np.cumsum(n_R) - n_R, n_R)
    return value_S


@dataclass(frozen=True)
class ResponseShare(SequenceCertificate):
    """The share of responses beyond a size.

    Args:
        brief: whether there may never be enough responses to show so small a share, as in a
            trainer's record: the clause then does not apply, unless it is violated.
    """

    brief: bool = False

    known: ClassVar[Known] = "request"
    takes: ClassVar[frozenset[str]] = frozenset({"aggregate"})
    reads: ClassVar[Reads] = "responses"
    metric_unit: ClassVar[str] = "nat"

    @classmethod
    def amiss(cls, clause: Clause, /) -> Iterator[Lack]:
        if clause.percentile is None:
            yield Lack(
                f"{clause.metric} is limited for a share of the responses",
                "write aggregate: p99, for at most 1 % of them",
                "aggregate" if clause.aggregate else "metric",
            )

    @classmethod
    def of(cls, contract: Contract, clause: Clause) -> Certificate:
        workload = contract.all_workloads.get(contract.workload_of(clause))
        assert isinstance(clause.at_most, float)  # lint rejects any other
        feed = Feed(limit=share_beyond(clause), threshold=clause.at_most)
        kind = cls(feed)
        if workload is None or workload.source == "trainer":
            return replace(kind, brief=True)
        most = contract.promotion.offline.sequences[1] * workload.samples
        needed = kind.units_at_best(1 - contract.confidence)
        return replace(kind, brief=needed is None or most < needed)

    def values(self, cell: Cell, view: View) -> Array:
        """The metric of each dispatched response, [S]."""
        ratio_N, length_S = view.log_ratio(), view.pair.infer.length_S
        known_N = ~np.isnan(ratio_N)
        at_K = np.repeat(np.arange(len(length_S)), length_S)[known_N]
        n_S = np.bincount(at_K, minlength=len(length_S))
        return of_responses(cell.clause.metric, ratio_N[known_N], n_S)

    def not_in_a_step(self, clause: Clause) -> str:
        return ""

    def judge(
        self, cell: Cell, rounds: list[Grown], floor: float | None, look: Interim
    ) -> CellVerdict:
        verdict = super().judge(cell, rounds, floor, look)
        needed = self.units_at_best(look.alpha)
        short = self.brief and needed is not None and verdict.n < needed
        if not short or verdict.outcome != "inconclusive":
            return verdict
        note = (
            f"{verdict.n:,} responses cannot show a share of {100 * self.feed.limit:g} %: that "
            f"takes {needed:,}"
        )
        return verdict.but(outcome="not applicable", open=False, more=None, note=note)


@CHAIN.register(MEAN)
class ResponseMean(ResponseShare):
    """Mean |log p - log q| over the tokens of a response."""

    meaning: ClassVar[str] = "the mean of |log p - log q| over the tokens of one response"
    example: ClassVar[str] = (
        "{id: responses, metric: response_abs_log_ratio_nats, aggregate: p99, at_most: 0.5, "
        "slices: [all]}"
    )


@CHAIN.register("response_log_weight_nats")
class ResponseWeight(ResponseShare):
    """|log of the product of the weights p / q of a response|."""

    meaning: ClassVar[str] = (
        "the absolute log of the product of a response's weights p / q, its importance weight"
    )
    example: ClassVar[str] = (
        "{id: weights, metric: response_log_weight_nats, aggregate: p99, at_most: 2.0, "
        "slices: [all]}"
    )


@CHAIN.register("response_largest_nats")
class ResponseLargest(ResponseShare):
    """Largest |log p - log q| of a token of the response."""

    meaning: ClassVar[str] = "the largest |log p - log q| among the tokens of one response"
    example: ClassVar[str] = (
        "{id: largest, metric: response_largest_nats, aggregate: p99, at_most: 4.0, slices: [all]}"
    )


def tails_of(
    size_K: Array, n_S: Array, mean_S: Array, place: Callable[[int, int], FarToken]
) -> Tails:
    """The tails of some responses.

    Args:
        size_K: |log p - log q| of the usable tokens, by response, nats; n_S, mean_S: their number
            and their mean.
        place: (response, index in size_K) -> the description of that token.
    """
    beyond = counted(size_K[size_K > TOKEN_NATS[0]], TOKEN_NATS)
    worst: list[FarToken] = []
    far = 0
    if beyond[TOKEN_NATS.index(FAR)]:
        end_S = np.cumsum(n_S)
        far_K = np.flatnonzero(size_K > FAR)
        of_F = np.searchsorted(end_S, far_K, side="right")
        furthest_F = np.lexsort((far_K, -size_K[far_K]))
        first_R = np.unique(of_F[furthest_F], return_index=True)[1]  # of each response
        far = len(first_R)
        worst = [
            place(int(of_F[f]), int(far_K[f])) for f in furthest_F[np.sort(first_R)[:KEPT]].tolist()
        ]
    return Tails(
        len(size_K),
        beyond,
        int(np.count_nonzero(n_S)),
        counted(mean_S[n_S >= LEAST], RESPONSE_NATS),
        far,
        tuple(sorted(worst, reverse=True)),
    )


@GUARDS.register(OUTLIERS)
@dataclass(frozen=True)
class OutlierTokens(Kind):
    """Tokens and responses that are further off than the noise of the others can give."""

    reads: ClassVar[Reads] = "tails"
    words: ClassVar[Mapping[str, str]] = {
        "holds": "no token or response is further off than the noise of the others can give",
        "violated": "some are: of the noise of the others it would happen with a probability of at "
        "most 0.001",
    }

    def weigh(self, cell: Cell, view: View) -> Tails:
        ratio_N, infer = view.log_ratio(), view.pair.infer
        inside_N = view.mask(cell.cut) & ~np.isnan(ratio_N)
        length_S = infer.length_S
        at_K = np.repeat(np.arange(len(length_S)), length_S)[inside_N]
        index_K = np.flatnonzero(inside_N)
        start_S = np.cumsum(length_S) - length_S
        size_K = np.abs(ratio_N[inside_N])
        train_N, infer_N = view.pair.train.columns["logp"], infer.columns["logp"]
        before_N = infer.columns.get("length")  # tokens before each one, of other turns, too

        def place(s: int, k: int) -> FarToken:
            i, prompt = int(index_K[k]), int(infer.prompt_tokens_S[s])
            return FarToken(
                float(size_K[k]),
                -1,
                f"response {int(infer.sequence_S[s])}",
                int(before_N[i]) if before_N is not None else prompt + i - int(start_S[s]),
                int(infer.token_N[i]),
                float(train_N[i]),
                float(infer_N[i]),
            )

        n_S = np.bincount(at_K, minlength=len(length_S))
        return tails_of(size_K, n_S, of_responses(MEAN, size_K, n_S), place)

    def adds(self, statistic: Tails) -> bool:
        return any(k for *_, k in statistic.pairs)

    def invalidates(self, other: Kind) -> bool:
        return False  # a few tokens: the statistical promises stand beside the finding

    def judge(self, cell: Cell, rounds: list[Any], floor: object, look: Interim) -> CellVerdict:
        tails = sum((r for r in rounds if r is not None), Tails())
        log_e = tails.log_e
        verdict = blank(
            cell,
            "inconclusive",
            kind="guard",
            n=tails.tokens,
            units="tokens",
            alpha=ALPHA * look.part,
            e_violated=log_e if tails.tokens else None,
        )
        if not tails.tokens:
            return verdict.but(open=True, note="nothing was measured yet")
        if finds(log_e, look.part):
            return verdict.but(outcome="violated", note=sentence(tails))
        if look.launched < look.first:
            return verdict.but(open=True, more=max(1, look.first - look.launched))
        if tails.doubtful:
            return verdict.but(open=True, note=f"too few to tell from noise: {sentence(tails)}")
        return verdict.but(outcome="holds", note="not rejected")


def sentence(tails: Tails) -> str:
    """What was found, where, and what noise would give.

    >>> print(sentence(Tails(9000, (5, 5, 5, 5, 0, 0), 40, (0, 0, 0, 0, 0, 0), 5)))
    5 of 40 responses have a token above 4 nats: of the 5 tokens above 1, 5 are above 4, and \
noise takes at most 1 in 16 that far
    """
    unit, near, far, n, k = tails.clearest
    rare = f"noise takes at most 1 in {1 / falls(near, far):,.0f} that far"
    beyond = f"{k:,} {'is' if k == 1 else 'are'} above {far:g}, and {rare}"
    if unit == "token":
        has = "has" if tails.far == 1 else "have"
        text = (
            f"{tails.far:,} of {tails.responses:,} responses {has} a token above {FAR:g} nats: "
            f"of the {n:,} {'token' if n == 1 else 'tokens'} above {near:g}, {beyond}"
        )
    else:
        text = (
            f"of {tails.responses:,} responses, {n:,} have a mean |log p - log q| above {near:g} "
            f"nats: {beyond}"
        )
    return text + (f"; furthest: {tails.worst[0]}" if tails.worst else "")
