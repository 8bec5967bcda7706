# Lint of the workloads, the golden texts and the weights.

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from servanda.contract.finding import Finding
from servanda.contract.key_aliases import Path
from servanda.contract.model import EXTERNAL, Contract
from servanda.contract.workload import Workload
from servanda.registry import nearest, quoted

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
