# Clauses about a clip range: the share that the gap between the kernels uses.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from servanda.contract.clause import Clause
from servanda.contract.model import Contract
from servanda.judgement.clauses.base import Array, Cell, View, limit_of
from servanda.judgement.clauses.chain_certificate import ChainCertificate
from servanda.judgement.clauses.chain_metrics import CHAIN, Lack
from servanda.judgement.clauses.scaling import Feed, share_beyond
from servanda.theory.bounds.gradient import ratio_budget


@CHAIN.register("ratio_budget")
@dataclass(frozen=True)
class RatioBudget(ChainCertificate):
    """|log w| over log(1 + high) where w > 1, and over -log(1 - low) where w < 1."""

    clip_range: tuple[float, float] = (0.2, 0.2)

    meaning: ClassVar[str] = (
        "the share of the PPO clip range that the gap between the kernels uses up before the "
        "policy has moved (1: all of it, on the side of the token's ratio)"
    )
    example: ClassVar[str] = (
        "{id: budget, metric: ratio_budget, aggregate: p99, at_most: 0.5, slices: [all]}"
    )
    takes: ClassVar[frozenset[str]] = frozenset({"aggregate", "clip"})
    assumes: ClassVar[tuple[str, ...]] = ("one_ratio",)

    @classmethod
    def undeclared(cls, contract: Contract, /) -> Iterator[Lack]:
        gradient = contract.gradient
        if gradient is None or gradient.clip_range is None:
            message = "ratio_budget is a share of the clip range, and none is declared"
            yield Lack(message, "declare gradient: {clip_range: [0.2, 0.28], ratio: bypass}")
        elif gradient.ratio == "decoupled":
            message = "in decoupled mode the clip range bounds the policy's own update only: the "
            yield Lack(
                f"{message}gap between the kernels uses none of it",
                "promise weight_gap of the weighting that corrects it, or declare ratio: bypass "
                "if the clipped ratio is new policy over infer",
            )
        elif gradient.ratio is None:
            message = "ratio_budget needs to know which ratio is clipped, and none is declared"
            hint = "declare gradient: {ratio: bypass} if it is new policy over infer"
            yield Lack(message, hint)

    @classmethod
    def amiss(cls, clause: Clause, /) -> Iterator[Lack]:
        if clause.aggregate is None:
            message = f"clause {clause.id!r} needs an aggregate"
            yield Lack(message, "add aggregate: p99, or mean with clip: 1")
        elif clause.aggregate == "max":
            message = "a sample cannot certify a maximum: the next token may exceed it"
            yield Lack(message, "write p99.9", "aggregate")
        elif clause.percentile is not None and clause.clip is not None:
            message = f"clip bounds a mean; {clause.aggregate} does not need it"
            yield Lack(message, "remove clip", "clip")
        elif clause.percentile is None and clause.clip is None:
            message = "the mean of ratio_budget has no bound, so no sample can certify it"
            yield Lack(message, "add clip: 1, or promise aggregate: p99", "aggregate")
        elif limit_of(clause) >= 1:
            message = f"a share of {limit_of(clause):g} leaves the policy's own update nothing"
            yield Lack(message, "write a share below 1, such as 0.5", "at_most")

    @classmethod
    def of(cls, contract: Contract, clause: Clause) -> RatioBudget:
        assert contract.gradient is not None  # lint rejects it
        assert contract.gradient.clip_range is not None
        limit, clip = limit_of(clause), clause.clip
        if clip is not None:
            feed = Feed(limit / clip, clip)
        else:
            feed = Feed(share_beyond(clause), threshold=limit)
        return cls(feed, contract.gradient.clip_range)

    def values(self, cell: Cell, view: View) -> Array:
        """The used share of its side by each token's ratio, [N]."""
        log_ratio_N = view.log_ratio()
        known_N = ~np.isnan(log_ratio_N)
        used_N = np.full(len(log_ratio_N), np.nan)
        budget = ratio_budget(np.abs(log_ratio_N[known_N]), *self.clip_range)
        used_N[known_N] = np.where(log_ratio_N[known_N] > 0, budget.used_up, budget.used_down)
        return used_N
