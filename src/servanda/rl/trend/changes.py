# Whether the gap of a run has changed against good runs: what is followed, and the chart of a run.

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from servanda.contract.clause import CALIBRATE_TREND, WHOLE, Trend
from servanda.contract.identity import digest_of
from servanda.contract.model import Contract
from servanda.contract.text_file import MAX_BYTES, content, whole
from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.judgement.clauses.base import CellVerdict, Outcome, worst
from servanda.judgement.verdict import Verdict
from servanda.registry import did_you_mean
from servanda.report.format import count
from servanda.theory.bounds.assumptions import ASSUMPTIONS
from servanda.theory.stats.change import CLIP, LEAST_STEPS, Detector, Fold, detector
from servanda.theory.stats.histogram import SIGNIFICAND_BITS, SMALLEST, ZERO, edges

# The numbers of one step that are followed over a run, from the bins of its log ratios.
#
# Sums and counts, so that ranks and blocks add up.

Array = NDArray[Any]

PREFIX = "servanda/"  # of the metrics of a step
COVERAGE, K3 = "coverage", "k3_nats"
MEAN, P99 = "abs_log_ratio_nats", "abs_log_ratio_p99_nats"
_TAIL = 0.99
_PER_OCTAVE = 16  # magnitudes of |log ratio| per factor of 2, which is their resolution


@dataclass(frozen=True)
class StepScalars:
    """The sums of one step.

    Args:
        usable, lost: trained tokens with and without a log ratio.
        k3, drift: sums of k3 and of |log ratio|, nats; inf with a token without mass.
        magnitudes: index of a magnitude of |log ratio| -> tokens; 0 is equality.
    """

    usable: int = 0
    lost: int = 0
    k3: float = 0.0
    drift: float = 0.0
    magnitudes: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, count_K: Array, lost: int) -> StepScalars:
        """From counts of tokens by the bin of their log ratio, [BINS]."""
        used = np.flatnonzero(count_K)
        ratio_U, magnitude_U = (of_K[used] for of_K in ratios_of_bins())
        n_U = count_K[used]
        with np.errstate(over="ignore"):  # of ratios near the largest, k3 and its sum are infinite
            k3_U = np.expm1(ratio_U) - ratio_U
            k3, drift = (float(x_U @ n_U) if len(used) else 0.0 for x_U in (k3_U, np.abs(ratio_U)))
        size_M = np.bincount(magnitude_U, n_U)
        of_M = np.flatnonzero(size_M)
        counts = dict(zip(of_M.tolist(), size_M[of_M].astype(int).tolist(), strict=True))
        return cls(int(n_U.sum()), lost, k3, drift, counts)

    def __add__(self, other: StepScalars) -> StepScalars:
        counts = dict(self.magnitudes)
        for magnitude, n in other.magnitudes.items():
            counts[magnitude] = counts.get(magnitude, 0) + n
        return StepScalars(
            self.usable + other.usable,
            self.lost + other.lost,
            self.k3 + other.k3,
            self.drift + other.drift,
            counts,
        )

    @property
    def values(self) -> dict[str, float]:
        """Name -> number; one that the step does not have is absent."""
        tokens = self.usable + self.lost
        values = {COVERAGE: self.usable / tokens} if tokens else {}
        if self.usable:
            values |= {K3: self.k3 / self.usable, MEAN: self.drift / self.usable}
            values[P99] = self._quantile(_TAIL)
        return values

    def _quantile(self, share: float) -> float:
        """A quantile of |log ratio|, nats: the upper end of its magnitude."""
        below, need = 0, math.ceil(share * self.usable)
        for magnitude, n in sorted(self.magnitudes.items()):
            below += n
            if below >= need:
                return _upper_end(magnitude)
        raise AssertionError("counts and tokens differ")


@cache
def ratios_of_bins() -> tuple[Array, Array]:
    """The log ratio of each bin, nats, and its magnitude; -inf is in the first bin."""
    least_K, most_K = edges()
    ratio_K = least_K / 2 + most_K / 2
    ratio_K[ZERO] = 0.0
    step = 2**SIGNIFICAND_BITS // _PER_OCTAVE
    apart_K = np.abs(np.arange(len(ratio_K)) - ZERO)
    return ratio_K, np.where(apart_K > 0, 1 - (1 - apart_K) // step, 0)


def _upper_end(magnitude: int) -> float:
    """The largest |log ratio| of a magnitude, nats: within an octave they are equally wide."""
    octave, part = divmod(magnitude - 1, _PER_OCTAVE)
    return SMALLEST * 2.0**octave * (1 + part / _PER_OCTAVE) if magnitude else 0.0


def scalars_of(metrics: Mapping[str, object]) -> dict[str, float]:
    """The numbers of a step's metrics, under their names without the prefix."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            continue
        if name.startswith(PREFIX) and not math.isnan(number):
            found[name.removeprefix(PREFIX)] = number
    return found


# The metrics that a reference may follow: their scale, and the direction that is a change.


LEAST_RATIO = 0.01  # a step of 1 % is within the rounding of logs
_SMALLEST = 1e-300  # in place of a value of 0 on a logarithmic scale


@dataclass(frozen=True)
class FollowedMetric:
    """How a metric is compared with good runs.

    Args:
        log: whether ratios count, rather than differences.
        side: 1 if a rise is a change, -1 if a fall is, 0 if both are.
    """

    log: bool
    side: int

    def x(self, value: float) -> float:
        return math.log(max(value, _SMALLEST)) if self.log else value

    def told(self, change: float) -> str:
        """A change of x, in words."""
        return f"x{math.exp(change):.3g}" if self.log else f"{change:+.3g}"

    def least(self, tokens: float) -> float:
        """The smallest scale: 1 %, or one token of a step."""
        return LEAST_RATIO if self.log else 1 / max(tokens, 1.0)


_RISES, _FALLS = FollowedMetric(log=True, side=1), FollowedMetric(log=False, side=-1)
_MOVES = FollowedMetric(log=False, side=0)
_KNOWN: Mapping[str, FollowedMetric] = {
    K3: _RISES,
    P99: _RISES,
    MEAN: _RISES,
    COVERAGE: _FALLS,
}
BY_DEFAULT = (K3, COVERAGE)  # one threshold is for all metrics: each more makes the others blunter


def followed(name: str) -> FollowedMetric:
    """How a metric is compared: a known one, by its ending, or in both directions.

    >>> followed("k3_nats").side, followed("draft_acceptance").side, followed("follow/slope").side
    (1, -1, 0)
    """
    if name in _KNOWN:
        return _KNOWN[name]
    if name.endswith("_nats"):
        return _RISES
    return _FALLS if "acceptance" in name else _MOVES


def chosen(names: Iterable[str]) -> tuple[str, ...]:
    """The metrics that are followed by default, of those that every step of a reference has."""
    known = set(names)
    more = sorted(n for n in known if "acceptance" in n or n.endswith("slope"))
    return (*(n for n in BY_DEFAULT if n in known), *more)


# A reference: what good runs look like, as `servanda contract calibrate` writes it.


SCHEMA = 1
_KIND = "reference"


@dataclass(frozen=True)
class GoodRun:
    """One recorded run that is accepted as good.

    Args:
        source: its path; digest: of what was read.
        steps: (step, name -> number), in order.
        tokens: trained tokens of each step.
    """

    source: str
    digest: str
    steps: tuple[tuple[int, Mapping[str, float]], ...]
    tokens: tuple[int, ...] = ()

    @property
    def later(self) -> tuple[tuple[int, Mapping[str, float]], ...]:
        """All steps but the first, at which weights are as the engine loaded them."""
        return self.steps[1:]


class Source(msgspec.Struct, frozen=True):
    """Where a good run came from."""

    path: str
    digest: str
    steps: int


class _Fold(msgspec.Struct, frozen=True):
    centre: tuple[float, ...]
    scale: tuple[float, ...]
    threshold: float


class _File(msgspec.Struct, frozen=True):
    servanda: str
    schema: int
    metrics: tuple[str, ...]
    runs: tuple[Source, ...]
    steps: int
    alpha: float
    folds: tuple[_Fold, ...]
    digest: str


# of the promise of a reference; one good run has none
_RESTS_ON = ("exchangeable_runs", "reference_runs")


@dataclass(frozen=True)
class Reference:
    """What a run is compared with.

    Args:
        metrics: names, in the order of the detector's.
        sources: of the good runs; alpha: see `detector`.
    """

    metrics: tuple[str, ...]
    sources: tuple[Source, ...]
    alpha: float
    detector: Detector

    @classmethod
    def of(
        cls, runs: Sequence[GoodRun], alpha: float, metrics: Sequence[str] | None = None
    ) -> Reference:
        """The reference of some good runs.

        Args:
            metrics: default: those of `chosen`, which every run has.

        Raises:
            EvidenceError: too few steps, or a run lacks a metric.
        """
        has = [_measured(run) for run in runs]
        common = set.intersection(*has) if has else set()
        names = tuple(metrics) if metrics is not None else chosen(common)
        for run, known in zip(runs, has, strict=True):
            if lost := [name for name in names if name not in known]:
                raise EvidenceError(
                    f"{run.source} has fewer than {LEAST_STEPS} steps with {lost[0]}, "
                    "its first step aside",
                    hint=f"leave it out, or follow other metrics: {', '.join(sorted(known))}",
                )
        if not names:
            raise EvidenceError(
                f"no metric has {LEAST_STEPS} steps in every run, the first step aside",
                hint="record more steps with `rl.Monitor(..., state=FILE)`",
            )
        tokens = [n for run in runs for n in run.tokens if n]
        typical = median(tokens) if tokens else 1.0
        of = [followed(name) for name in names]
        series = [
            np.array([_row(names, values) for _, values in run.later], dtype=np.float64)
            for run in runs
        ]
        found = detector(series, [f.side for f in of], [f.least(typical) for f in of], alpha)
        sources = tuple(Source(r.source, r.digest, len(r.later)) for r in runs)
        return cls(names, sources, alpha, found)

    def row(self, values: Mapping[str, float]) -> list[float]:
        """The x of each metric of a step; NaN if it was not measured."""
        return _row(self.metrics, values)

    @property
    def digest(self) -> str:
        return digest_of(self.to_plain())

    @property
    def promise(self) -> str:
        """What is promised of a healthy run."""
        of, bound = self.detector, self.detector.false_alarms
        if bound is None:
            return (
                "one good run shows no spread between runs: nothing is promised, and only if steps "
                f"are independent a healthy run is called changed with probability {self.alpha:g}"
            )
        return (
            f"a healthy run like these {of.runs} is called changed within {of.steps} steps with "
            f"probability at most 1/{of.runs + 1}"
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Names in ASSUMPTIONS that the promise needs; () where nothing is promised."""
        return () if self.detector.false_alarms is None else _RESTS_ON

    @property
    def assumed(self) -> tuple[str, ...]:
        """The promise's assumptions, as a line of text if there are any."""
        texts = [ASSUMPTIONS[name].text for name in self.assumptions]
        return (f"assumed: {'; '.join(texts)}",) if texts else ()

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            MeasurementError: it cannot be written.
        """
        data = {**self.to_plain(), "digest": self.digest}
        used = MeasurementError.of_system(
            f"{path} cannot be written", hint="name another --save-reference"
        )
        with used, whole(path) as part:
            part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    def to_plain(self) -> dict[str, Any]:
        """The content of the file, except its digest."""
        of = self.detector
        return {
            "servanda": _KIND,
            "schema": SCHEMA,
            "metrics": [*self.metrics],
            "runs": [msgspec.to_builtins(source) for source in self.sources],
            "steps": of.steps,
            "alpha": self.alpha,
            "folds": [
                {
                    "centre": [float(f"{x:.9g}") for x in fold.centre_M],
                    "scale": [float(f"{x:.9g}") for x in fold.scale_M],
                    "threshold": float(f"{fold.threshold:.9g}"),
                }
                for fold in of.folds
            ],
        }


def read_reference(path: Path, digest: str | None = None) -> Reference:
    """A reference from its file.

    Args:
        digest: the digest that the contract states; None: any.

    Raises:
        ContractError: there is no such file, it is no reference, or another one.
    """
    hint = CALIBRATE_TREND
    with ContractError.of_system(f"the reference {path} cannot be read", hint=hint):
        data = content(path, MAX_BYTES)
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ContractError(f"{path} is no reference of good runs: {error}", hint=hint) from None
    if file.servanda != _KIND:
        raise ContractError(f"{path} is no reference of good runs", hint=hint)
    ContractError.refuse_form(path, file.schema, SCHEMA, hint)
    width = len(file.metrics)
    for fold in file.folds:
        if {len(fold.centre), len(fold.scale)} != {width} or not min(*fold.scale, 1.0) > 0:
            raise ContractError(f"{path}: a fold does not have {width} metrics", hint=hint)
    found = Reference(
        file.metrics,
        file.runs,
        file.alpha,
        Detector(
            tuple(Fold(fold.centre, fold.scale, fold.threshold) for fold in file.folds),
            tuple(followed(name).side for name in file.metrics),
            len(file.runs),
            file.steps,
        ),
    )
    if file.digest != found.digest:
        raise ContractError(f"{path} was changed after it was written", hint=hint)
    if digest is not None and digest != found.digest:
        raise ContractError(
            f"{path} has the digest {found.digest}, and the contract names {digest}",
            hint="name the file that the contract was made for, or its digest",
        )
    return found


def _row(names: Sequence[str], values: Mapping[str, float]) -> list[float]:
    return [followed(n).x(values[n]) if n in values else math.nan for n in names]


def _measured(run: GoodRun) -> set[str]:
    """The metrics with a number at LEAST_STEPS of the later steps."""
    counts: dict[str, int] = {}
    for _, values in run.later:
        for name, value in values.items():
            counts[name] = counts.get(name, 0) + math.isfinite(followed(name).x(value))
    return {name for name, n in counts.items() if n >= LEAST_STEPS}


# The chart of a run: its steps so far against a reference, as cells of a verdict.


ANY = Trend.model_construct()
TREND = "trend"  # the clause's name, and its section
_FIRST = "the first step of a run is no reference: its weights are as the engine loaded them"


@dataclass(frozen=True)
class _Entry:
    """A step on the chart: S after it, and how often each metric was measured and missing."""

    step: int
    generation: int
    state: NDArray[np.float64]
    known: tuple[int, ...]
    missing: tuple[int, ...]

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.generation


@dataclass
class RunChart:
    """The steps of a run against a reference.

    Args:
        clause: what a contract asks.
    """

    reference: Reference
    clause: Trend = ANY
    _first: int | None = None
    _entries: list[_Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in self.clause.metrics:
            if name not in self.reference.metrics:
                raise ContractError(
                    f"the reference has no metric {name!r}",
                    hint=did_you_mean(name, self.reference.metrics),
                )

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.clause.metrics or self.reference.metrics

    def add(
        self, step: int, values: Mapping[str, float], generation: int = 0
    ) -> tuple[CellVerdict, ...]:
        """Add a step, and judge it; a step that the chart has replaces it and all later ones.

        Args:
            generation: its number in the step, if that has several.
            values: name -> number, of what was measured; without any, the step counts as missing.
        """
        if self._first is None or step <= self._first:  # with all of its generations
            self._first = step
            self._entries.clear()
            return tuple(self._cell(name, "not applicable", _FIRST) for name in self.metrics)
        while self._entries and self._entries[-1].place >= (step, generation):
            self._entries.pop()
        of, none = self.reference, (0,) * len(self.reference.metrics)
        last = self._entries[-1] if self._entries else _Entry(0, 0, of.detector.start(), none, none)
        x_M = of.row(values)
        lost = [math.isnan(x) for x in x_M]
        entry = _Entry(
            step,
            generation,
            of.detector.advance(last.state, x_M),
            tuple(n + (not gone) for n, gone in zip(last.known, lost, strict=True)),
            tuple(n + gone for n, gone in zip(last.missing, lost, strict=True)),
        )
        self._entries.append(entry)
        value_M = of.detector.values(entry.state)
        cells = []
        for name in self.metrics:
            m = of.metrics.index(name)
            value = float(value_M[m])
            note = "" if lost[m] else self._note(m, x_M[m])
            outcome: Outcome = "violated" if value > 1 else "holds"
            if lost[m] and outcome == "holds":
                outcome, note = "inconclusive", f"{name} was not measured at this step"
            counts = {"n": entry.known[m], "missing": entry.missing[m]}
            cells.append(self._cell(name, outcome, note, value=value, **counts))
        return tuple(cells)

    @property
    def since(self) -> int | None:
        """The first step of the change that still lasts; None without one."""
        since = None
        at = [self.reference.metrics.index(name) for name in self.metrics]
        for entry in reversed(self._entries):
            if not (self.reference.detector.values(entry.state)[at] > 1).any():
                break
            since = entry.step
        return since

    def _note(self, m: int, x: float) -> str:
        """How far a value is from the good runs', in the fold that is nearest to it."""
        name, folds = self.reference.metrics[m], self.reference.detector.folds
        fold = min(folds, key=lambda fold: abs(x - fold.centre_M[m]))
        of, centre, scale = followed(name), fold.centre_M[m], fold.scale_M[m]
        apart = of.told(x - centre)
        steps = count(int(self.reference.detector.delay()), "step")
        return (
            f"{apart} of the good runs' mean, whose steps differ by {of.told(scale)}; "
            f"a lasting {of.told(CLIP * scale)} is found within {steps}"
        )

    def _cell(self, name: str, outcome: Outcome, note: str, **numbers: Any) -> CellVerdict:
        return CellVerdict(
            TREND,
            TREND,
            name,
            "",
            WHOLE,
            outcome,
            kind="estimate" if self.reference.detector.false_alarms is None else "guard",
            claim="realised",
            severity=self.clause.severity,
            enforced=self.clause.enforced,
            limit=1.0 if numbers else None,
            units="steps" if numbers else "",
            note=note,
            assumptions=self.reference.assumptions,
            **numbers,
        )


def chart_of(contract: Contract) -> RunChart | None:
    """The chart of a contract's trend; None without one.

    Raises:
        ContractError: the reference cannot be read, or is another one.
    """
    if contract.trend is None:
        return None
    clause = contract.trend
    if not clause.reference:
        raise ContractError("trend names no reference", hint=CALIBRATE_TREND)
    return RunChart(read_reference(Path(clause.reference), clause.digest), clause)


def chart_for(reference: Path | None, contract: Contract | None) -> RunChart | None:
    """The chart of a followed run: against a given reference, or that of its contract.

    Raises:
        ContractError: the reference cannot be read, or is another one.
    """
    if reference is not None:
        clause = (contract.trend if contract is not None else None) or ANY
        return RunChart(read_reference(reference), clause)
    return chart_of(contract) if contract is not None else None


def with_reference(contract: Contract, reference: str | Path | None) -> Contract:
    """A contract whose trend is held to a reference, which then counts in its digest.

    Args:
        reference: its file; None: that of the contract, if any.

    Raises:
        ContractError: the reference cannot be read, or is another one.
    """
    clause = contract.trend
    if reference is not None:
        named = {"reference": str(reference), "digest": None}
        clause = (clause or ANY).model_copy(update=named)
    if clause is None:
        return contract
    found = chart_of(contract.model_copy(update={"trend": clause}))
    assert found is not None
    clause = clause.model_copy(update={"digest": found.reference.digest})
    return contract.model_copy(update={"trend": clause})


def changed(cells: Sequence[CellVerdict]) -> str:
    """The sentence about a change; "" without one."""
    red = [c for c in cells if c.section == TREND and c.outcome == "violated"]
    if not red:
        return ""
    worst_of = max(red, key=lambda cell: cell.value or 0.0)
    return f"the gap has changed: {worst_of.metric} is {worst_of.note.partition(',')[0]}"


def joined(verdict: Verdict, cells: Sequence[CellVerdict]) -> Verdict:
    """A verdict on a step with the cells of its trend."""
    outcome = joined_outcome(verdict.outcome, cells)
    return replace(verdict, cells=(*verdict.cells, *cells), outcome=outcome)


def joined_outcome(outcome: Outcome, cells: Sequence[CellVerdict]) -> Outcome:
    """The outcome of a step with the cells of its trend."""
    asked = (c for c in cells if c.enforced and c.outcome != "not applicable")
    return worst([outcome, *(cell.outcome for cell in asked)])
