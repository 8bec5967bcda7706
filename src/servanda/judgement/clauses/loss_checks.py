# Validity checks of the weights that a loss used: exact counts of the recorded tokens.
#
# A promise about a policy gradient supposes that the loss weighs tokens as the contract declares.
# These checks say so of the tokens at hand.  They are facts, not estimates of a mean: the loss used
# these weights on these tokens, and nothing follows for other ones.

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from servanda.contract.clause import Clause
from servanda.contract.model import WHOLE, Contract
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
    limit_of,
)
from servanda.judgement.clauses.chain_metrics import Lack
from servanda.judgement.clauses.gradient import Gap, psi_of
from servanda.judgement.clauses.guards import errors_of
from servanda.theory.bounds.applied_weights import Applied, Fits, differing, fits
from servanda.theory.bounds.importance_weights import Psi
from servanda.traces.rollouts import LOSS_MASK, LOSS_WEIGHT

ALL = 0.999  # share of the tokens that a weighting has to explain before it is named
_UNRECORDED = "no weight of the loss was recorded: the trainer has to hand over loss_weights"


@dataclass(frozen=True)
class LossSums:
    """Sums over trained tokens; `+` adds disjoint ones.

    Args:
        tokens: trained tokens; known: those of which it is recorded whether the loss kept them;
            kept: those that it kept.
        weighted: tokens with a recorded factor; total, squares: sums of it and of its square.
        compared: tokens whose declared weight is known; differing: those with another one.
        dropped, revived: of these, those that only the loss drops, and only the declaration.
        infinite, negative: tokens with an impossible weight.
    """

    tokens: int = 0
    known: int = 0
    kept: int = 0
    weighted: int = 0
    total: float = 0.0
    squares: float = 0.0
    compared: int = 0
    differing: int = 0
    dropped: int = 0
    revived: int = 0
    infinite: int = 0
    negative: int = 0
    fits: Fits = field(default_factory=Fits)

    @classmethod
    def of(cls, applied: Applied, psi: Psi, *, whole: bool) -> LossSums:
        """Of trained tokens of some sequences.

        Args:
            psi: the declared weighting.
            whole: whether they are all trained tokens of their sequences: only then are other
                weightings compared.
        """
        factor_N, kept_N = applied.factor_N, applied.kept_N
        told_K = factor_N[np.isfinite(factor_N) & applied.weighed]
        compared_N, differing_N = differing(applied, psi)
        declares_N = psi.weight(np.exp(np.minimum(applied.log_ratio_N, 700.0))) > 0
        return cls(
            len(factor_N),
            int((~np.isnan(kept_N)).sum()),
            int((kept_N == 1).sum()),
            len(told_K),
            float(told_K.sum()),
            float((told_K**2).sum()),
            int(compared_N.sum()),
            int(differing_N.sum()),
            int((differing_N & (kept_N == 0) & declares_N).sum()),
            int((differing_N & (kept_N == 1) & ~declares_N).sum()),
            int(np.isinf(factor_N).sum()),
            int((factor_N < 0).sum()),
            fits(applied, psi) if whole and applied.weighed and differing_N.any() else Fits(),
        )

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            **{n: getattr(self, n) + getattr(other, n) for n in self.__dataclass_fields__}
        )

    @classmethod
    def joined(cls, parts: Sequence[LossSums]) -> LossSums:
        """The sums of disjoint parts, independent of their order."""
        totals = {n: math.fsum(getattr(p, n) for p in parts) for n in ("total", "squares")}
        return replace(sum(parts, cls()), **totals)

    @property
    def kept_ratio(self) -> float | None:
        """Share of the trained tokens that the loss kept; None without a record."""
        return self.kept / self.known if self.known else None

    @property
    def mean(self) -> float | None:
        """Mean weight over the trained tokens, dropped ones included."""
        return self.total / self.weighted if self.weighted else None

    @property
    def effective_ratio(self) -> float | None:
        """Effective sample size by the number of tokens: (sum of a)^2 / (n sum of a^2).

        0 if no token has weight.
        """
        if not self.weighted:
            return None
        return self.total**2 / (self.weighted * self.squares) if self.squares else 0.0

    @property
    def declared_ratio(self) -> float | None:
        """Share of the tokens with their declared weight."""
        return 1 - self.differing / self.compared if self.compared else None

    def impossible(self) -> str:
        """The sentence about weights that are infinite or negative; "" without any."""
        for n, word in ((self.infinite, "infinite"), (self.negative, "negative")):
            if n:
                return f"the loss weight of {n:,} of {self.tokens:,} trained tokens is {word}"
        return ""

    def difference(self, declared: str) -> str:
        """The sentence about tokens with another weight than declared."""
        parts = [
            f"{n:,} {words}"
            for n, words in (
                (self.dropped, "were dropped by the loss"),
                (self.revived, "were to be dropped and were not"),
            )
            if n
        ]
        text = (
            f"the loss did not use the declared weighting ({declared}) on {self.differing:,} of "
            f"{self.compared:,} tokens"
        )
        text += f", of which {' and '.join(parts)}" if parts else ""
        if not self.fits.n:
            return text
        named = self.fits.best(ALL)
        return f"{text}; its weights are {named}" if named else f"{text}; no known weighting fits"


def applied_of(
    train_N: Array, infer_N: Array, error_N: Array, columns: Mapping[str, Array], sequence_N: Array
) -> Applied | None:
    """What the loss did with some tokens; None if its weights are not recorded.

    Args:
        columns: LOSS_WEIGHT, LOSS_MASK, or both, [N]; NaN if missing.
    """
    weight_N, mask_N = (
        None if (c := columns.get(name)) is None or np.isnan(c).all() else c
        for name in (LOSS_WEIGHT, LOSS_MASK)
    )
    if weight_N is None and mask_N is None:
        return None
    usable_N = np.isfinite(infer_N) & (train_N < np.inf)
    with np.errstate(invalid="ignore"):
        ratio_N = np.where(usable_N, train_N - infer_N, np.nan)
    return Applied.of(ratio_N, error_N, weight_N, mask_N, sequence_N)


def declared_text(contract: Contract) -> str:
    """The declared weighting as a contract writes it; "" if there is none."""
    declared = contract.gradient.weighting if contract.gradient else None
    if declared is None or isinstance(declared, str):
        return declared or ""
    return ", ".join(
        f"{name} {[*value] if isinstance(value, tuple) else f'{value:g}'}"
        for name, value in declared.given.items()
    )


@dataclass(frozen=True)
class LossCheck(Kind):
    """A check on what the loss used.

    Args:
        psi, weighting: the contract's weighting, and its text.
    """

    psi: Psi
    weighting: str
    reads: ClassVar[Reads] = "loss"

    def join(self, counted: Sequence[LossSums]) -> LossSums:
        return LossSums.joined(counted)

    words: ClassVar[Mapping[str, str]] = {
        "holds": "it is at least {at_least}: counted, without chance",
        "violated": "it is less: the loss did something else on these tokens",
    }

    @classmethod
    def declared(cls, contract: Contract) -> LossCheck:
        return cls(psi_of(contract), declared_text(contract))

    @classmethod
    def lacks(cls, contract: Contract, clause: Clause, /) -> Iterator[Lack]:
        """A trainer's record is needed."""
        workload = contract.all_workloads.get(contract.workload_of(clause))
        if workload is not None and workload.source != "trainer":
            message = f"{clause.metric} is about a trainer's loss, and engines have none"
            yield Lack(message, "write workload: {source: trainer}, or remove the clause")

    def weigh(self, cell: Cell, view: View) -> LossSums:
        inside_N = view.mask(cell.cut)
        pair = view.pair
        error_N = errors_of(pair.train) + errors_of(pair.infer)
        size_S = pair.infer.length_S
        sequence_N = np.repeat(np.arange(len(size_S)), size_S)
        train_N, infer_N = (s.columns["logp"][inside_N] for s in (pair.train, pair.infer))
        columns = {
            n: c[inside_N] for n, c in pair.infer.columns.items() if n in (LOSS_WEIGHT, LOSS_MASK)
        }
        applied = applied_of(train_N, infer_N, error_N[inside_N], columns, sequence_N[inside_N])
        unknown = int((view.mask(cell.cut, unknown=True) & ~inside_N).sum())
        if applied is None:
            return LossSums(tokens=int(inside_N.sum()) + unknown)
        whole = cell.cut.name == WHOLE
        return LossSums.of(applied, self.psi, whole=whole) + LossSums(tokens=unknown)

    def judge(self, cell: Cell, rounds: list[Any], floor: object, look: Interim) -> CellVerdict:
        sums, limit = sum((r for r in rounds if r is not None), LossSums()), limit_of(cell.clause)
        verdict = blank(
            cell, "inconclusive", kind="fact", limit=limit, n=sums.tokens, units="tokens"
        )
        value, least, n = self.measured(sums)
        if not sums.tokens:
            return verdict.but(open=True, note="nothing was measured yet")
        if value is None:
            return verdict.but(note=_UNRECORDED, missing=sums.tokens)
        verdict = verdict.but(value=value, missing=sums.tokens - n)
        if least >= limit:
            return verdict.but(outcome="holds")
        if value >= limit:
            missing = f"{sums.tokens - n:,} of {sums.tokens:,} tokens have no recorded weight"
            return verdict.but(note=missing)
        return verdict.but(outcome="violated", note=self.why(sums))

    def invalidates(self, other: Kind) -> bool:
        return False

    def measured(self, sums: LossSums) -> tuple[float | None, float, int]:
        """The value, its least possible value given the missing tokens, and tokens with one."""
        raise NotImplementedError

    def why(self, sums: LossSums) -> str:
        return ""


@GUARDS.register("declared_weight_ratio")
class DeclaredWeight(LossCheck):
    """Share of the trained tokens whose weight in the loss is the declared one."""

    @classmethod
    def lacks(cls, contract: Contract, clause: Clause, /) -> Iterator[Lack]:
        yield from super().lacks(contract, clause)
        if not declared_text(contract):
            yield Lack(
                "declared_weight_ratio compares with the declared weighting, and none is declared",
                "declare gradient: {weighting: {tis: 2.0}}, or naive where nothing is corrected",
            )

    def invalidates(self, other: Kind) -> bool:
        return isinstance(other, Gap)  # the gap that the declared weighting would leave

    def measured(self, sums: LossSums) -> tuple[float | None, float, int]:
        same = sums.compared - sums.differing
        return sums.declared_ratio, same / max(sums.tokens, 1), sums.compared

    def why(self, sums: LossSums) -> str:
        return sums.difference(self.weighting)


@GUARDS.register("loss_kept_ratio")
class LossKept(LossCheck):
    """Share of the trained tokens that the loss did not drop: mask 1, and a weight above 0."""

    def measured(self, sums: LossSums) -> tuple[float | None, float, int]:
        return sums.kept_ratio, sums.kept / max(sums.tokens, 1), sums.known

    def why(self, sums: LossSums) -> str:
        return f"the loss dropped {sums.known - sums.kept:,} of {sums.known:,} trained tokens"


@GUARDS.register("mean_weight_ratio")
class MeanWeight(LossCheck):
    """Sum of the weights that the loss used, by the number of trained tokens."""

    def measured(self, sums: LossSums) -> tuple[float | None, float, int]:
        return sums.mean, sums.total / max(sums.tokens, 1), sums.weighted

    def why(self, sums: LossSums) -> str:
        times = f"{1 / sums.mean:.1f} times" if sums.mean else "infinitely"
        return f"the loss counts this batch {times} less than its tokens"


@GUARDS.register("effective_ratio")
class EffectiveSize(LossCheck):
    """Effective sample size of the weights that the loss used, by the number of tokens."""

    def measured(self, sums: LossSums) -> tuple[float | None, float, int]:
        value = sums.effective_ratio
        whole = value is not None and sums.weighted == sums.tokens
        # a token of unknown weight could outweigh all others
        return value, value if whole and value is not None else 0.0, sums.weighted

    def why(self, sums: LossSums) -> str:
        size = (sums.effective_ratio or 0.0) * sums.weighted
        return f"{sums.weighted:,} tokens have the variance of {size:,.0f} equally weighted ones"
