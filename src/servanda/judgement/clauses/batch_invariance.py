# Batch invariance: whether a text's logprobs depend on the other rows of its batch.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from servanda.judgement.clauses.base import Array, Cell, CellVerdict, Interim, Kind, blank, limit_of


@dataclass(frozen=True)
class Company:
    """One kernel's logprobs of the same tokens, [N], scored alone and in full batches."""

    alone_N: Array
    together_N: Array
    batch_size: int


@dataclass(frozen=True)
class Difference:
    """The effect of batching: number of tokens with any changed bit, and largest change, nats."""

    largest: float = 0.0
    n: int = 0
    differing: int = 0
    missing: int = 0
    batch_size: int = 1

    @classmethod
    def of(cls, company: Company) -> Difference:
        alone_N, together_N = (
            np.ascontiguousarray(side, dtype=np.float64)
            for side in (company.alone_N, company.together_N)
        )
        differing_N = alone_N.view(np.int64) != together_N.view(np.int64)
        with np.errstate(invalid="ignore"):
            size_N = np.where(differing_N, np.abs(alone_N - together_N), 0.0)
        known_N = ~np.isnan(alone_N) & ~np.isnan(together_N)
        return cls(
            largest=float(size_N[known_N].max(initial=0.0)),
            n=int(known_N.sum()),
            differing=int(differing_N[known_N].sum()),
            missing=int((~known_N).sum()),
            batch_size=company.batch_size,
        )


@dataclass(frozen=True)
class BatchInvariance(Kind):
    """Exact for the scored texts; at a limit of 0 it compares bits and has no noise floor."""

    source = "batches"
    offline_only: ClassVar[str] = "batches are put together offline"

    words: ClassVar[Mapping[str, str]] = {
        "holds": "no logprob changes by more than the limit: a fact about these texts",
        "violated": "one does",
    }

    def weigh(self, cell: Cell, paths: Mapping[str, Company]) -> dict[str, Difference]:
        return {path: Difference.of(company) for path, company in paths.items()}

    def judge(
        self,
        cell: Cell,
        rounds: list[dict[str, Difference]],
        floor: float | None,
        look: Interim,
    ) -> CellVerdict:
        limit = limit_of(cell.clause)
        if not rounds:
            return blank(cell, "inconclusive", "nothing was measured yet", kind="fact", limit=limit)
        paths = rounds[0]
        missing = sum(d.missing for d in paths.values())
        value = max(d.largest for d in paths.values())
        verdict = blank(
            cell,
            "holds",
            "; ".join(
                f"{path}: {d.differing:,} of {d.n:,} logprobs change in batches of "
                f"{d.batch_size}, by at most {d.largest:.2g} nats"
                for path, d in paths.items()
            ),
            kind="fact",
            unit="nat",
            value=value,
            limit=limit,
            n=sum(d.n for d in paths.values()),
            units="tokens",
            missing=missing,
        )
        differing = any(d.differing for d in paths.values())
        if value > limit or (limit == 0 and differing):
            return verdict.but(outcome="violated")
        if missing:
            return verdict.but(outcome="error")
        return verdict
