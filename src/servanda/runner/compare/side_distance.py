# Which of two sides is further from a third scorer, on the tokens that all three scored.
#
# The distance of a side is the mean of |log p_side - log p_referee| over tokens, each at most CAP
# nats.  The difference of the two is a mean of bounded variables in the order of their draws, so
# LogMoment gives an interval for it whatever tokens depend on each other.
# Axes: N tokens.

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from servanda.contract.kernel_string import shown
from servanda.errors import MeasurementError
from servanda.judgement.evidence import Round, round_view
from servanda.judgement.plan import Plan
from servanda.judgement.verdict import Verdict
from servanda.runner.finished_run import reread
from servanda.runner.measurement import Open, Progress, Watch, unwatched
from servanda.runner.probe import encoded
from servanda.runner.round_files import batch_of, in_order
from servanda.theory.stats.alpha import shared
from servanda.theory.stats.interval import interval
from servanda.theory.stats.log_moment import LogMoment
from servanda.traces.trace import Trace

CAP = 1.0  # nats: one token counts no more
Floats = NDArray[np.float64]
Further = Literal["train", "infer", "cannot tell"]


@dataclass(frozen=True)
class SideDistance:
    """How far both sides are from the referee on one slice.

    Args:
        train, infer: their distances, nats per token.
        missing: tokens that some scorer has no logprob of.
        low, high: interval of train - infer for these tokens, at the confidence of all slices
            together.
    """

    slice: str
    tokens: int
    missing: int
    train: float
    infer: float
    low: float
    high: float

    @property
    def further(self) -> Further:
        """The side whose distance is larger for sure."""
        if self.low > 0:
            return "train"
        return "infer" if self.high < 0 else "cannot tell"


@dataclass(frozen=True)
class ThirdScore:
    """The answer of a third scorer.

    Args:
        rows, of: the rows that it was compared on, and all rows.
        slices: the whole first.
    """

    referee: str
    rows: int
    of: int
    confidence: float
    slices: tuple[SideDistance, ...]


def side_distances(
    train_N: Floats,
    infer_N: Floats,
    referee_N: Floats,
    slices: Mapping[str, NDArray[Any]],
    alpha: float,
) -> tuple[SideDistance, ...]:
    """The distances on each slice, in its order.

    Args:
        train_N, infer_N, referee_N: nats; NaN where there is none.
        slices: name -> tokens in it.
        alpha: probability that any of the intervals is wrong.
    """
    share = shared(shared(alpha, 2), len(slices))  # two ends on each slice
    far_N = {"train": _distance(train_N, referee_N), "infer": _distance(infer_N, referee_N)}
    return tuple(_on_slices(far_N, slices, share))


def _distance(side_N: Floats, referee_N: Floats) -> Floats:
    with np.errstate(invalid="ignore"):
        apart_N = np.where(side_N == referee_N, 0.0, np.abs(side_N - referee_N))
    return np.minimum(apart_N, CAP)


def _on_slices(
    far_N: Mapping[str, Floats], slices: Mapping[str, NDArray[Any]], share: float
) -> Iterator[SideDistance]:
    for name, inside_N in slices.items():
        train_N, infer_N = (far[inside_N] for far in far_N.values())
        known_N = ~np.isnan(train_N + infer_N)
        train_N, infer_N = train_N[known_N], infer_N[known_N]
        missing = int((~known_N).sum())
        unit = LogMoment.of((train_N - infer_N) / (2 * CAP) + 0.5, missing)
        low, high = interval(unit, share, about=0.5)
        yield SideDistance(
            slice=name,
            tokens=len(train_N),
            missing=missing,
            train=float(train_N.mean()) if len(train_N) else math.nan,
            infer=float(infer_N.mean()) if len(infer_N) else math.nan,
            low=(2 * low - 1) * CAP,
            high=(2 * high - 1) * CAP,
        )


# The reference scorer of a comparison as a referee: is A or B further from it, on tokens of B.

ROWS = 256  # the first responses of B, decided before any is seen


def pair_score(
    folder: Path, verdict: Verdict, open: Open, *, watch: Watch = unwatched
) -> ThirdScore:
    """Let A score responses of B that the referee has scored in a finished comparison.

    In the answer A is `train` and B is `infer`; its rows are responses of B.

    Args:
        folder: the run directory of a comparison with a reference scorer.

    Raises:
        MeasurementError: A cannot score given tokens.
        EvidenceError: the run has no rounds.
    """
    with reread(folder, verdict, as_measured=True) as run:
        plan, rounds = run.plan, run.rounds
    assert plan.stable is not None  # A of a comparison with a referee
    engine = open(plan.stable, "stable")
    try:
        parts, rows = [], 0
        for measured in rounds:
            if rows >= ROWS:
                break
            watch(Progress("scoring by A", rows, ROWS))
            parts.append(_scored(plan, measured, engine))
            rows += len(measured.units)
    finally:
        engine.close()
    confidence = plan.contract.confidence
    a_N, b_N, referee_N = (np.concatenate([part[i] for part in parts]) for i in range(3))
    names = [*dict.fromkeys(name for part in parts for name in part[3])]
    slices = {
        name: np.concatenate([part[3].get(name, np.zeros(len(part[0]), bool)) for part in parts])
        for name in names
    }
    return ThirdScore(
        shown(plan.contract.kernels.train),
        rows,
        sum(len(measured.units) for measured in rounds),
        confidence,
        side_distances(a_N, b_N, referee_N, slices, 1 - confidence),
    )


def _scored(plan: Plan, measured: Round, engine: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Logprobs of A, of B and of the referee of each token of B, and its slices."""
    schedule = next(s for s in plan.schedules if s.name == measured.workload)
    pair = measured.pair
    given = pair.infer.continuations
    some = [unit for unit, tokens in zip(measured.units, given, strict=True) if tokens]
    tokens = tuple(part for part in given if part)
    batch = batch_of(some, encoded(schedule.corpus, engine), schedule.width, tokens)
    paths = engine.describe().scores
    path = "decode" if "decode" in paths else "prefill"
    if not paths:
        raise MeasurementError(
            "A cannot score given tokens, so it is not known which side is further",
            hint="serve A where prompts can be scored, or name it as a local kernel",
        )
    scored = in_order(batch, engine.score, schedule.workload.sampling.transform, path)
    cells = [cell for cell in plan.cells if cell.workload == measured.workload]
    view = round_view(schedule, cells, measured.units, pair)
    slices = {"all": np.ones(len(pair.infer.token_N), dtype=bool)}
    slices |= {cell.cut.name: view.mask(cell.cut) for cell in cells}
    return (
        _on_tokens(scored, pair.infer),
        pair.infer.columns["logp"],
        pair.train.columns["logp"],
        slices,
    )


def _on_tokens(scored: Trace, drawn: Trace) -> Any:
    """Logprobs by the tokens of another trace; NaN for a sequence that was lost."""
    logp_N = np.full(len(drawn.token_N), np.nan)
    starts = _starts(drawn.sequence_S, drawn.length_S)
    for sequence, (start, length) in _starts(scored.sequence_S, scored.length_S).items():
        if length:
            at = starts[sequence][0]
            logp_N[at : at + length] = scored.columns["logp"][start : start + length]
    return logp_N


def _starts(sequence_S: Any, length_S: Any) -> dict[int, tuple[int, int]]:
    starts = (np.cumsum(length_S) - length_S).tolist()
    return {
        int(s): (start, int(n)) for s, start, n in zip(sequence_S, starts, length_S, strict=True)
    }
