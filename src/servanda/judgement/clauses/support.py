# Clauses about support: the train mass on tokens that infer can never or hardly ever sample.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from servanda.contract.clause import Clause
from servanda.contract.model import Contract
from servanda.judgement.clauses.base import Array, Cell, View, limit_of
from servanda.judgement.clauses.chain_certificate import ChainCertificate, between
from servanda.judgement.clauses.chain_metrics import CHAIN, Lack

_CAP = 10.0


@CHAIN.register("support_mass")
@dataclass(frozen=True)
class SupportMass(ChainCertificate):
    """U_C = 1 - E_infer min(w, C) = sum (p - C q)^+: see bounds.missing_mass."""

    cap: float = _CAP

    meaning: ClassVar[str] = (
        "the train kernel's mass on tokens that infer cannot sample, plus its mass beyond `clip` "
        "(10) times infer's on the others: the part that no weight up to `clip` can correct"
    )
    example: ClassVar[str] = "{id: support, metric: support_mass, at_most: 0.01, slices: [all]}"
    takes: ClassVar[frozenset[str]] = frozenset({"clip"})

    @classmethod
    def amiss(cls, clause: Clause, /) -> Iterator[Lack]:
        if clause.clip is not None and clause.clip < 1:
            message = f"clip caps the weights of support_mass: at {clause.clip:g} even identical "
            yield Lack(
                f"{message}kernels would lack {1 - clause.clip:g}",
                "write clip: 10, or leave it out; clip: 1 gives the total variation",
                "clip",
            )

    @classmethod
    def of(cls, contract: Contract, clause: Clause) -> SupportMass:  # noqa: ARG003 - the protocol's
        cap = _CAP if clause.clip is None else clause.clip
        return cls(between(limit_of(clause), (1.0 - cap, 1.0)), cap)

    def values(self, cell: Cell, view: View) -> Array:
        """1 - min(w, C) of each token, [N]; of a kernel with itself (w - C)^+ (see `Gap.gap`)."""
        if view.itself:
            with np.errstate(over="ignore"):
                return np.maximum(np.exp(view.log_ratio()) - self.cap, 0.0)
        return -np.expm1(np.minimum(view.log_ratio(), np.log(self.cap)))
