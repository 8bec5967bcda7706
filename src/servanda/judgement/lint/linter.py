# Lint: consistency between the parts of a contract, all findings at once.
#
# Each rule is a generator of findings over a contract; the place of a finding is the path of the
# value to change.

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from servanda.contract.fields import duration_text
from servanda.contract.finding import Finding
from servanda.contract.key_aliases import Path
from servanda.contract.model import EXTERNAL, Contract, Kernel, base_of
from servanda.contract.policy import Replica
from servanda.contract.workload import Workload
from servanda.errors import Problem
from servanda.judgement.lint.clauses import clauses
from servanda.judgement.lint.escalation import escalation
from servanda.judgement.lint.kernels import URL, kernels
from servanda.judgement.lint.objective import learning, trend
from servanda.judgement.lint.runtime import envelope
from servanda.judgement.lint.slices import slices
from servanda.judgement.lint.stages import promotion
from servanda.registry import nearest, quoted

if TYPE_CHECKING:
    from servanda.contract.yaml_reader import Marks


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
            hint = nearest(clause.workload, names) if names else "declare workloads:"
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
        hint = nearest(source, _SOURCES)
        if source.startswith("request."):
            hint = f"write {_METADATA}<key>, such as {_METADATA}tenant"
        yield Finding(("labels", name, "from"), message, hint)
