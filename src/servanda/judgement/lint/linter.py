# Lint: consistency between the parts of a contract, all findings at once.
#
# Each rule is a generator of findings over a contract; the place of a finding is the path of the
# value to change.

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from servanda.contract.clause import (
    SAMPLE_RATIO,
    STAGES,
    WHOLE,
    Clause,
    Relative,
    Section,
    printed_metric,
)
from servanda.contract.fields import VARIABLE, duration_text
from servanda.contract.finding import Finding, Path
from servanda.contract.kernel_string import (
    QUANTIZATIONS,
    dialect_hint,
    is_dialect,
    quantization_hint,
)
from servanda.contract.model import EXTERNAL, Contract, Kernel, base_of
from servanda.contract.policy import Replica, StageRule
from servanda.contract.workload import Workload
from servanda.errors import Problem
from servanda.judgement.clauses.base import GUARDS
from servanda.judgement.clauses.chain_metrics import CHAIN, chain_metric
from servanda.judgement.clauses.scope import OUTCOME_METRICS, known_by_name, of_outcomes, slices_of
from servanda.judgement.lint.sections import (
    RUNTIME_METRICS,
    envelope,
    escalation,
    learning,
    runtime,
    slices,
    trend,
)
from servanda.judgement.slices.rules import Known
from servanda.registry import did_you_mean, quoted
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
    yield from _no_upper_limit(path, clause, name, f"write {metric.example}")
    if clause.at_least is not None or clause.at_most is None:
        return
    if not isinstance(clause.at_most, float):
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


# Lint of the clauses: a metric in its section, and a limit that can both hold and fail.


COVERAGE = "rescored_ratio"
# these can only reject
_WITHOUT_LIMIT = ("sampler_fidelity", "served_fidelity", "coherence", "outlier_tokens")
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
                yield Finding((*path, "slices", j), message, did_you_mean(name, declared))
        yield from stages(path, contract, clause)
        # only for a name that is not Servanda's are the installed packages asked
        if clause.metric not in known and clause.metric not in DIVERGENCES:
            message = f"no metric is named {quoted(clause.metric)}"
            hint = did_you_mean(clause.metric, {*map(printed_metric, known), *DIVERGENCES.names()})
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
    yield from _format(path, section, clause)


def _format(path: Path, section: Section, clause: Clause) -> Iterator[Finding]:
    """Check times_format: it stands beside a number that limits the mean of tv."""
    plain = isinstance(clause.at_most, float)
    if clause.times_format is not None and (
        (section, clause.metric, clause.aggregate, plain) != ("statistical", "tv", "mean", True)
    ):
        message = "times_format is for the mean of tv, beside a number as its limit"
        hint = "write metric: tv, aggregate: mean, at_most: 0.01; or remove times_format"
        yield Finding((*path, "times_format"), message, hint, key=True)


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
        hint = f"write a limit below {top:g}" + (", or raise clip" if cut else "")
        yield Finding(at, message, hint)
    elif limit == low == 0 and section == "statistical" and clause.percentile is None:
        message = "a sample cannot certify 0"
        hint = "move the clause to numerical: it measures every position of the golden texts"
        yield Finding(at, message, hint)


def _no_upper_limit(
    path: Path, clause: Clause, name: str, advice: str = "add at_most: 0.02"
) -> Iterator[Finding]:
    if clause.at_least is not None:
        message = f"a divergence is kept small: {name} takes at_most"
        hint = "remove at_least" if clause.at_most is not None else "write at_most"
        yield Finding((*path, "at_least"), message, hint, key=True)
    elif clause.at_most is None:
        yield Finding(path, f"clause {clause.id!r} has no limit", advice)


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


# Lint of the kernels: names that they use, and where their sampling is declared.


_SERVER = "openai_http"
URL = re.compile(r"https?://[^/\s?#]+(/[^\s?#]*)?")
_ADDRESS = "write url: http://127.0.0.1:8000"
_OF_SERVERS = ("url", "served", "dialect", "logprobs", "sampling_defaults", "timeout_s", "key_env")


def kernels(
    contract: Contract, engines: Collection[str], faults: Collection[str]
) -> Iterator[Finding]:
    """Check the names that a kernel uses, and the place of its sampling parameters."""
    sides: list[tuple[Path, Kernel | None]] = [
        (("kernels", "train"), contract.kernels.train),
        (("kernels", "infer"), contract.kernels.infer),
        (("stable",), contract.stable),
    ]
    for path, kernel in sides:
        if kernel is None:
            continue
        external = kernel.engine == EXTERNAL and path != ("stable",)
        if kernel.engine not in engines and not external:
            message = f"no engine is named {quoted(kernel.engine)}"
            hint = did_you_mean(kernel.engine, engines) if engines else "install an engine first"
            yield Finding((*path, "engine"), message, hint)
        if kernel.quantization is not None and kernel.quantization not in QUANTIZATIONS:
            message = f"no quantization is named {quoted(kernel.quantization)}"
            hint = quantization_hint(kernel.quantization)
            yield Finding((*path, "quantization"), message, hint)
        if kernel.sampling is not None and path[-1] != "train":
            message = f"{path[-1]} samples as workload.sampling says"
            hint = "declare it there; kernels.train.sampling is for a trainer's own transform"
            yield Finding((*path, "sampling"), message, hint, key=True)
        if kernel.routes is not None and path[-1] != "train":
            message = f"{path[-1]} draws, and has no experts to replay"
            hint = "declare it of kernels.train, which scores what infer drew"
            yield Finding((*path, "routes"), message, hint, key=True)
        if kernel.dialect is not None and not is_dialect(kernel.dialect):
            message = f"no dialect is named {quoted(kernel.dialect)}"
            yield Finding((*path, "dialect"), message, dialect_hint(kernel.dialect))
        yield from _server(path, kernel)
        yield from _fault(path, kernel, faults)


def _server(path: Path, kernel: Kernel) -> Iterator[Finding]:
    """Check the url and the keys about its server."""
    if kernel.engine == _SERVER:
        if kernel.url is None:
            yield Finding(path, "engine openai_http needs the url of a server", _ADDRESS)
        elif URL.fullmatch(kernel.url) is None:
            message = f"{quoted(kernel.url)} is not the address of a server"
            yield Finding((*path, "url"), message, _ADDRESS)
        if kernel.model is not None:
            message = "a server has loaded its model already"
            hint = "remove model; which one of several is named by served"
            yield Finding((*path, "model"), message, hint, key=True)
        if kernel.key_env is not None and VARIABLE.fullmatch(kernel.key_env) is None:
            message = "key_env is no name of a variable"
            hint = "write key_env: INFER_KEY; a key itself stands in no contract"
            yield Finding((*path, "key_env"), message, hint, bare=True)
        return
    for name in _OF_SERVERS:
        if getattr(kernel, name) is not None:
            message = f"engine {kernel.engine} runs its model itself and takes no {name}"
            hint = "write engine: openai_http, or remove it"
            yield Finding((*path, name), message, hint, key=True)


def _fault(path: Path, kernel: Kernel, faults: Collection[str]) -> Iterator[Finding]:
    if kernel.fault is None:
        return
    if len(kernel.fault) != 1:
        message = f"a kernel is given one fault at a time, found {len(kernel.fault)}"
        yield Finding((*path, "fault"), message, "write fault: {name: {...}}")
    for name in kernel.fault:
        if name not in faults:
            hint = did_you_mean(name, faults) if faults else "no fault can be injected here"
            message = f"no fault is named {quoted(name)}"
            yield Finding((*path, "fault", name), message, hint, key=True)


def check(
    contract: Contract,
    marks: Marks,
    *,
    engines: Collection[str],
    faults: Collection[str] = (),
    broken: Collection[Path] = (),
) -> list[Problem]:
    """The inconsistencies of a contract, in the order of the text.

    Args:
        contract: the parsed contract.
        marks: the places of its values.
        engines, faults: valid names.
        broken: mappings with a value that was already rejected; no findings about them or about the
            whole contract.
    """
    findings = [
        *kernels(contract, engines, faults),
        *workloads(contract),
        *labels(contract),
        *learning(contract),
        *slices(contract),
        *clauses(contract, marks, broken),
        *envelope(contract),
        *trend(contract),
        *escalation(contract),
        *promotion(contract),
        *routing(contract),
    ]
    broken = {path for path in broken if path}
    problems = []
    for f in findings:
        if not any(f.path[:n] in broken for n in range(len(f.path) + 1)):
            place = marks.key(f.path) if f.key else marks.near(f.path)
            where = replace(place, text="") if f.bare else place
            problems.append(Problem(f.message, where, f.hint))
    return sorted(problems, key=lambda p: (p.where.line, p.where.column) if p.where else (0, 0))


# Lint of the routing: consistency of its numbers, and requirements for acting.


def routing(contract: Contract) -> Iterator[Finding]:
    """Check for contradictions, and for rules that can never act."""
    rule = contract.routing
    declared = "without_snapshot" in rule.model_fields_set
    if declared and rule.without_snapshot == "stable" and contract.stable is None:
        message = "without a snapshot traffic goes to stable, and there is no stable: kernel"
        hint = "declare stable:, or write without_snapshot: infer"
        yield Finding(("routing", "without_snapshot"), message, hint)
    yield from _replicas(contract)
    yield from _order(contract)
    if contract.routing.mode == "enforce":
        yield from _enforced(contract)


def _replicas(contract: Contract) -> Iterator[Finding]:
    """Check the servers of the pools: each serves one pool, and the reference scorer none."""
    given, kernels = contract.routing.replicas, contract.kernels
    pools: tuple[tuple[str, tuple[Replica, ...] | None, Kernel | None], ...] = (
        ("infer", given.infer, kernels.infer),
        ("stable", given.stable, contract.stable),
    )
    train = base_of(kernels.train.url or "")
    seen: dict[str, str] = {}
    for pool, replicas, kernel in pools:
        at = ("routing", "replicas", pool)
        if replicas is None:
            if kernel is not None and kernel.url is not None:
                seen.setdefault(base_of(kernel.url), f"the url of {pool}")
            continue
        if kernel is None:
            hint = "declare stable: with the kernel that they run, or remove them"
            yield Finding(at, "stable has replicas, and there is no stable: kernel", hint, key=True)
        if not replicas:
            hint = "name a server, or remove the key: the kernel's url serves then"
            yield Finding(at, f"the replicas of {pool} are none", hint)
        for i, replica in enumerate(replicas):
            if replica.weight <= 0:
                hint = "write a weight above 0, or remove the replica"
                message = f"a weight of {replica.weight:g} gives a server no requests"
                yield Finding((*at, i, "weight"), message, hint)
            url, base = quoted(replica.url), base_of(replica.url)
            message = hint = ""
            if URL.fullmatch(replica.url) is None or "@" in replica.url:
                message = f"{url} is not the address of a server"
                hint = "write url: http://HOST:PORT; a key is named by key_env of the kernel"
            elif base == train:
                message = f"{url} is the server of kernels.train, and the reference scorer serves "
                message += "no users"
                hint = "name another server, or remove it"
            elif base in seen:
                message = f"{url} is {seen[base]} already"
                hint = "remove one of the two; `weight: 2` gives a server a double share"
            if message:
                yield Finding((*at, i, "url"), message, hint)
            seen.setdefault(base, f"a replica of {pool}")


def _order(contract: Contract) -> Iterator[Finding]:
    """Check the order of pairs of a minimum and a maximum."""
    rule = contract.routing
    if rule.sample > rule.sample_near:
        message = f"while all is well {rule.sample:g} is re-scored, and only {rule.sample_near:g} "
        message += "where a decision is near"
        hint = f"write sample_near: {rule.sample:g} or more, or a smaller sample"
        yield Finding(("routing", _written(contract, "sample", "sample_near")), message, hint)
    if rule.dwell > rule.longest_dwell:
        dwell, longest = duration_text(rule.dwell), duration_text(rule.longest_dwell)
        message = f"a slice stays away for {dwell} at least, and for {longest} at most"
        hint = f"write longest_dwell: {dwell} or more, or a shorter dwell"
        yield Finding(("routing", _written(contract, "dwell", "longest_dwell")), message, hint)


def _written(contract: Contract, first: str, second: str) -> str:
    """The field, of two, that the contract contains."""
    return first if first in contract.routing.model_fields_set else second


def _enforced(contract: Contract) -> Iterator[Finding]:
    """To act, routing needs a stable kernel, its capacity, and a rule with a diversion."""
    at = ("routing", "mode")
    if contract.stable is None:
        message = "enforce takes traffic to stable, and there is no stable: kernel"
        hint = "declare stable: with the kernel that serves when infer may not, or observe"
        yield Finding(at, message, hint)
        return
    if contract.routing.stable_in_flight is None:
        message = "enforce diverts nothing while no one says how much stable can answer"
        hint = "write stable_in_flight: with the requests that it can answer at a time"
        yield Finding(at, message, hint)
    actions = [action for rule in contract.escalation for action in rule.do]
    if not any(isinstance(action, Mapping) and "divert" in action for action in actions):
        message = "enforce diverts nothing: no rule of escalation asks for it"
        hint = "add {when: {clause: ID, is: violated}, do: [{divert: slice}]}"
        yield Finding(at, message, hint)


# Lint of the workloads, the golden texts and the weights.


_METADATA = "request.metadata."
_SOURCES = ("api_key", "route", f"{_METADATA}<key>")


def workloads(contract: Contract) -> Iterator[Finding]:
    """Check that each workload can be measured, and that the data of each section exists."""
    if contract.workload is not None and contract.workloads is not None:
        message = "workload and workloads are both given"
        yield Finding(("workloads",), message, "move the one into the other", key=True)
    for path, workload in _placed(contract):
        yield from _workload(path, workload)
    if contract.numerical and contract.golden is None:
        message = "numerical clauses are judged on golden texts, and there is no golden:"
        yield Finding(("numerical",), message, "add golden: {prompts: data/golden.jsonl}", key=True)
    if contract.statistical and not contract.all_workloads:
        message = "statistical clauses are judged on a workload, and there is no workload:"
        hint = "add workload: {prompts: data/prompts.jsonl}"
        yield Finding(("statistical",), message, hint, key=True)
    yield from _named(contract)
    yield from _external(contract)
    yield from _weights(contract)


def _placed(contract: Contract) -> Iterator[tuple[Path, Workload]]:
    if contract.workload is not None:
        yield ("workload",), contract.workload
    given = contract.workloads or {}
    named = given.items() if isinstance(given, Mapping) else enumerate(given)
    yield from ((("workloads", name), workload) for name, workload in named)


def _workload(path: Path, workload: Workload) -> Iterator[Finding]:
    if workload.source == "trainer":
        if workload.prompts:
            message = "the trainer brings its own prompts"
            yield Finding((*path, "prompts"), message, "remove prompts", key=True)
        return
    if not workload.prompts:
        message = "a workload needs the key 'prompts'"
        yield Finding(path, message, "add prompts: data/prompts.jsonl")
    if workload.mode == "score":
        message = "this version measures mode: rollout"
        hint = "remove mode: score; fixed texts are scored as golden"
        yield Finding((*path, "mode"), message, hint)


def _named(contract: Contract) -> Iterator[Finding]:
    """Check that workloads have unique names, and clauses name existing ones."""
    listed = contract.workloads if isinstance(contract.workloads, tuple) else ()
    for i, workload in enumerate(listed):
        if any(workload.name == other.name for other in listed[:i]):
            message = f"two workloads are named {workload.name!r}"
            yield Finding(("workloads", i, "name"), message, "give each workload its own name")
    names = contract.all_workloads
    for section, path, clause in contract.clauses():
        if clause.workload is None:
            continue
        at = (*path, "workload")
        if section == "numerical":
            message = "numerical clauses are judged on golden texts, not on a workload"
            yield Finding(at, message, "remove workload", key=True)
        elif clause.workload not in names:
            message = f"no workload is named {quoted(clause.workload)}"
            hint = did_you_mean(clause.workload, names) if names else "declare workloads:"
            yield Finding(at, message, hint)


def _external(contract: Contract) -> Iterator[Finding]:
    """A trainer's tokens come with both kernels' logprobs: no engine is opened, or all are."""
    sources = {w.source for w in contract.all_workloads.values()}
    if len(sources) == 2:
        path = next(p for p, w in _placed(contract) if w.source == "trainer")
        message = "one workload comes from a trainer and another from prompts"
        yield Finding((*path, "source"), message, "write two contracts")
        return
    for side in ("train", "infer"):
        outside = getattr(contract.kernels, side).engine == EXTERNAL
        at = ("kernels", side, "engine")
        if outside and "trainer" not in sources:
            message = "engine: external is run by a trainer, and no workload comes from one"
            yield Finding(at, message, "write workload: {source: trainer}, or name an engine")
        elif not outside and sources == {"trainer"}:
            message = f"the trainer runs both kernels, so {side} is not opened here"
            yield Finding(at, message, "write engine: external, or give the workload prompts")


def _weights(contract: Contract) -> Iterator[Finding]:
    if contract.weights.changes != "every_step":
        return
    message = "the weights change at every step, and population claims never cross a change"
    hint = "write claim: realised: it concerns the tokens that were measured, and names the steps"
    claims = [(p, c.claim) for s, p, c in contract.clauses() if s == "statistical"]
    if contract.claim == "population" and any(claim is None for _, claim in claims):
        written = "claim" in contract.model_fields_set
        yield Finding(("claim",) if written else ("weights", "changes"), message, hint)
    for path, claim in claims:
        if claim == "population":
            yield Finding((*path, "claim"), message, hint)


def labels(contract: Contract) -> Iterator[Finding]:
    """Check the source of the labels of live traffic."""
    for name, label in contract.labels.items():
        source = label.source
        if source in _SOURCES[:2] or re.fullmatch(r"request\.metadata\.[^\s.<>]+", source):
            continue
        message = f"label {name!r} cannot come from {quoted(source)}"
        hint = did_you_mean(source, _SOURCES)
        if source.startswith("request."):
            hint = f"write {_METADATA}<key>, such as {_METADATA}tenant"
        yield Finding(("labels", name, "from"), message, hint)


# Lint of the stages: of a promotion, and of a clause.


# keys of each stage, besides prompt_groups; other keys would have no effect
_ONLY = {"steps": ("canary",), "share": ("shadow",), "sample": STAGES[1:]}


def promotion(contract: Contract) -> Iterator[Finding]:
    """Check the sizes and shares of the stages, and the stable kernel."""
    for stage in STAGES:
        rule = getattr(contract.promotion, stage)
        if rule is not None:
            yield from _stage(("promotion", stage), stage, rule)
            if stage != "offline" and contract.stable is None:
                mirrors = stage == "shadow"
                needs = "answers what shadow mirrors" if mirrors else f"takes over if {stage} fails"
                message = f"there is no stable: kernel, which {needs}"
                hint = "declare stable: with the kernel that serves today, or end the promotion "
                yield Finding(("promotion", stage), message, hint + "offline", key=True)
    last = [stage for stage in STAGES if contract.promotion.has(stage)][-1]
    rule = getattr(contract.promotion, last)
    if rule is not None and rule.approval == "required":
        message = f"{last} is the last stage: no stage after it needs an approval"
        hint = "remove it" if last == STAGES[-1] else "add promotion.full, or remove it"
        yield Finding(("promotion", last, "approval"), message, hint, key=True)


def _stage(path: Path, stage: str, rule: StageRule) -> Iterator[Finding]:
    first, limit = rule.sequences
    at = (*path, "prompt_groups")
    if first < 1:
        message = f"the first evaluation at {stage} needs at least 1 prompt group, not {first}"
        yield Finding(at, message, "write [first evaluation, limit], such as [400, 6000]")
    elif first > limit:
        message = f"the first evaluation at {stage} ({first}) comes after the limit ({limit})"
        yield Finding(at, message, f"did you mean [{limit}, {first}]?")
    for name, stages in _ONLY.items():
        if getattr(rule, name) is not None and stage not in stages:
            message = f"{stage} has no {name}: that is a matter of {', '.join(stages)}"
            yield Finding((*path, name), message, "remove it", key=True)
    steps = rule.steps
    if steps is not None and stage in _ONLY["steps"]:
        rising = all(low < high for low, high in itertools.pairwise((0.0, *steps)))
        if not steps or not rising or steps[-1] > 1:
            message = "the steps of a canary are shares that increase, above 0 and at most 1"
            yield Finding((*path, "steps"), message, "write them in order, such as [0.01, 0.1]")


def stages(path: Path, contract: Contract, clause: Clause) -> Iterator[Finding]:
    """Check the stages of a clause: at least one, each once, and existing."""
    at = (*path, "stages")
    if not clause.stages:
        message = f"clause {clause.id!r} is judged at no stage"
        yield Finding(at, message, "remove stages: a clause is judged at every one")
    elif not any(contract.promotion.has(stage) for stage in clause.stages):
        named = ", ".join(dict.fromkeys(clause.stages))
        message = f"clause {clause.id!r} is judged at {named} only, which promotion does not have"
        hint = f"add promotion.{clause.stages[0]}, or remove stages"
        yield Finding(at, message, hint)
    for j, stage in enumerate(clause.stages):
        if stage in clause.stages[:j]:
            yield Finding((*at, j), f"stage {stage!r} is listed twice", "remove one")
