# Clauses about whole sequences: one value per dispatched response.

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from servanda.contract.clause import Clause
from servanda.contract.model import Contract
from servanda.judgement.clauses.base import Array, Cell, View, limit_of
from servanda.judgement.clauses.chain_metrics import CHAIN, ChainCertificate, Lack, between
from servanda.judgement.clauses.statistical import (
    BySequence,
    Certificate,
    Noise,
    Units,
    sequence_units,
)
from servanda.theory.bounds.sequence import shortfall


@dataclass(frozen=True)
class SequenceCertificate(BySequence, ChainCertificate):
    """A metric of the chain with one value per sequence."""

    def units(self, cell: Cell, view: View) -> Units:
        return sequence_units(cell, view, self.feed.x(self.values(cell, view)))

    def noise(self, cell: Cell, view: View) -> Noise:
        """(sum of x, sequences) of a peer: on the slice, and on the whole."""
        x_S = self.feed.x(self.values(cell, view))
        whole_S = ~np.isnan(x_S)
        parts = (x_S[whole_S & view.may_meet[cell.cut]], x_S[whole_S])
        inside, whole = ((math.fsum(x.tolist()), len(x)) for x in parts)
        return inside, whole


@CHAIN.register("reward_drift")
@dataclass(frozen=True)
class RewardDrift(SequenceCertificate):
    """(R_max - R_min) TV(P, Q): the largest drift of any reward in the range."""

    meaning: ClassVar[str] = (
        "the largest possible difference of the expected reward of whole responses between the two "
        "kernels, for any reward within its range"
    )
    example: ClassVar[str] = "{id: reward, metric: reward_drift, at_most: 0.05, slices: [all]}"
    assumes: ClassVar[tuple[str, ...]] = ("reward_range", "same_reward")

    @classmethod
    def undeclared(cls, contract: Contract, /) -> Iterator[Lack]:
        if contract.reward is None:
            yield Lack(
                "reward_drift is in units of the reward, and no range is declared",
                "declare reward: {range: [0, 1]}",
            )

    @classmethod
    def of(cls, contract: Contract, clause: Clause) -> Certificate:
        assert contract.reward is not None  # lint rejects it
        low, high = contract.reward.range
        return cls(between(limit_of(clause), (0.0, 1.0), high - low))

    def values(self, cell: Cell, view: View) -> Array:
        """(R_max - R_min)(1 - W)^+ of each sequence, [S]; W is the product of its weights."""
        log_weight_S = view.over_sequences(view.log_ratio())
        return shortfall(log_weight_S) * self.feed.scale

    def of_rounding(self, error_N: Array, length_S: Array) -> float:
        """By a normal approximation of the sum of errors: 8 % too low for one token, 1 % for 8."""
        sigmas = [float(error_N[-1]) * math.sqrt(n / 3) for n in length_S.tolist()]
        # E (1 - exp S)^+ of a normal S with mean 0
        drifts = [0.5 - 0.5 * math.exp(s**2 / 2) * math.erfc(s / math.sqrt(2)) for s in sigmas]
        return self.feed.scale * float(np.mean(drifts)) if drifts else 0.0
