# Divergences: one quantity with the forms in which it can be computed.
#
# One sign convention: log_ratio = logp_train - logp_infer, and the tokens come from the infer
# kernel.  Axes: N sampled tokens, R positions, V vocabulary.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from servanda.errors import EvidenceError
from servanda.registry import Registry
from servanda.theory.divergence.pairs import Floats, Pairs
from servanda.theory.divergence.row_sums import RowSums, row_sums
from servanda.theory.sampling import entropy_nats, log_softmax

Form = Literal["logprob", "top1", "routes", "gates", "logits", "topk"]
Span = tuple[float, float]
OF_EXPERTS: tuple[Form, ...] = ("routes", "gates")
SAMPLED: tuple[Form, ...] = ("logprob", "top1", *OF_EXPERTS)


@dataclass(frozen=True)
class Divergence:
    """A quantity and its forms.

    Args:
        unit: "nat", or "" for a pure number.
        outcome: whether it is defined on slices of outcomes.
        forms: "logprob" uses the sampled token's two logprobs, "top1" the two top-1 tokens,
            "routes" the experts of both sides, "gates" their weights too, "logits" whole rows
            (exact), "topk" the top-k tokens (an interval that contains the exact value).
        spans: smallest and largest value of each form.
        sources: source of each form.
    """

    name: str
    unit: str
    outcome: bool = False
    forms: dict[Form, Callable[..., Floats]] = field(default_factory=dict)
    spans: dict[Form, Span] = field(default_factory=dict)
    sources: dict[Form, str] = field(default_factory=dict)

    @property
    def sampled_form(self) -> Form | None:
        """The form on sampled tokens; None if full rows are needed."""
        return next((form for form in SAMPLED if form in self.forms), None)

    @property
    def of_experts(self) -> bool:
        """Whether it needs the experts that both sides route a token to."""
        return self.sampled_form in OF_EXPERTS

    def span_of(self, form: Form) -> Span:
        """Smallest and largest value of a form."""
        return self.spans[form]

    @property
    def span(self) -> Span:
        """The range for one sampled token; for a whole row without a sampled form."""
        return self.span_of(self.sampled_form or "logits")

    @property
    def bounded(self) -> bool:
        return bool(np.isfinite(self.span).all())

    @property
    def signed(self) -> bool:
        """Whether a value may be negative."""
        return self.span[0] < 0


DIVERGENCES: Registry[Divergence] = Registry("metric", plugins="servanda.metrics")
# the exact value of a metric from the sums of each row
OF_SUMS: dict[str, Callable[[RowSums], Floats]] = {}


def divergence(
    name: str,
    *,
    needs: Form,
    unit: str,
    span: Span = (0.0, math.inf),
    source: str,
    outcome: bool = False,
    of_sums: Callable[[RowSums], Floats] | None = None,
) -> Callable[[Callable[..., Floats]], Callable[..., Floats]]:
    """Register one form of a quantity; a second form of the same name is added to the first.

    Args:
        of_sums: the same exact value from the sums of a row.
    """

    def decorate(function: Callable[..., Floats]) -> Callable[..., Floats]:
        if name not in DIVERGENCES.registered:
            DIVERGENCES.add(name, Divergence(name, unit, outcome))
        metric = DIVERGENCES[name]
        if (metric.unit, metric.outcome) != (unit, outcome):
            raise ValueError(f"two forms of metric {name!r} differ in unit or outcome")
        if needs in metric.forms:
            raise ValueError(f"metric {name!r} has its {needs!r} form already")
        metric.forms[needs] = function
        metric.spans[needs] = span
        metric.sources[needs] = source
        if of_sums is not None:
            OF_SUMS[name] = of_sums
        return function

    return decorate


def log_ratio(logp_train_N: Floats, logp_infer_N: Floats) -> Floats:
    """log(p_train / p_infer) of sampled tokens in float64, [N], nats.

    -inf for a token without mass under the train kernel: that is evidence, not a gap.

    Raises:
        EvidenceError: shapes differ, or a logprob is NaN, +inf, or -inf on infer: a token
            that was sampled had mass, so such a record is invalid and counts as missing.
    """
    train_N = np.asarray(logp_train_N, dtype=np.float64)
    infer_N = np.asarray(logp_infer_N, dtype=np.float64)
    if train_N.shape != infer_N.shape:
        raise EvidenceError(f"{train_N.shape} train logprobs for {infer_N.shape} infer logprobs")
    if not np.isfinite(infer_N).all() or np.isnan(train_N).any() or np.isposinf(train_N).any():
        raise EvidenceError(
            "a sampled token has no usable logprob", hint="drop unusable tokens as missing first"
        )
    return train_N - infer_N


class LogitRows:
    """Two kernels' raw logits at the same positions, with cached intermediate results.

    Rows use float64.  The difference of logits is formed before the normalisers are subtracted, so
    that two nearly equal rows keep their digits.

    Args:
        train_RV, infer_RV: raw logits, [R, V]; -inf marks a token without mass.
    """

    def __init__(self, train_RV: NDArray[np.floating], infer_RV: NDArray[np.floating]) -> None:
        if train_RV.shape != infer_RV.shape:
            raise EvidenceError(f"{train_RV.shape} train logits for {infer_RV.shape} infer logits")
        self._raw = train_RV, infer_RV

    @cached_property
    def train_RV(self) -> Floats:
        return np.asarray(self._raw[0], dtype=np.float64)

    @cached_property
    def infer_RV(self) -> Floats:
        return np.asarray(self._raw[1], dtype=np.float64)

    @cached_property
    def best_R(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where each row of train and of infer is largest; the first of equals, or of NaN."""
        return self._raw[0].argmax(axis=-1), self._raw[1].argmax(axis=-1)

    @cached_property
    def usable_R(self) -> NDArray[np.bool_]:
        """Rows without NaN or +inf, and with some mass on both sides."""
        usable_R = np.ones(len(self._raw[0]), dtype=bool)
        for side_RV, best_R in zip(self._raw, self.best_R, strict=True):
            usable_R &= np.isfinite(np.take_along_axis(side_RV, best_R[:, None], axis=-1)[:, 0])
        return usable_R

    @cached_property
    def _plain(self) -> tuple[NDArray[np.bool_], RowSums, LogitRows] | None:
        """The rows that the compiled library worked, what it returned of them, and the others."""
        at_R = np.flatnonzero(self.usable_R)
        whole = len(at_R) == len(self.usable_R)
        train_RV, infer_RV = (side if whole else side[at_R] for side in self._raw)
        best_train_R, best_infer_R = (best_R[at_R] for best_R in self.best_R)
        answer = row_sums(train_RV, infer_RV, best_train_R, best_infer_R)
        if answer is None or not answer[0].any():
            return None
        plain_R = np.zeros(len(self.usable_R), dtype=bool)
        plain_R[at_R] = answer[0]
        return plain_R, answer[1], LogitRows(*(side_RV[~plain_R] for side_RV in self._raw))

    def by_row(
        self, plain: Callable[[RowSums], Floats], other: Callable[[LogitRows], Floats]
    ) -> Floats:
        """One value of each row, [R]: by the compiled library where the row is plain."""
        if self._plain is None:
            return other(self)
        plain_R, sums, others = self._plain
        values_R = np.empty(len(plain_R))
        values_R[plain_R] = plain(sums)
        if not plain_R.all():
            values_R[~plain_R] = other(others)
        return values_R

    @cached_property
    def log_z(self) -> tuple[Floats, Floats]:
        """Log normalisers of train's and of infer's logits, [R] each, nats."""
        return (
            self.by_row(
                lambda sums: sums.log_z + sums.shift,
                lambda rows: rows.train_RV.max(axis=-1) - rows.train_logp_RV.max(axis=-1),
            ),
            self.by_row(
                lambda sums: sums.log_z,
                lambda rows: rows.infer_RV.max(axis=-1) - rows.infer_logp_RV.max(axis=-1),
            ),
        )

    @cached_property
    def infer_entropy_R(self) -> Floats:
        """Entropy of infer, [R], nats."""
        return self.by_row(lambda sums: sums.entropy, lambda r: entropy_nats(r.infer_logp_RV))

    def logp(self, token_R: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Logprob of one token of each row on train and on infer, [R] each, nats."""
        at_R = np.arange(len(token_R))
        train_R, infer_R = (side_RV[at_R, token_R].astype(np.float64) for side_RV in self._raw)
        return train_R - self.log_z[0], infer_R - self.log_z[1]

    @cached_property
    def train_logp_RV(self) -> Floats:
        return log_softmax(self.train_RV)

    @cached_property
    def infer_logp_RV(self) -> Floats:
        return log_softmax(self.infer_RV)

    @cached_property
    def neither_RV(self) -> NDArray[np.bool_]:
        """Tokens without mass on both sides."""
        return np.isneginf(self.train_RV) & np.isneginf(self.infer_RV)

    @cached_property
    def drift_RV(self) -> Floats:
        """train - infer logits; 0 without mass on both sides, +-inf without mass on one."""
        with np.errstate(invalid="ignore"):
            return np.where(self.neither_RV, 0.0, self.train_RV - self.infer_RV)

    @cached_property
    def pairs(self) -> Pairs:
        """p, q and shared quantities of divergences, [R, V]."""
        return Pairs(self.train_logp_RV, self.infer_logp_RV, self.log_weight_RV)

    @cached_property
    def log_weight_RV(self) -> Floats:
        """log(p_train / p_infer) of every token, exact to the last digits near 0.

        The shift between the two normalisers is log E_infer exp(drift), taken around a
        drift of the row's own size so that expm1 and log1p keep the small digits.  0 without mass
        on both sides.
        """
        q_RV = np.exp(self.infer_logp_RV)
        finite_RV = np.isfinite(self.drift_RV)
        drift_RV = np.where(finite_RV, self.drift_RV, 0.0)
        middle_R1 = (q_RV * drift_RV).sum(axis=-1, keepdims=True)
        centred_RV = np.where(self.neither_RV, 0.0, drift_RV - middle_R1)
        # row by row: a row with a large difference must not cost other rows their digits
        near_R1 = (finite_RV & (np.abs(centred_RV) < 1.0)).all(axis=-1, keepdims=True)
        small_RV = np.where(near_R1, centred_RV, 0.0)
        shift_R1 = np.log1p((q_RV * np.expm1(small_RV)).sum(axis=-1, keepdims=True))
        with np.errstate(invalid="ignore"):
            weight_RV = np.where(
                near_R1, small_RV - shift_R1, self.train_logp_RV - self.infer_logp_RV
            )
        return np.where(self.neither_RV, 0.0, weight_RV)


def of_sums(name: str, sums: RowSums) -> Floats:
    """The exact value of a metric from the sums of each row, [R]."""
    # a sum may round to a little beyond what the metric can be
    return np.clip(OF_SUMS[name](sums), *DIVERGENCES[name].span_of("logits"))


def exact(name: str, rows: LogitRows) -> Floats:
    """The exact value of a metric at each position, [R]; NaN for unusable rows."""
    form = DIVERGENCES[name].forms["logits"]
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        values_R = rows.by_row(partial(of_sums, name), form) if name in OF_SUMS else form(rows)
    return np.where(rows.usable_R, values_R, np.nan)


def sampled(name: str, columns: Mapping[str, Floats]) -> Floats:
    """The value of a metric at each sampled token, [N].

    Args:
        columns: "logp_train", "logp_infer", for flips "top1_train", "top1_infer", for routes
            "routes_train", "routes_infer", [N, L, K], and for gates "gates_train", "gates_infer",
            [N, L, K, 2].
    """
    metric = DIVERGENCES[name]
    form = metric.sampled_form
    if form == "logprob":
        with np.errstate(over="ignore"):  # a weight beyond the range of floats is infinite
            return metric.forms[form](columns["logp_train"], columns["logp_infer"])
    assert form is not None
    return metric.forms[form](columns[f"{form}_train"], columns[f"{form}_infer"])
