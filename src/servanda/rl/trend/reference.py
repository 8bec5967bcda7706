# A reference: what good runs look like, as `servanda contract calibrate` writes it.

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from servanda.contract.clause import CALIBRATE_TREND
from servanda.contract.identity import digest_of
from servanda.contract.text_file import MAX_BYTES, content, whole
from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.rl.trend.followed_metric import chosen, followed
from servanda.theory.stats.change import LEAST_STEPS, Detector, Fold, detector

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
