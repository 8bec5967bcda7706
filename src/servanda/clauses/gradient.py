# Promises about policy gradients: what the weighting of tokens leaves uncorrected.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from servanda.bounds import PSI, Psi, weight_gap
from servanda.bounds.weighting import naive
from servanda.clauses.base import Array, Cell, View
from servanda.clauses.chain import CHAIN, ChainCertificate, Lack, between, limit_of
from servanda.contract import Clause, Contract, Weighting


def psi_of(contract: Contract) -> Psi:
    """The declared weighting; naive where the contract has none."""
    declared = contract.gradient.weighting if contract.gradient else None
    if isinstance(declared, Weighting):
        ((name, value),) = declared.given.items()
        return PSI[name](value)
    return PSI[declared]() if declared else naive()


@CHAIN.register("weight_gap")
@dataclass(frozen=True)
class WeightGap(ChainCertificate):
    """D_psi = sum |p - q psi(w)|, the mean over tokens of what the weighting leaves."""

    psi: Psi = naive()  # noqa: RUF009 - frozen

    meaning: ClassVar[str] = (
        "what the declared weighting of tokens leaves uncorrected: the share of a policy gradient "
        "that still belongs to the other kernel (0 to 2; twice the total variation without any)"
    )
    example: ClassVar[str] = "{id: weights, metric: weight_gap, at_most: 0.02, slices: [all]}"

    @classmethod
    def undeclared(cls, contract: Contract) -> Iterator[Lack]:
        if psi_of(contract).name == "is":
            yield Lack(
                "importance weights have no largest value, so no sample can certify their gap",
                "declare gradient: {weighting: {tis: 2.0}}, or promise support_mass: where infer "
                "can draw whatever train can, nothing is left",
            )

    @classmethod
    def of(cls, contract: Contract, clause: Clause) -> WeightGap:
        psi = psi_of(contract)
        return cls(between(limit_of(clause), psi.span), psi)

    def values(self, cell: Cell, view: View) -> Array:
        return weight_gap(view.log_ratio(), self.psi)
