# Limits that allow what a number format costs: `times_format`.
#
# float32 and bfloat16 are different kernels at equal weights, and how far apart they are depends on
# the model.  So a further kernel scores infer's tokens: train in the other format.  Of two formats
# it is train in infer's, and infer may be `times_format` as far from train as that one is.  Of one
# 16-bit format it is train in float32, and infer may be so many times as far from it as train is.
# Both distances are measured on the same tokens, so that a fault as large as the format's own
# rounding, which a limit in numbers must let pass, is still seen.

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from servanda.contract.model import Kernel
from servanda.judgement.clauses.base import FORMAT, Array, Cell, CellVerdict, Interim, View, peak
from servanda.judgement.clauses.statistical import Certificate, Grown, Tally, units_of
from servanda.theory.stats.bets import log_mean_exp
from servanda.theory.stats.mean_ratio import MeanRatio, ratios

HALF = ("bfloat16", "float16")
_BY_NUMBER, _BY_FORMAT = np.log(0.8), np.log(0.2)  # shares of the evidence of each rule
_LOCAL = "transformers"  # the engine that runs a checkpoint in any format


@dataclass(frozen=True)
class FormatKernel:
    """The kernel that shows what a format costs.

    Args:
        kernel: train in another format; `whole`: in float32, for two kernels of one format.
        format: the one whose cost it shows.
    """

    kernel: Kernel
    whole: bool
    format: str


def format_kernel(train: Kernel, infer: Kernel) -> FormatKernel | str:
    """The kernel that shows the cost of the format, or why there is none."""
    for side, kernel in (("train", train), ("infer", infer)):
        if kernel.quantization is not None:
            return f"{side} is quantised, which is more than a number format"
    if train.engine != _LOCAL:
        return f"train is no kernel of engine {_LOCAL}, which could run in another format"
    if infer.engine not in (_LOCAL, "vllm"):
        return f"the number format of engine {infer.engine} is not declared"
    coarse = next((k.dtype for k in (infer, train) if k.dtype in HALF), "")
    if not coarse:
        return "neither kernel is in a 16-bit format"
    whole = train.dtype == infer.dtype
    dtype = "float32" if whole else infer.dtype
    kernel = train.model_copy(update={"dtype": dtype, "title": f"train in {dtype}"})
    return FormatKernel(kernel, whole, coarse)


@dataclass(frozen=True)
class FormatGrown(Grown):
    """One round, with the pairs of distances."""

    pairs: MeanRatio

    def __add__(self, other: Grown) -> FormatGrown:
        assert isinstance(other, FormatGrown)
        both = super().__add__(other)
        return FormatGrown(both.process, both.below, both.above, self.pairs + other.pairs)


@dataclass(frozen=True)
class FormatCertificate(Certificate):
    """A mean of total variation at most a number, or at most `times` the cost of a format."""

    times: float = 1.0
    format: str = ""
    whole: bool = False
    peers: ClassVar[tuple[str, ...]] = (FORMAT,)

    def weigh(self, cell: Cell, view: View) -> Grown:
        own = super().weigh(cell, view)
        pairs = self._pairs(cell, view) if FORMAT in view.peers else MeanRatio(ratios(self.times))
        return FormatGrown(own.process, own.below, own.above, pairs)

    def _pairs(self, cell: Cell, view: View) -> MeanRatio:
        """The two distances of each unit; see `_distances`."""
        x_N, y_N = self._distances(view)
        inside_N = view.inside(cell.cut) == 1
        x_N, y_N = (np.where(inside_N | np.isnan(v), v, 0.0) for v in (x_N, y_N))
        x, y = (units_of(cell, view, v) for v in (x_N, y_N))
        missing = int(x.missing_G.sum())
        if cell.claim == "realised":
            return MeanRatio.of_units(x.x_U, y.x_U, ratios(self.times), missing)
        groups = len(x.missing_G)
        x_G, y_G = (
            np.bincount(v.group_U, weights=v.x_U, minlength=groups) / cell.capacity for v in (x, y)
        )
        # a group with a missing token may have had any x and y in its room
        whole_G = x.missing_G == 0
        lost = groups - int(whole_G.sum())
        return MeanRatio.of_units(x_G[whole_G], y_G[whole_G], ratios(self.times), lost)

    def _distances(self, view: View) -> tuple[Array, Array]:
        """Of each token of infer, the terms of two total variations, in [0, 1]; NaN if unknown.

        Given the tokens before it, each has the mean of its total variation: of x from infer's
        distribution, and of y by importance weights, cut at 1.
        """
        infer_N, train_N = view.pair.infer.columns["logp"], view.pair.train.columns["logp"]
        other_N = view.peers[FORMAT].pair.train.columns["logp"]
        known_N = view.usable_N & view.peers[FORMAT].usable_N
        with np.errstate(invalid="ignore", over="ignore"):
            train_N, other_N = (np.exp(logp_N - infer_N) for logp_N in (train_N, other_N))
        # the kernel that both are compared with, and the one that is as far from it as is usual
        from_N, usual_N = (other_N, train_N) if self.whole else (train_N, other_N)
        x_N = np.clip(1 - from_N, 0, 1)
        y_N = np.clip(usual_N - from_N, 0, 1)
        return np.where(known_N, x_N, np.nan), np.where(known_N, y_N, np.nan)

    def judge(
        self, cell: Cell, rounds: list[Grown], floor: float | None, look: Interim
    ) -> CellVerdict:
        pairs = [r.pairs for r in rounds if isinstance(r, FormatGrown) and r.pairs.n]
        if not pairs:
            return super().judge(cell, rounds, floor, look)
        total, own = sum(pairs[1:], pairs[0]), super().judge(cell, rounds, None, look)
        assert own.e_holds is not None and own.e_violated is not None
        # either rule suffices: a mixture of two e-values is one, and so is the smaller
        by_format = log_mean_exp(total.growth()[0])
        e_holds = float(np.logaddexp(own.e_holds + _BY_NUMBER, by_format + _BY_FORMAT))
        e_violated = min(own.e_violated, peak([p.growth()[1] for p in pairs], cell.claim))
        noise = None if floor is None else self.feed.value(floor)
        class_, words = self._words(total, look)
        rounding = f"{class_}: {words}"
        own = own.but(floor=noise, e_holds=e_holds, e_violated=e_violated, rounding=rounding)
        beyond = own.value is not None and own.value > self.feed.value(self.feed.limit)
        if beyond:
            known = Tally.of([r.process for r in rounds]).known
            usual = total.y * (1 if cell.claim == "realised" else cell.capacity) / known
            # the mean that the rule implies, of two distances by the triangle inequality
            limit = usual * (1 + self.times if self.whole else self.times)
            note = f"{words}, limit {self.times:g}"
            own = own.but(limit=max(limit, self.feed.value(self.feed.limit)), note=note)
        if e_violated >= look.log_price_violated:
            return own.but(outcome="violated", open=False, more=None)
        if e_holds >= look.log_price_holds and look.launched >= look.first:
            own = own.but(outcome="holds", open=False, more=None)
            costs = f"this is what {self.format} costs: {own.note}"
            return own.but(note=costs, reason="format cost") if beyond else own
        if own.outcome == "inconclusive" and not beyond:
            return own
        more = max(look.launched, look.first - look.launched, 1)
        return own.but(outcome="inconclusive", open=True, more=more)

    def _words(self, pairs: MeanRatio, look: Interim) -> tuple[str, str]:
        """The class of the difference, and its size beside the cost of the format."""
        low, high = pairs.interval(look.alpha)
        how = "agrees to" if high <= self.times else "differs by more than"
        class_ = f"{how} {self.format} rounding"
        if low <= self.times < high:
            class_ = f"differs about as {self.format} rounding does"
        than = "train is from float32" if self.whole else f"train in {self.format} is"
        what = "infer is from float32" if self.whole else "infer is from train"
        value, low, high = map(_shown, (pairs.value, low, high))
        return class_, f"{what} {value} [{low}, {high}] times as far as {than}"


def _shown(ratio: float) -> str:
    """A ratio in three digits; "?" where both distances are 0 on every token."""
    text = f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"
    return {"nan": "?", "inf": "∞"}.get(text, text)
