# Lint of the clauses: a metric in its section, and a limit that can both hold and fail.

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from servanda.contract.clause import (
    SAMPLE_RATIO,
    WHOLE,
    Clause,
    Relative,
    Section,
    printed_metric,
)
from servanda.contract.finding import Finding
from servanda.contract.key_aliases import Path
from servanda.contract.model import Contract
from servanda.judgement.clauses.base import GUARDS
from servanda.judgement.clauses.chain_metrics import CHAIN, chain_metric
from servanda.judgement.clauses.scope import OUTCOME_METRICS, known_by_name, of_outcomes, slices_of
from servanda.judgement.lint.runtime import RUNTIME_METRICS, runtime
from servanda.judgement.lint.stages import stages
from servanda.judgement.slices.rules import Known
from servanda.registry import nearest, quoted
from servanda.theory.divergence.base import DIVERGENCES, Divergence
from servanda.theory.divergence.calibration import CALIBRATION

if TYPE_CHECKING:
    from servanda.contract.yaml_reader import Marks


# Lint of the bound chain: declarations that a metric needs, and limits that can hold and fail.


_ORDER = ("request", "context", "outcome")
# declarations that a metric may need; errors in them are reported at their own place
_DECLARES = ("gradient", "reward", "workload", "workloads")


def chain(
    path: Path,
    section: Section,
    contract: Contract,
    clause: Clause,
    broken: Collection[Path] = (),
) -> Iterator[Finding]:
    """Check a clause of the chain: its section, limit, slices and required declarations.

    Args:
        broken: mappings with a value that was already rejected.
    """
    name, metric = clause.metric, chain_metric(contract, clause)
    if section != "statistical":
        message = f"{name} is judged from sampled tokens; it does not belong in {section}"
        yield Finding((*path, "metric"), message, "move the clause to statistical")
        return
    for key in ("aggregate", "clip"):
        if key not in metric.takes and getattr(clause, key) is not None:
            yield Finding((*path, key), f"{name} takes no {key}", f"remove {key}", key=True)
    known = known_by_name(contract)
    for j, slice_name in enumerate(clause.slices or ()):
        when = known.get(slice_name, "request")
        if _ORDER.index(when) > _ORDER.index(metric.known) and when != "outcome":
            message = f"{name} concerns whole answers, and slice {slice_name!r} is a part of one"
            hint = "name slices by labels.* or request.*, or [all]"
            if CHAIN[name].known != metric.known:
                hint += "; gradient: {loss: token_mean} concerns tokens"
            yield Finding((*path, "slices", j), message, hint)
    if clause.at_least is not None:
        message = f"a divergence is kept small: {name} takes at_most"
        hint = "remove at_least" if clause.at_most is not None else "write at_most"
        yield Finding((*path, "at_least"), message, hint, key=True)
    elif clause.at_most is None:
        hint = f"write {metric.example}"
        yield Finding(path, f"clause {clause.id!r} has no limit", hint)
    elif not isinstance(clause.at_most, float):
        message = f"{name} follows from what the contract declares: its limit is a number"
        yield Finding((*path, "at_most"), message, f"write {metric.example}")
    elif clause.at_most < 0 or (clause.at_most == 0 and clause.percentile is None):
        message = f"{name} is never negative, and no sample can show that it is 0"
        yield Finding((*path, "at_most"), message, "write a limit above 0")
    elif not _declared_amiss(contract, broken):
        for lack in metric.lacks(contract, clause):
            yield Finding((*path, lack.key), lack.message, lack.hint)


def _declared_amiss(contract: Contract, broken: Collection[Path]) -> bool:
    """Whether a required declaration is itself wrong, which is reported at its own place."""
    if any(path and path[0] in _DECLARES for path in broken):
        return True
    reward = contract.reward
    return reward is not None and reward.range[0] >= reward.range[1]


# Lint of slices that are known only after the token: the metrics allowed on them.


_DEFINED = " and ".join(OUTCOME_METRICS)


def outcomes(
    path: Path, contract: Contract, section: Section, clause: Clause, known: Mapping[str, Known]
) -> Iterator[Finding]:
    """A contribution needs a slice of outcomes, and such a slice a contribution."""
    contribution = of_outcomes(clause.metric)
    if contribution and section != "statistical":
        message = (
            f"{clause.metric} is estimated from sampled tokens; it does not belong in {section}"
        )
        yield Finding((*path, "metric"), message, "move the clause to statistical")
        return
    for j, name in enumerate(clause.slices or ()):
        at = (*path, "slices", j)
        if not contribution and known.get(name) == "outcome":
            message = f"slice {name!r} is known only after the token is drawn, so an average over "
            message += f"it says nothing: a kernel that halves the mass there reads {clause.metric}"
            message += " 0"
            yield Finding(at, message, f"promise {_DEFINED} there, or slice by context.*")
        elif clause.metric == "mass_gap" and known.get(name, "outcome") != "outcome":
            message = f"both kernels have the same mass on slice {name!r}: all of it"
            hint = "name a slice by outcome.*, such as {match: {outcome.rank: {gte: 10}}}"
            yield Finding(at, message, hint)
    if contribution and clause.slices is None and not slices_of(contract, section, clause):
        message = f"{clause.metric} is what a slice of outcomes contributes, and none is declared"
        hint = "add one, such as {name: rare, match: {outcome.rank: {gte: 10}}}"
        yield Finding((*path, "metric"), message, hint)


def mass_gap(path: Path, clause: Clause) -> Iterator[Finding]:
    """A mass gap has one limit for both signs: no clip, and no aggregate except the mean."""
    if clause.aggregate not in (None, "mean"):
        at = (*path, "aggregate")
        message = "mass_gap is a difference of two probabilities: only its mean is defined"
        yield Finding(at, message, "write aggregate: mean")
    for name in ("clip", "at_least"):
        if getattr(clause, name) is not None:
            message = f"mass_gap takes no {name}: at_most bounds it on both sides of 0"
            yield Finding((*path, name), message, f"remove {name}", key=True)
    limit = clause.at_most
    if limit is None:
        yield Finding(path, f"clause {clause.id!r} has no limit", "add at_most: 0.01")
    elif isinstance(limit, Relative) or not 0 < limit < 1:
        message = "the limit of a mass gap is a number between 0 and 1"
        yield Finding((*path, "at_most"), message, "write at_most: 0.01")


COVERAGE = "rescored_ratio"
_WITHOUT_LIMIT = ("sampler_fidelity", "served_fidelity", "coherence")  # these can only reject
_GUARD_LIMITS = {
    "usable_ratio": ("at_least", "0.999"),
    "kept_ratio": ("at_least", "0.9"),
    "self_noise": ("at_most", "0.005"),
    SAMPLE_RATIO: ("at_most", "0.02"),
    "rescored_ratio": ("at_least", "0.005"),
    "declared_weight_ratio": ("at_least", "0.999"),
    "loss_kept_ratio": ("at_least", "0.95"),
    "mean_weight_ratio": ("at_least", "0.5"),
    "effective_ratio": ("at_least", "0.3"),
}
_AN_EXAMPLE = "{id: tv, metric: tv, aggregate: mean, at_most: 0.02}"


def clauses(contract: Contract, marks: Marks, broken: Collection[Path] = ()) -> Iterator[Finding]:
    """Check every clause, and that there is at least one.

    Args:
        broken: mappings with a value that was already rejected.
    """
    first: dict[str, Path] = {}
    declared = known_by_name(contract)
    known = [*DIVERGENCES, *GUARDS, CALIBRATION, *CHAIN, *RUNTIME_METRICS]
    for section, path, clause in contract.clauses():
        if clause.id in first:
            line = marks.near((*first[clause.id], "id")).line
            message = f"two clauses are named {clause.id!r}; the first is in line {line}"
            yield Finding((*path, "id"), message, "give it its own id: evidence is kept by id")
        first.setdefault(clause.id, path)
        if clause.slices == ():
            message = f"clause {clause.id!r} applies to no slice"
            yield Finding((*path, "slices"), message, "remove slices: it then applies to every one")
        for j, name in enumerate(clause.slices or ()):
            if name not in declared:
                message = f"no slice is named {quoted(name)}"
                yield Finding((*path, "slices", j), message, nearest(name, declared))
        yield from stages(path, contract, clause)
        # only for a name that is not Servanda's are the installed packages asked
        if clause.metric not in known and clause.metric not in DIVERGENCES:
            message = f"no metric is named {quoted(clause.metric)}"
            hint = nearest(clause.metric, {*map(printed_metric, known), *DIVERGENCES.names()})
            yield Finding((*path, "metric"), message, hint)
            continue
        yield from outcomes(path, contract, section, clause, declared)
        if clause.metric in RUNTIME_METRICS:
            yield from runtime(path, section, contract, clause)
            continue
        if clause.over is not None and clause.metric != COVERAGE:
            message = f"{clause.metric} covers all that was measured"
            hint = "remove over: the evidence is cumulative, and valid at every evaluation"
            yield Finding((*path, "over"), message, hint, key=True)
        if clause.load is not None:
            message = f"{clause.metric} is measured under no load"
            yield Finding((*path, "load"), message, "remove load", key=True)
        if clause.metric in GUARDS:
            yield from _guard(path, section, clause)
            for lack in GUARDS[clause.metric].lacks(contract, clause):
                yield Finding((*path, lack.key), lack.message, lack.hint)
        elif clause.metric in DIVERGENCES:
            yield from _divergence(path, section, clause)
            yield from _relative(path, section, contract, clause)
        elif clause.metric == CALIBRATION:
            yield from _calibration(path, section, clause)
            yield from _relative(path, section, contract, clause)
        elif clause.metric in CHAIN:
            yield from chain(path, section, contract, clause, broken)
    if not first:
        message = "the contract promises nothing: it has no clause"
        yield Finding((), message, f"add one under statistical, such as {_AN_EXAMPLE}")


def _guard(path: Path, section: Section, clause: Clause) -> Iterator[Finding]:
    metric = printed_metric(clause.metric)
    if section != "observability":
        message = f"{metric} is a validity check, a precondition of the promises in {section}"
        yield Finding((*path, "metric"), message, "move the clause to observability.clauses")
        return
    for name in ("aggregate", "clip"):
        if getattr(clause, name) is not None:
            yield Finding((*path, name), f"{metric} takes no {name}", "remove it", key=True)
    if clause.metric in _WITHOUT_LIMIT:
        for name in ("at_most", "at_least"):
            if getattr(clause, name) is not None:
                hint = "remove it: the check rejects at the confidence of the contract"
                yield Finding((*path, name), f"{metric} takes no limit", hint, key=True)
        return
    if clause.metric == COVERAGE and set(clause.slices or ()) - {WHOLE}:
        hint = "remove slices: how much of each was served is not in the log"
        yield Finding((*path, "slices"), f"{metric} is counted on the whole", hint)
    takes, example = _GUARD_LIMITS[clause.metric]
    other = "at_most" if takes == "at_least" else "at_least"
    if getattr(clause, other) is not None:
        hint = f"write {takes}: {example}"
        yield Finding((*path, other), f"{metric} takes {takes}", hint, key=True)
        return
    yield from _share((*path, takes), clause, metric, takes, example)


def _share(path: Path, clause: Clause, metric: str, takes: str, example: str) -> Iterator[Finding]:
    """A limit between 0 and 1, that can both hold and fail."""
    limit, hint = getattr(clause, takes), f"write a share, such as {example}"
    words = takes.replace("_", " ")
    if limit is None:
        yield Finding(path[:-1], f"clause {clause.id!r} has no limit", f"add {takes}: {example}")
    elif isinstance(limit, Relative):
        message = f"{metric} has nothing to be relative to"
        yield Finding(path, message, f"write a number, such as {example}")
    elif limit > 1 or (takes == "at_most" and limit == 1):
        can = "can never be" if takes == "at_least" else "is always"
        message = f"{metric} is at most 1: it {can} {words} {limit:g}"
        yield Finding(path, message, hint)
    elif limit < 0 or (takes == "at_least" and limit == 0):
        message = f"{metric} is always at least {limit:g}: the clause can never fail"
        yield Finding(path, message, hint)


def _divergence(path: Path, section: Section, clause: Clause) -> Iterator[Finding]:
    metric = DIVERGENCES[clause.metric]
    if section not in ("numerical", "statistical"):
        message = f"{metric.name} compares the kernels' tokens; it does not belong in {section}"
        yield Finding((*path, "metric"), message, "move the clause to statistical")
        return
    if section == "numerical" and "logits" not in metric.forms:
        message = f"{metric.name} has no form on full logits, which numerical judges"
        yield Finding((*path, "metric"), message, "move the clause to statistical")
    elif section == "statistical" and metric.sampled_form is None:
        message = f"{metric.name} needs full logits; a sampled token has none"
        hint = "move the clause to numerical: golden texts are scored with full logits"
        yield Finding((*path, "metric"), message, hint)
        return
    if metric.name == "mass_gap":
        yield from mass_gap(path, clause)
        return
    yield from _aggregate(path, section, clause, metric)
    yield from _limit(path, section, clause, metric)


def _aggregate(
    path: Path, section: Section, clause: Clause, metric: Divergence
) -> Iterator[Finding]:
    """Check the aggregate and the clip of a clause."""
    aggregate = clause.aggregate or ("max" if section == "numerical" else None)
    if aggregate is None:
        of = "mean, or p99" if metric.bounded else "p99, or mean with clip: 1.0"
        yield Finding(path, f"clause {clause.id!r} needs an aggregate", f"add aggregate: {of}")
        return
    if section == "statistical" and aggregate == "max":
        message = "a sample cannot certify a maximum: the next token may exceed it"
        hint = "write p99.9, or move the clause to numerical, which measures every golden token"
        yield Finding((*path, "aggregate"), message, hint)
        return
    if clause.clip is not None and (aggregate != "mean" or metric.bounded):
        message = f"clip bounds a mean; {aggregate} does not need it"
        if metric.bounded:
            message = f"{metric.name} is bounded: there is nothing to clip"
        yield Finding((*path, "clip"), message, "remove clip", key=True)
    unbounded = aggregate == "mean" and not metric.bounded and clause.clip is None
    if section == "statistical" and aggregate == "mean" and metric.span[0] == -math.inf:
        message = f"{metric.name} has no smallest value, so no sample can certify its mean"
        hint = "promise aggregate: p99, or the mean of a metric that is never negative (k3_nats)"
        yield Finding((*path, "aggregate"), message, hint)
    elif section == "statistical" and unbounded and clause.mode == "enforce":
        message = f"the mean of {metric.name} has no bound, so no sample can certify it"
        hint = "add clip: 1.0, or promise aggregate: p99; mode: monitor shows it as an estimate"
        yield Finding((*path, "aggregate"), message, hint)


def _limit(path: Path, section: Section, clause: Clause, metric: Divergence) -> Iterator[Finding]:
    """Check for one upper limit that can both hold and fail."""
    limit = clause.at_most
    yield from _no_upper_limit(path, clause, metric.name)
    if clause.at_least is not None or limit is None or isinstance(limit, Relative):
        return
    at = (*path, "at_most")
    clipped = clause.clip is not None and clause.aggregate == "mean" and not metric.bounded
    # the mean of sampled values equals the exact one, whose range may be smaller
    exact = section == "numerical" or clause.aggregate == "mean"
    low, top = metric.span_of("logits") if exact and "logits" in metric.forms else metric.span
    top = clause.clip if clipped and clause.clip is not None else top
    if low == 0 and limit < 0:
        message = f"{metric.name} is never negative: a limit of {limit:g} can never hold"
        yield Finding(at, message, "write a limit above 0")
    elif limit < low:
        message = f"{metric.name} is at least {low:g}: a limit of {limit:g} can never hold"
        yield Finding(at, message, f"write a limit above {low:g}")
    elif limit >= top:
        cut = " after clip" if clipped else ""
        message = f"{metric.name} is at most {top:g}{cut}: a limit of {limit:g} can never fail"
        yield Finding(
            at, message, f"write a limit below {top:g}" + (", or raise clip" if cut else "")
        )
    elif limit == low == 0 and section == "statistical" and clause.percentile is None:
        message = "a sample cannot certify 0"
        hint = "move the clause to numerical: it measures every position of the golden texts"
        yield Finding(at, message, hint)


def _no_upper_limit(path: Path, clause: Clause, name: str) -> Iterator[Finding]:
    if clause.at_least is not None:
        message = f"a divergence is kept small: {name} takes at_most"
        hint = "remove at_least" if clause.at_most is not None else "write at_most"
        yield Finding((*path, "at_least"), message, hint, key=True)
    elif clause.at_most is None:
        yield Finding(path, f"clause {clause.id!r} has no limit", "add at_most: 0.02")


def _calibration(path: Path, section: Section, clause: Clause) -> Iterator[Finding]:
    """Check calibration: in numerical, a limit in (0, 1), no keys for single positions."""
    if section != "numerical":
        message = "calibration needs full logits and golden tokens; a sampled token has neither"
        hint = "move the clause to numerical: golden texts say which token was right"
        yield Finding((*path, "metric"), message, hint)
        return
    for name in ("aggregate", "clip"):
        if getattr(clause, name) is not None:
            message = f"calibration is one number for all positions: it takes no {name}"
            yield Finding((*path, name), message, "remove it", key=True)
    limit = clause.at_most
    yield from _no_upper_limit(path, clause, "calibration")
    if clause.at_least is not None or limit is None or isinstance(limit, Relative):
        return
    if limit >= 1:
        message = f"calibration is at most 1: a limit of {limit:g} can never fail"
        yield Finding((*path, "at_most"), message, "write a limit below 1, such as 0.02")
    elif limit <= 0:
        message = f"calibration is never negative, and rounding alone exceeds {limit:g}"
        yield Finding((*path, "at_most"), message, "write a limit above 0, such as 0.02")


def _relative(
    path: Path, section: Section, contract: Contract, clause: Clause
) -> Iterator[Finding]:
    """Check a relative limit: its reference must be measured, its factor meaningful."""
    limit, at = clause.at_most, (*path, "at_most")
    if not isinstance(limit, Relative):
        return
    if limit.of == "stable" and section == "numerical":
        message = "golden texts are scored by train and infer only"
        yield Finding((*at, "of"), message, "write of: self_noise, or a number")
    elif limit.of == "stable" and contract.stable is None:
        message = "the limit is relative to stable, and there is no stable: kernel"
        yield Finding(at, message, "declare stable:, or write of: self_noise")
    elif limit.of == "self_noise" and limit.times < 2:
        message = f"{limit.times:g} times the noise floor lies inside the noise: "
        message += "red needs twice the floor anyway"
        yield Finding((*at, "times"), message, "write times: 2, or more")
