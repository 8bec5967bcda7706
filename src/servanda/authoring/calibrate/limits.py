# Calibration: the smallest limit per clause that an accepted pair keeps, in simulated later runs.

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from servanda.authoring.calibrate import rounding
from servanda.contract.clause import Relative
from servanda.contract.identity import EvidenceKey
from servanda.contract.model import Clause, Place
from servanda.errors import EvidenceError
from servanda.judgement.clauses.base import Cell, CellVerdict, Kind, Source, View
from servanda.judgement.clauses.statistical import Certificate, Feed, Units
from servanda.judgement.evidence import Round, weigh
from servanda.judgement.plan import Plan
from servanda.judgement.verdict import Verdict
from servanda.theory.divergence.base import DIVERGENCES
from servanda.theory.divergence.precision import CAPTURES, capture_floor, captured, eta
from servanda.theory.stats.alpha import log_price
from servanda.theory.stats.bets import NEG
from servanda.theory.stats.interval import units_to_decide
from servanda.traces.serialization import to_plain

# Recorder: the data of a run's closed rounds for clauses, stored instead of evaluated; and the
# check that a run is valid for calibration.


@dataclass(frozen=True)
class _PassThrough:
    """A kind whose statistics of a round are its input."""

    kind: Kind
    counts: ClassVar[bool] = False
    peers: ClassVar[tuple[str, ...]] = ()

    @property
    def source(self) -> Source:
        return self.kind.source

    def weigh(self, cell: Cell, view: View) -> View:
        return view

    def noise(self, cell: Cell, view: View) -> View:
        return view


@dataclass(frozen=True)
class Rounds:
    """The closed rounds of one workload.

    Args:
        own: per round, of both kernels; selves: per round, (train, infer) compared with themselves.
    """

    own: tuple[View, ...]
    selves: tuple[tuple[View, ...], ...]

    @property
    def groups(self) -> int:
        """Prompt groups that were dispatched."""
        return sum(view.launched for view in self.own)


def closed_rounds(plan: Plan, key: EvidenceKey, rounds: Iterable[Round]) -> Mapping[str, Rounds]:
    """The closed rounds of every workload with a clause; pure."""
    cells = tuple(replace(cell, kind=_PassThrough(cell.kind)) for cell in plan.cells)  # type: ignore[arg-type]
    evidence = weigh(replace(plan, cells=cells), key, rounds)
    by_workload: dict[str, Rounds] = {}
    for schedule in plan.schedules:
        at = [i for i, cell in enumerate(plan.cells) if cell.workload == schedule.name]
        closed = evidence.closed(schedule.name)
        if at and closed:
            own: tuple[Any, ...] = tuple(part.statistics[at[0]] for part in closed)
            by_workload[schedule.name] = Rounds(own, tuple(part.noise[at[0]] for part in closed))
    return by_workload


def accept(plan: Plan, verdict: Verdict) -> None:
    """Refuse a run that is invalid for calibration.

    A run that exceeds its limits is accepted: calibration assumes that the pair is good.

    Raises:
        EvidenceError: an injected fault, a failed validity check, or a measurement error.
    """
    kernels = plan.contract.kernels
    for side, kernel in (("train", kernels.train), ("infer", kernels.infer)):
        if kernel.fault:
            raise EvidenceError(
                f"the {side} kernel of this run has a fault on purpose "
                f"({', '.join(kernel.fault)}): that is no pair to keep",
                hint=f"take kernels.{side}.fault out, and measure",
            )
    for cell in verdict.cells:
        wrong = cell.outcome == "error" and cell.enforced
        guard = cell.section == "observability" and cell.enforced and cell.outcome == "violated"
        if wrong or guard:
            word = "violated" if guard else "in error"
            raise EvidenceError(
                f"{cell.clause!r} on slice {cell.slice!r} is {word}, so the numbers of this run "
                f"are not what they claim ({cell.note})",
                hint="repair what it says, and measure with --fresh",
            )


# reasons why a limit is not smaller
Binds = Literal["sampling", "together", "self-noise", "record", "fact"]

# metrics whose limit is an acceptable loss
_BUDGETS = ("reward_drift", "reward_gap", "policy_gradient_bias", "ratio_budget")
_SKEWED = 0.5  # share of a mean in 5 % of the groups, above which the bootstrap is unreliable


@dataclass(frozen=True)
class Limit:
    """One clause's limit, from a run of an accepted pair.

    Args:
        slice: the deciding slice, which needs this limit.
        measured, floor: on that slice, in the unit of the limit; for a percentile clause the
            measured percentile, and that of the noise.
        before: the earlier limit; None without such a clause.
        limit: None if refused.
        power: share of later runs in which the clause holds on all its slices; None for a fact.
        top: share of the mean in the top 5 % of the prompt groups, on the deciding slice; None for
            a percentile or a fact.
        note: the reason of a refusal; for a fact, its distance from the run's value.
    """

    clause: str
    metric: str
    aggregate: str
    slice: str
    place: Place
    measured: float | None
    floor: float | None
    before: float | None
    limit: float | None
    power: float | None
    binds: Binds
    enforced: bool = True
    note: str = ""
    top: float | None = None


@dataclass(frozen=True)
class Skipped:
    """A clause whose limit is unchanged, with the reason."""

    clause: str
    reason: str


@dataclass(frozen=True)
class Calibration:
    """The limits that such a pair keeps, at the contract's sizes and confidence.

    Args:
        asked: the requested power; power: the share of later runs in which all
            enforced clauses that were calibrated on samples hold at once; None: none was.
        groups: workload -> prompt groups of the run, and of a later one.
        resamples: number of simulated later runs.
    """

    rows: tuple[Limit, ...]
    left: tuple[Skipped, ...]
    asked: float
    power: float | None
    groups: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    resamples: int = 0

    @property
    def limits(self) -> dict[Place, float]:
        """Place of a limit in the contract -> the new one."""
        return {(*row.place, "at_most"): row.limit for row in self.rows if row.limit is not None}

    @property
    def notes(self) -> dict[Place, str]:
        """Place of a changed limit -> its earlier value, as a comment in the contract."""
        return {
            (*row.place, "at_most"): f"calibrated: was {row.before:g}"
            for row in self.rows
            if row.limit is not None and row.before is not None and row.limit != row.before
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about these limits."""
        warnings = []
        for row in self.rows:
            if row.limit is None:
                continue
            if row.metric in _BUDGETS and row.before is not None and row.limit > row.before:
                warnings.append(
                    f"{row.clause}: a {row.metric} of {row.limit:g} is more than the budget of "
                    f"{row.before:g} that the contract certified; what it gives as the reason for "
                    "that number does not hold for this one"
                )
            if row.top is not None and row.top > _SKEWED:
                warnings.append(
                    f"{row.clause}: 5 % of the prompt groups carry {100 * row.top:.0f} % of its "
                    f"mean on slice {row.slice!r}: for such groups the stated power is too good"
                )
        return tuple(warnings)

    def to_dict(self) -> dict[str, Any]:
        return to_plain(self)


# Resampling: simulated later runs of the same pair, from the measured one.
#
# The pair is known from one run only, so its distribution is sampled too: each later run first
# samples the weights of this run's prompt groups (the Bayesian bootstrap, Rubin 1981), then groups
# by these weights.  Resampling groups directly would take the run's mean for the pair's, and
# predict 90 % where 82 % hold.


Floats = NDArray[np.float64]
_TOP = 0.05  # share of the prompt groups that dominate a skewed metric


def draw_counts(groups: int, size: int, resamples: int, rng: np.random.Generator) -> Floats:
    """The count of each prompt group in each later run, [B, G].

    Args:
        groups: number of prompt groups of the run.
        size: prompt groups of a later run.
    """
    weight_BG = rng.standard_exponential((resamples, groups))
    weight_BG /= weight_BG.sum(axis=1, keepdims=True)
    return rng.multinomial(size, weight_BG).astype(np.float64)


def top_share(total_G: Floats) -> float:
    """The share of the largest 5 % of the prompt groups in their sum; 0 if that is 0.

    Values below 0, which only sampling noise gives, count as 0.

    >>> round(top_share(np.array([9.0] + 19 * [1.0])), 2)
    0.32
    """
    total_G = np.sort(np.maximum(total_G, 0.0))
    if not total_G.sum():
        return 0.0
    largest_G = total_G[-math.ceil(_TOP * len(total_G)) :]
    return float(largest_G.sum() / total_G.sum())


@dataclass(frozen=True)
class Resampled:
    """A cell in later runs: whether it holds, per limit.

    Args:
        count_BG: count of each prompt group in each later run.
        log_price: log threshold of `holds`, nats.
    """

    cell: Cell
    kind: Certificate
    rounds: Rounds
    count_BG: Floats
    log_price: float
    _known: dict[object, object] = field(default_factory=dict, compare=False, repr=False)

    def at(self, limit: float) -> Certificate:
        """The kind with another limit, in the unit of the metric."""
        feed = self.kind.feed
        if feed.threshold is not None:
            return replace(self.kind, feed=replace(feed, threshold=limit))
        return replace(self.kind, feed=replace(feed, limit=(limit - feed.low) / feed.scale))

    def holds(self, limit: float) -> NDArray[np.bool_]:
        """Mask of the later runs in which the cell holds, [B]."""
        if limit not in self._known:
            kind = self.at(limit)
            growth_BK = self.count_BG @ self._growth(kind)
            top_B = growth_BK.max(axis=1)
            mean_B = np.exp(growth_BK - top_B[:, None]) @ kind.feed.weights[0]
            self._known[limit] = top_B + np.log(mean_B) >= self.log_price
        return self._known[limit]  # type: ignore[return-value]

    def holds_often(self, power: float, limit: float) -> bool:
        return bool(self.holds(limit).mean() >= power)

    def needed(self, limit: float) -> int | None:
        """The number of such prompt groups that show a limit; None if none does."""
        kind = self.at(limit)
        growth_K = self._growth(kind).mean(axis=0)
        return units_to_decide(growth_K, kind.feed.weights[0], 1, self.log_price)

    def _growth(self, kind: Certificate) -> Floats:
        """The contribution of each prompt group to the log e-value, [G, K], nats."""
        x = kind.feed.limit
        total_G, tokens_G, missing_G = self._sums(kind.feed)
        if self.cell.claim == "population":
            excess_G = total_G + missing_G - x * (tokens_G + missing_G)
            z_G = np.clip(x + excess_G / self.cell.capacity, 0.0, 1.0)
            # a group that does not meet the slice has z = x, and adds nothing
            return np.log1p(NEG * z_G[:, None]) - np.log1p(NEG * x)
        logs_GK = self._logs(kind.feed, total_G) + missing_G[:, None] * np.log1p(NEG)
        return logs_GK - (tokens_G + missing_G)[:, None] * np.log1p(NEG * x)

    def _sums(self, feed: Feed) -> tuple[Floats, Floats, Floats]:
        """Sum of x, units with a value and units without, of each prompt group, [G]."""
        key = ("sums", feed.threshold)
        if key not in self._known:
            units = self._units(feed)
            n = len(units.missing_G)
            total_G = np.bincount(units.group_U, weights=units.x_U, minlength=n)
            tokens_G = np.bincount(units.group_U, minlength=n).astype(np.float64)
            self._known[key] = (total_G, tokens_G, units.missing_G.astype(np.float64))
        return self._known[key]  # type: ignore[return-value]

    def _logs(self, feed: Feed, total_G: Floats) -> Floats:
        """Sum of log(1 + t x) of each prompt group, [G, K]."""
        if feed.threshold is not None:  # x is 0 or 1
            return total_G[:, None] * np.log1p(NEG)
        if "logs" not in self._known:
            units = self._units(feed)
            logs = [np.log1p(t * units.x_U) for t in NEG]
            sums = [np.bincount(units.group_U, log_U, len(total_G)) for log_U in logs]
            self._known["logs"] = np.stack(sums, axis=1)
        return self._known["logs"]  # type: ignore[return-value]

    def _units(self, feed: Feed) -> Units:
        """The units of all rounds, with consecutive prompt group numbers."""
        kind = replace(self.kind, feed=feed)
        parts = [kind.units(self.cell, view) for view in self.rounds.own]
        starts = np.cumsum([0, *(len(part.missing_G) for part in parts)])
        return Units(
            np.concatenate([part.x_U for part in parts]),
            np.concatenate([part.group_U + at for part, at in zip(parts, starts, strict=False)]),
            np.concatenate([part.missing_G for part in parts]),
        )

    @property
    def groups_met(self) -> int:
        """Prompt groups of this run that have a unit in the slice."""
        _, tokens_G, missing_G = self._sums(self.kind.feed)
        return int(np.count_nonzero(tokens_G + missing_G))

    @property
    def top(self) -> float | None:
        """The share of the top 5 % of the prompt groups in a mean; None for a percentile."""
        feed = self.kind.feed
        if feed.threshold is not None:
            return None
        total_G, tokens_G, _ = self._sums(feed)
        met_G = tokens_G > 0  # of the whole run: a small slice is met by few groups anyway
        return top_share((total_G - feed.best * tokens_G)[met_G])

    def clear_of_noise(self, limit: float) -> bool:
        """Whether twice the noise floor is within the limit, so that exceeding it is a
        violation.
        """
        kind = self.at(limit)
        floor = self._floor(kind)
        return floor is None or 2 * floor + kind.feed.low / kind.feed.scale <= kind.feed.limit

    def _floor(self, kind: Certificate) -> float | None:
        noise = [tuple(kind.noise(self.cell, v) for v in selves) for selves in self.rounds.selves]
        return kind.floor(self.cell, noise)

    def measured(self) -> float | None:
        """The measured mean or percentile; None without data."""
        if self.kind.feed.threshold is not None:
            return self._percentile(self.rounds.own)
        total_G, tokens_G, _ = self._sums(self.kind.feed)
        n = tokens_G.sum()
        return self.kind.feed.value(float(total_G.sum() / n)) if n else None

    def floor(self) -> float | None:
        """The noise floor of the noisier side; None if not measured."""
        if self.kind.feed.threshold is None:
            floor = self._floor(self.kind)
            return None if floor is None else self.kind.feed.value(floor)
        sides = zip(*filter(None, self.rounds.selves), strict=True)
        percentiles = [self._percentile(side) for side in sides]
        return max((value for value in percentiles if value is not None), default=None)

    def largest(self, *, selves: bool = False) -> float:
        """The largest finite measured value; 0 if there is none.

        Args:
            selves: whether to include the noise data.
        """
        more = [view for views in self.rounds.selves for view in views] if selves else []
        values = self._values((*self.rounds.own, *more))
        return float(values[np.isfinite(values)].max(initial=0.0))

    def _percentile(self, views: Sequence[View]) -> float | None:
        values = self._values(views)
        if not len(values):
            return None
        share = 1 - self.kind.feed.limit
        return float(np.quantile(values, share, method="inverted_cdf"))

    def _values(self, views: Sequence[View]) -> Floats:
        parts = [self.kind.values(self.cell, v)[v.mask(self.cell.cut)] for v in views]
        values = np.concatenate(parts) if parts else np.zeros(0)
        return values[~np.isnan(values)]


# Precision floor: the value of a metric from rounding of the recorded logprobs alone.
#
# For two identical kernels with the logprobs of one rounded, the error of each log ratio is uniform
# on [-eta, eta] and independent between tokens.


_GRID = 2049


def record_floor(later: Resampled, capture: str) -> float | None:
    """The effect of rounding alone, in the unit of the metric, for responses of these lengths.

    Args:
        capture: what logprobs are recorded in.

    Returns:
        None if unknown for the metric.
    """
    clause = later.cell.clause
    if clause.metric in DIVERGENCES:
        return capture_floor(clause.metric, capture, clause.aggregate or "mean")
    error_N = np.linspace(-1.0, 1.0, _GRID) * eta(capture)
    length_S = np.concatenate([view.pair.infer.length_S for view in later.rounds.own])
    return later.kind.of_rounding(error_N, length_S[length_S > 0])


FEWEST = 50  # fewest prompt groups of a run, or of a slice, for resampling
_BEYOND = "no token of the run exceeds the limit, so the run says nothing about rarer ones"
_UNKNOWN = "the effect of rounding to {} on this metric is not known"
_COARSE = ("bfloat16", "float16")  # limits up to this are caused by rounding, not by kernels
_RECORD = "let the engine record its logprobs as float32 or float64"


@dataclass
class _ClauseLimit:
    """A clause on all its slices, in later runs.

    Args:
        decides: the slice that needs the limit.
        step: of the limit; highest: the last one at which the clause could still fail.
        capture: format of the recorded logprobs.
    """

    clause: Clause
    place: Place
    cells: Sequence[Resampled]
    decides: Resampled
    step: int
    highest: int
    binds: Binds
    capture: str

    @property
    def limit(self) -> float:
        return rounding.value(self.step)

    @property
    def holds(self) -> NDArray[np.bool_]:
        """Mask of the later runs in which all slices hold, [B]."""
        return np.all([cell.holds(self.limit) for cell in self.cells], axis=0)

    def raised(self) -> None:
        self.step += 1
        self.binds = "together"

    def row(self) -> Limit:
        """The clause's limit, or why there is none."""
        clause, later = self.clause, self.decides
        assert isinstance(clause.at_most, float)
        known = record_floor(later, self.capture)
        least, wanted = known or 0.0, self.limit
        if wanted < least:
            self.step, self.binds = rounding.at_or_above(least), "record"
        row = Limit(
            clause=clause.id,
            metric=clause.metric,
            aggregate=clause.aggregate or "",
            slice=later.cell.cut.name,
            place=self.place,
            measured=later.measured(),
            floor=later.floor(),
            before=clause.at_most,
            limit=self.limit,
            power=float(self.holds.mean()),
            binds=self.binds,
            enforced=clause.enforced,
            top=later.top,
        )
        if self.binds == "record" and self.capture in _COARSE:
            note = (
                f"{wanted:g} would do, and logprobs are recorded as {self.capture} (off by up to "
                f"{eta(self.capture):.1e}): rounding alone reads as {least:.1e}; {_RECORD}"
            )
            return replace(row, limit=None, power=None, note=note)
        if known is None:
            return replace(row, note=_UNKNOWN.format(self.capture))
        beyond = later.kind.feed.threshold is not None and self.limit >= later.largest()
        return replace(row, note=_BEYOND) if beyond else row


def calibrate(
    plan: Plan,
    closed: Mapping[str, Rounds],
    judged: Sequence[CellVerdict],
    *,
    power: float,
    resamples: int,
    rng: np.random.Generator,
) -> Calibration:
    """The smallest limits that the pair of a run keeps, clause by clause.

    One limit serves all slices of a clause.  It has two significant digits, and is never
    below twice the noise floor, where red would not be red, nor below what the record
    resolves.  Where clauses hold often enough one by one and not together, the one that
    fails most often is raised until they do.

    Args:
        plan: plan of the run; its attempt defines the threshold of later runs.
        closed: its rounds, by workload.
        judged: its cells, for facts about the golden texts.
        power: the probability that a later run of the contract's full size holds, in (0, 1).
        resamples: number of simulated later runs.

    Raises:
        EvidenceError: too few prompt groups, or nothing in the contract can be calibrated.
    """
    counts = _later_runs(plan, closed, resamples, rng)
    captures = {name: _capture(closed[name]) for name in counts}
    limits: list[_ClauseLimit] = []
    rows: dict[str, Limit] = {}
    left: list[Skipped] = []
    by_clause: dict[str, list[Cell]] = {}
    for cell in plan.cells:
        by_clause.setdefault(cell.clause.id, []).append(cell)
    for cells in by_clause.values():
        clause = cells[0].clause
        if cells[0].section == "observability":
            continue
        if isinstance(clause.at_most, Relative):
            left.append(Skipped(clause.id, "its limit is relative to another measured value"))
            continue
        if cells[0].kind.certificate:
            rounds, count_BG = closed[cells[0].workload], counts[cells[0].workload]
            price = log_price(plan.alpha)
            later = [Resampled(c, c.kind.certificate, rounds, count_BG, price) for c in cells]  # type: ignore[arg-type]
            result = _clause_limit(later, power, captures[cells[0].workload])
        elif cells[0].kind.source == "golden":
            result = _fact_limit(cells, judged)
        elif not cells[0].kind.applies:
            result = f"it is not judged at stage {plan.stage!r}"
        else:
            result = f"{clause.metric} is not calibrated by this version"
        if isinstance(result, _ClauseLimit):
            limits.append(result)
        elif isinstance(result, Limit):
            rows[clause.id] = result
        else:
            left.append(Skipped(clause.id, result))
    together = _together([p for p in limits if p.clause.enforced], power)
    rows |= {p.clause.id: p.row() for p in limits}
    if not any(row.limit is not None for row in rows.values()):
        reasons = [*left, *(Skipped(row.clause, row.note) for row in rows.values())]
        why = "; ".join(f"{skipped.clause}: {skipped.reason}" for skipped in reasons)
        raise EvidenceError(f"no limit of this contract can be calibrated ({why})")
    order = [clause.id for _, _, clause in plan.contract.clauses()]
    return Calibration(
        rows=tuple(sorted(rows.values(), key=lambda row: order.index(row.clause))),
        left=tuple(left),
        asked=power,
        power=together,
        groups={n: (closed[n].groups, int(count_BG[0].sum())) for n, count_BG in counts.items()},
        resamples=resamples,
    )


def _later_runs(
    plan: Plan, closed: Mapping[str, Rounds], resamples: int, rng: np.random.Generator
) -> dict[str, NDArray[np.float64]]:
    """Workload -> count of each of its prompt groups in each later run."""
    counts = {}
    for schedule in plan.schedules:
        wanted = any(
            cell.workload == schedule.name and cell.kind.certificate for cell in plan.cells
        )
        groups = closed[schedule.name].groups if schedule.name in closed else 0
        if wanted and groups < FEWEST:
            raise EvidenceError(
                f"the run has {groups} prompt groups of {schedule.name!r}, and limits are "
                f"calibrated on {FEWEST} or more",
                hint="raise promotion.offline.prompt_groups and go on with the same run directory: "
                "servanda check CONTRACT --run-dir RUN_DIR",
            )
        if wanted:
            size = schedule.rounds * schedule.workload.round  # every round is full
            counts[schedule.name] = draw_counts(groups, size, resamples, rng)
    return counts


def _clause_limit(cells: Sequence[Resampled], power: float, capture: str) -> _ClauseLimit | str:
    """The smallest limit at which all slices hold often enough; or why there is none."""
    cell = cells[0].cell
    if not cells[0].kind.feed.proves:
        return "no sample shows that a mean without bound is small: give the clause a clip"
    for later in cells:
        if later.groups_met < FEWEST:
            return (
                f"{later.groups_met} prompt groups of the run met slice {later.cell.cut.name!r}, "
                f"and a limit is calibrated on {FEWEST} or more: measure more, or give that slice "
                "a clause of its own"
            )
    highest = _highest(cells)
    smallest = partial(rounding.first, rounding.LOWEST, highest)
    clear = [smallest(later.clear_of_noise) for later in cells]
    alone = [smallest(partial(later.holds_often, power)) for later in cells]
    for later, noise_step, step in zip(cells, clear, alone, strict=True):
        if noise_step is None:
            return f"twice the noise floor on slice {later.cell.cut.name!r} exceeds every limit"
        if step is None and (short := _too_few_groups(later, highest)):
            return short
        if step is None:
            return (
                f"no limit below {rounding.value(highest + 1):g} is kept often enough on slice "
                f"{later.cell.cut.name!r}: raise promotion.offline.prompt_groups"
            )
    sampled, quiet = (max(s for s in some if s is not None) for some in (alone, clear))
    step = max(sampled, quiet)
    binds: Binds = "sampling" if sampled >= quiet else "self-noise"
    deciding = (alone if sampled >= quiet else clear).index(step)
    limit = _ClauseLimit(
        cell.clause, cell.place, cells, cells[deciding], step, highest, binds, capture
    )
    while limit.holds.mean() < power and limit.step < highest:
        limit.raised()  # slice by slice it held often enough, and not on all of them
    return limit


def _too_few_groups(later: Resampled, highest: int) -> str:
    """Why no percentile limit can be shown at these sizes, even without violations; or ""."""
    if later.kind.feed.threshold is None:
        return ""
    size = int(later.count_BG[0].sum())
    needed = later.needed(rounding.value(highest))
    if needed is None or needed <= size:
        return ""
    return (
        f"{later.cell.clause.aggregate} on slice {later.cell.cut.name!r} takes about {needed:,} "
        f"prompt groups like these even of identical kernels, and a run has {size:,}: raise "
        "promotion.offline.prompt_groups"
    )


def _highest(cells: Sequence[Resampled]) -> int:
    """The last step at which the clause can still fail."""
    feed = cells[0].kind.feed
    most = feed.value(1.0) if feed.threshold is None else math.inf
    if feed.threshold is not None:
        # no change beyond the largest value
        metric = cells[0].cell.clause.metric
        most = DIVERGENCES[metric].span[1] if metric in DIVERGENCES else math.inf
        top = max(later.largest(selves=True) for later in cells)
        if 0 < top < most:
            return rounding.at_or_above(top)
        if not top:
            return rounding.LOWEST
    last = rounding.at_or_above(most if math.isfinite(most) else 1e9)
    return last - 1


def _capture(closed: Rounds) -> str:
    """The precision of the coarser side's record."""
    pairs = [view.pair for view in closed.own]
    sides = ([p.train for p in pairs], [p.infer for p in pairs])
    records = [captured(np.concatenate([s.columns["logp"] for s in side])) for side in sides]
    return min(records, key=CAPTURES.__getitem__)


def _together(limits: Sequence[_ClauseLimit], power: float) -> float | None:
    """Raise limits until all clauses hold together often enough; returns that share."""
    if not limits:
        return None
    while True:
        holds_PB = np.array([limit.holds for limit in limits])
        share = float(holds_PB.all(axis=0).mean())
        free = [i for i, p in enumerate(limits) if p.step < p.highest and not holds_PB[i].all()]
        if share >= power or not free:
            return share
        limits[min(free, key=lambda i: holds_PB[i].mean())].raised()


def _fact_limit(cells: Sequence[Cell], judged: Sequence[CellVerdict]) -> Limit | str:
    """The value on the golden texts plus twice the noise floor.

    In other batches each side may differ by its noise floor, and so their difference by both: exact
    for metrics with the triangle inequality.
    """
    clause = cells[0].clause
    mine = [c for c in judged if c.clause == clause.id]
    measured: list[tuple[float, CellVerdict]] = []
    for verdict in mine:
        value = verdict.value if verdict.interval is None else verdict.interval[1]
        if value is None:
            return f"nothing was measured on {verdict.slice!r}"
        if not math.isfinite(value):
            return f"it is infinite on {verdict.slice!r}"
        measured.append((value + 2 * (verdict.floor or 0.0), verdict))
    if not measured:
        return "nothing was measured"
    beyond, verdict = max(measured, key=lambda pair: pair[0])
    value = beyond - 2 * (verdict.floor or 0.0)
    limit = rounding.value(rounding.at_or_above(beyond)) if beyond > 0 else 0.0
    assert isinstance(clause.at_most, float)
    times = (
        f"{limit / value:.3g} times the measured value" if value else "every measured value is 0"
    )
    return Limit(
        clause=clause.id,
        metric=clause.metric,
        aggregate=clause.aggregate or "max",
        slice=verdict.slice,
        place=cells[0].place,
        measured=value,
        floor=verdict.floor,
        before=clause.at_most,
        limit=limit,
        power=None,
        binds="fact",
        enforced=clause.enforced,
        note=f"{times}: the value plus twice the noise floor, rounded up",
    )
