# Whether the gap of a run has changed against good runs: what is followed, and the chart of a run.

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
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
from servanda.judgement.clauses.base import CellVerdict, Outcome, Reason, worst
from servanda.judgement.verdict import Verdict
from servanda.registry import did_you_mean
from servanda.report.format import count
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
        contract: name of the contract or preset that it was recorded under; "": unknown.
    """

    source: str
    digest: str
    steps: tuple[tuple[int, Mapping[str, float]], ...]
    tokens: tuple[int, ...] = ()
    contract: str = ""

    @property
    def later(self) -> tuple[tuple[int, Mapping[str, float]], ...]:
        """All steps but the first, at which weights are as the engine loaded them."""
        return self.steps[1:]


class Source(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a good run came from."""

    path: str
    digest: str
    steps: int
    contract: str = ""


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
    recorded: int | None = None


@dataclass(frozen=True)
class Reference:
    """What a run is compared with.

    Args:
        metrics: names, in the order of the detector's.
        sources: of the good runs; alpha: see `detector`.
        recorded: number of healthy runs of which the good runs were taken; None: not stated.
    """

    metrics: tuple[str, ...]
    sources: tuple[Source, ...]
    alpha: float
    detector: Detector
    recorded: int | None = None

    @classmethod
    def of(
        cls,
        runs: Sequence[GoodRun],
        alpha: float,
        metrics: Sequence[str] | None = None,
        recorded: int | None = None,
    ) -> Reference:
        """The reference of some good runs.

        Args:
            metrics: default: those of `chosen`, which every run has.

        Raises:
            EvidenceError: too few steps, a run lacks a metric, or fewer were recorded than given.
        """
        if recorded is not None and recorded < len(runs):
            raise EvidenceError(
                f"{count(len(runs), 'run')} cannot be taken of {recorded} recorded ones",
                hint="state how many healthy runs of this set-up there are, with those left out",
            )
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
        sources = tuple(Source(r.source, r.digest, len(r.later), r.contract) for r in runs)
        return cls(names, sources, alpha, found, recorded)

    def row(self, values: Mapping[str, float]) -> list[float]:
        """The x of each metric of a step; NaN if it was not measured."""
        return _row(self.metrics, values)

    @property
    def digest(self) -> str:
        return digest_of(self.to_plain())

    @property
    def promised(self) -> bool:
        """Whether the number of false alarms is bounded: by several runs, none left out."""
        selected = self.recorded is not None and self.recorded > self.detector.runs
        return self.detector.false_alarms is not None and not selected

    @property
    def promise(self) -> str:
        """What is promised of a healthy run."""
        of = self.detector
        if of.false_alarms is None:
            return (
                "one good run shows no spread between runs: nothing is promised, and only if steps "
                f"are independent a healthy run is called changed with probability {self.alpha:g}"
            )
        if not self.promised:
            return (
                f"{of.runs} of {self.recorded} healthy runs were selected: nothing is promised, "
                "because the others may be less quiet"
            )
        unless = "" if self.recorded is not None else ", unless other healthy runs were left out"
        return (
            f"a healthy run like these {of.runs} is called changed within {of.steps} steps with "
            f"probability at most 1/{of.runs + 1}{unless}"
        )

    @property
    def no_gate(self) -> str:
        """The reason why it can only warn; "": it can be enforced."""
        if self.detector.runs < GATE:
            promises = ", ".join(f"1/{runs + 1} with {runs}" for runs in (2, 4, GATE, 19))
            return (
                f"a gate needs {GATE} good runs, and this reference has {self.detector.runs}; a "
                f"healthy run is called changed with probability at most {promises} good runs"
            )
        if not self.promised:
            return f"a gate needs all healthy runs, and {self.promise}"
        if self.recorded is None:
            return "a gate needs to know whether healthy runs were left out of its reference"
        return ""

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
            **({} if self.recorded is None else {"recorded": self.recorded}),
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
        file.recorded,
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
GATE = 9  # good runs, with which at most one of ten healthy runs is called changed
_OTHER = 3.0  # a value that many times below the good runs' is one of another set-up
_FIRST = "the first step of a run is no reference: its weights are as the engine loaded them"


@dataclass(frozen=True)
class _Entry:
    """A step on the chart: S after it, and how often each metric was measured and missing.

    Args:
        x, values: of each metric, before the sum and as a multiple of the threshold.
    """

    step: int
    generation: int
    state: NDArray[np.float64]
    x: Sequence[float]
    values: Sequence[float]
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
        contract: name of the one that the run is recorded under; "": unknown.
    """

    reference: Reference
    clause: Trend = ANY
    contract: str = ""
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

    @property
    def promise(self) -> str:
        """What is promised of a healthy run, and what of this run it does not cover."""
        of, beyond = self.reference, len(self._entries) - self.reference.detector.steps
        told = [of.promise]
        if beyond > 0:
            told.append(f"{count(beyond, 'step')} beyond that can only warn")
        elif not self.clause.enforced:
            told.append(of.no_gate or "a change is only a warning")
        own = sorted({source.contract for source in of.sources} - {""})
        if self.contract and own and own != [self.contract]:
            told.append(f"they were recorded under {', '.join(own)}, this run {self.contract}")
        return "; ".join(told)

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
        start = _Entry(0, 0, of.detector.start(), none, none, none, none)
        last = self._entries[-1] if self._entries else start
        x_M = of.row(values)
        lost = [math.isnan(x) for x in x_M]
        state = of.detector.advance(last.state, x_M)
        entry = _Entry(
            step,
            generation,
            state,
            x_M,
            of.detector.values(state).tolist(),
            tuple(n + (not gone) for n, gone in zip(last.known, lost, strict=True)),
            tuple(n + gone for n, gone in zip(last.missing, lost, strict=True)),
        )
        self._entries.append(entry)
        return tuple(self._judged(of.metrics.index(name)) for name in self.metrics)

    def _judged(self, m: int) -> CellVerdict:
        """The cell of a metric at the last step."""
        entry, name, promised = self._entries[-1], self.reference.metrics[m], True
        numbers = {"n": entry.known[m], "missing": entry.missing[m], "value": entry.values[m]}
        outcome: Outcome = "holds"
        reason: Reason = ""
        if entry.values[m] > 1:
            promised = self._red_for(m) > len(self._entries) - self.reference.detector.steps
            outcome = "violated" if promised else "inconclusive"
            note = self._change(m, promised)
        elif math.isnan(entry.x[m]):
            outcome, note = "inconclusive", f"{name} was not measured at this step"
        elif note := self._misfit(m):
            outcome, reason = "inconclusive", "another set-up"
        else:
            note = self._note(m, entry.x[m])
            promised = len(self._entries) <= self.reference.detector.steps
        if not promised:
            steps = count(self.reference.detector.steps, "step")
            note = f"{note}; beyond the {steps} of the good runs, a change is only a warning"
        cell = self._cell(name, outcome, note, reason=reason, **numbers)
        return cell if promised else cell.but(kind="estimate", enforced=False)

    def _red_for(self, m: int) -> int:
        """Number of last steps at which a metric is called changed without a break."""
        back = (i for i, e in enumerate(reversed(self._entries)) if not e.values[m] > 1)
        return next(back, len(self._entries))

    @property
    def since(self) -> int | None:
        """The first step of the change that still lasts; None without one."""
        at = [self.reference.metrics.index(name) for name in self.metrics]
        since = None
        for entry in reversed(self._entries):
            if not any(entry.values[m] > 1 for m in at):
                break
            since = entry.step
        return since

    def news(self, cells: Iterable[CellVerdict]) -> list[str]:
        """What is `warned` of the last step: a change once, when it begins."""
        lasts = self._entries and self.since not in (None, self._entries[-1].step)
        return [] if lasts else warned(cells)

    def _change(self, m: int, promised: bool) -> str:
        """The steps that the sum of a metric consists of, and the largest change in them.

        Args:
            promised: whether it was found within the steps of the good runs.
        """
        of, entry = self.reference.detector, self._entries[-1]
        fold = int(
            np.argmin([entry.state[f, :, m].max() / of.folds[f].threshold for f in range(of.runs)])
        )
        down = int(entry.state[fold, :, m].argmax())
        added = []
        for one in reversed(self._entries):
            if not one.state[fold, down, m] > 0:
                break
            added.append(one)
        measured = [one.x[m] for one in added if not math.isnan(one.x[m])]
        told, centre = followed(self.reference.metrics[m]).told, of.folds[fold].centre_M[m]
        most = told((min if down else max)(measured) - centre)
        now = "" if math.isnan(entry.x[m]) else told(entry.x[m] - centre)
        tail = "" if now == most else f", now {now}" if now else ", now not measured"
        bound = f"at most 1 in {of.runs + 1}" if promised and self.reference.promised else "unknown"
        note = (
            f"since step {added[-1].step} up to {most} of the good runs' mean{tail} (healthy runs "
            f"called so: {bound})"
        )
        if added[-1] is self._entries[0]:
            note += "; so from the first steps on: is the reference of another set-up?"
        return note

    def _misfit(self, m: int) -> str:
        """Why good runs cannot show a change of this run: its first steps are far below theirs."""
        of, folds = followed(self.reference.metrics[m]), self.reference.detector.folds
        first = list(islice((e.x[m] for e in self._entries if not math.isnan(e.x[m])), LEAST_STEPS))
        below = min(fold.centre_M[m] - 3 * fold.scale_M[m] for fold in folds)
        centre = min(fold.centre_M[m] for fold in folds)
        low = median(first)
        if not of.log or len(first) < LEAST_STEPS or low >= min(below, centre - math.log(_OTHER)):
            return ""
        return (
            f"{of.told(low - centre)} of the good runs' mean at its first {LEAST_STEPS} steps: "
            "they are of another set-up, and too noisy to show a change of this run"
        )

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
            kind="guard" if self.reference.promised else "estimate",
            claim="realised",
            severity=self.clause.severity,
            enforced=self.clause.enforced,
            limit=1.0 if numbers else None,
            units="steps" if numbers else "",
            note=note,
            **numbers,
        )


def _chart(
    path: Path, clause: Trend | None, digest: str | None = None, contract: str = ""
) -> RunChart:
    """The chart of a run against the reference in a file.

    Args:
        clause: what a contract asks; None: a gate, if the reference can be one, or a warning.

    Raises:
        ContractError: the reference cannot be read, is another one, or cannot be a gate.
    """
    reference = read_reference(path, digest)
    if clause is None:
        named = {"severity": "warning" if reference.no_gate else "error"}
        clause = ANY.model_copy(update=named)
    elif clause.enforced and reference.no_gate:
        raise ContractError(
            f"{path}: {reference.no_gate}",
            hint="give all healthy runs to `servanda contract calibrate RUN... --recorded N "
            "--save-reference FILE`, N being their number, or write `severity: warning` in trend",
        )
    return RunChart(reference, clause, contract)


def chart_of(contract: Contract) -> RunChart | None:
    """The chart of a contract's trend; None without one.

    Raises:
        ContractError: the reference cannot be read, is another one, or cannot be a gate.
    """
    if contract.trend is None:
        return None
    clause = contract.trend
    if not clause.reference:
        raise ContractError("trend names no reference", hint=CALIBRATE_TREND)
    return _chart(Path(clause.reference), clause, clause.digest, contract.metadata.name)


def chart_for(reference: Path | None, contract: Contract | None) -> RunChart | None:
    """The chart of a followed run: against a given reference, or that of its contract.

    Raises:
        ContractError: the reference cannot be read, is another one, or cannot be a gate.
    """
    if reference is not None:
        return _chart(reference, contract.trend if contract is not None else None)
    return chart_of(contract) if contract is not None else None


def with_reference(contract: Contract, reference: str | Path | None) -> Contract:
    """A contract whose trend is held to a reference, which then counts in its digest.

    Args:
        reference: its file; None: that of the contract, if any.

    Raises:
        ContractError: the reference cannot be read, is another one, or cannot be a gate.
    """
    place = None if reference is None else Path(reference)
    found = chart_for(place, contract)
    if found is None:
        return contract
    named = {"digest": found.reference.digest}
    if reference is not None:
        named["reference"] = str(reference)
    return contract.model_copy(update={"trend": found.clause.model_copy(update=named)})


def changed(cells: Sequence[CellVerdict]) -> str:
    """The sentence about an enforced change; "" without one."""
    red = [c for c in cells if c.section == TREND and c.outcome == "violated" and c.enforced]
    if not red:
        return ""
    worst_of = max(red, key=lambda cell: cell.value or 0.0)
    return f"the gap has changed: {worst_of.metric} {worst_of.note.partition(';')[0]}"


def warned(cells: Iterable[CellVerdict]) -> list[str]:
    """The sentences about changes that only warn, and about good runs that do not fit."""
    of = [cell for cell in cells if cell.section == TREND and cell.value is not None]
    beyond = [c for c in of if (c.value or 0) > 1 and not (c.enforced and c.outcome == "violated")]
    return [f"change of {c.metric}: {c.note}" for c in of if c.reason or c in beyond]


def joined(verdict: Verdict, cells: Sequence[CellVerdict]) -> Verdict:
    """A verdict on a step with the cells of its trend."""
    outcome = joined_outcome(verdict.outcome, cells)
    return replace(verdict, cells=(*verdict.cells, *cells), outcome=outcome)


def joined_outcome(outcome: Outcome, cells: Sequence[CellVerdict]) -> Outcome:
    """The outcome of a step with the cells of its trend."""
    asked = (c for c in cells if c.enforced and c.outcome != "not applicable")
    return worst([outcome, *(cell.outcome for cell in asked)])
