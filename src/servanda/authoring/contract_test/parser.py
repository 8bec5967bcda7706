# Reading contract tests: text -> ContractTest, or every error at once, each with its place.
#
# Read like the contract language, by the same passes.  A file may contain several documents.

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import ValidationError

from servanda.authoring.contract_test.model import KIND, SUFFIX, Case, ContractTest, Expectation
from servanda.contract.finding import Finding
from servanda.contract.parser import Tongue, refused
from servanda.contract.yaml_reader import read
from servanda.errors import ContractError, Problem

_TONGUE = Tongue(
    ContractTest,
    {
        "ContractTest": "a contract test",
        "Case": "a case",
        "Expectation": "an expectation",
        "Level": "a service level",
        "Clock": "a clock",
        "Act": "an act",
        "Metadata": "metadata",
    },
    {
        "contract": "one file, such as ../tiny-int8.kernelcontract.yaml; each test has its own",
        "cases": "write a list of {name: ..., traffic: ..., expect: [...]}",
        "expect": "write a list, such as [{after: 400, verdict: holds}]",
        "traffic": 'write "gap(0.01)x6000", or {domain=code: "gap(0.6)x400", rest: ...}',
        "self_noise": 'write "gap(0.001)x6000"',
        "stable": 'write "gap(0.01)x6000"',
        "cells": 'write {"tail on domain=code": violated}',
        "actions": "write a list, such as [{divert: slice}, {page: oncall}]; [] is none",
        "clock": "write {every: 1m, groups: 200}",
        "acts": "write a list, such as [{at: 20m, approve: alice}]",
        "paged": "write a list, such as [oncall]; [] names no one",
        "golden": "write {logit_osc_nats: 0.4}",
        "timing": "write {CLAUSE: 0.2}, or {CLAUSE: {infer: 0.2, stable: 0.25}}",
    },
)
_DOCUMENT = re.compile(r"^---(?=\s|$)", re.MULTILINE)
_ACTS = ("approve", "roll_back", "override", "fails", "changes")
_OF_PROMOTION = ("at", "leg", "stage", "status", "share", "paged")
_SYNTHETIC = (
    *("traffic", "self_noise", "stable", "golden", "timing"),
    *("rescored", "sample_ratio", "temperature", "clock"),
)


def read_tests(text: str, name: str) -> tuple[ContractTest, ...]:
    """The contract tests of a text, in order, with their places.

    Args:
        text: the whole text; name: of its file, for messages.

    Raises:
        ContractError: all problems, in the order of the text.
    """
    tests: list[ContractTest] = []
    problems: list[Problem] = []
    for document in _documents(text):
        result = _read(document, name)
        if isinstance(result, ContractTest):
            tests.append(result)
        else:
            problems += result
    if problems:
        raise ContractError.all(problems)
    return tuple(tests)


def _documents(text: str) -> Iterator[str]:
    """Each document of a text on its own lines; those before it are left blank."""
    starts = [0, *(match.start() for match in _DOCUMENT.finditer(text))]
    ends = [*starts[1:], len(text)]
    parts = [(start, text[start:end]) for start, end in zip(starts, ends, strict=True)]
    # the text before the first --- is a document only if it is not empty
    documents = [(start, part) for start, part in parts if _says_something(part)]
    for start, part in documents or parts[:1]:
        yield "\n" * text.count("\n", 0, start) + part


def _says_something(part: str) -> bool:
    lines = part.removeprefix("\ufeff").removeprefix("---").split("\n")
    return any(line.strip() and not line.strip().startswith("#") for line in lines)


def _read(text: str, name: str) -> ContractTest | list[Problem]:
    try:
        data, marks, problems = read(text, name, noun="contract test")
    except ContractError as error:
        return [*error.problems]
    kind = data.get("kind")
    if isinstance(kind, str) and kind != KIND and "cases" not in data:
        message = f"this is a {kind}, and `servanda contract test` reads a {KIND}"
        hint = f"name it under contract: of a file that ends in {SUFFIX}"
        return [Problem(message, marks.near(("kind",)), hint)]
    try:
        test = ContractTest.model_validate(data)
    except ValidationError as error:
        problems += refused(error, data, marks, _TONGUE)
    else:
        problems += [
            Problem(f.message, (marks.key if f.key else marks.near)(f.path), f.hint)
            for f in _contradictions(test)
        ]
        if not problems:
            return test.placed(marks.near)
    places = {id(p): (p.where.line, p.where.column) if p.where else (0, 0) for p in problems}
    return sorted(problems, key=lambda p: places[id(p)])


def _contradictions(test: ContractTest) -> Iterator[Finding]:
    """Contradictions between parts of a test."""
    first: dict[str, int] = {}
    for i, case in enumerate(test.cases):
        path = ("cases", i)
        if case.name in first:
            message = f"two cases are named {case.name!r}"
            yield Finding((*path, "name"), message, "a name says what only this case shows")
        first.setdefault(case.name, i)
        yield from _case_findings(path, case)
        for j, expectation in enumerate(case.expect):
            yield from _expectation_findings((*path, "expect", j), case, expectation)


def _case_findings(path: tuple[str | int, ...], case: Case) -> Iterator[Finding]:
    both = [name for name in _SYNTHETIC if getattr(case, name) is not None]
    if case.recorded is not None and both:
        message = f"a recorded run has data of its own; {both[0]} cannot be given beside it"
        yield Finding((*path, both[0]), message, f"remove {both[0]}, or recorded", True)
    for name in ("self_noise", "stable"):
        if getattr(case, name) is not None and not case.traffic:
            message = f"{name} is measured beside traffic, and the case has none"
            yield Finding((*path, name), message, "give traffic as well", True)
    if case.clock is not None and not case.traffic and case.recorded is None:
        message = "a clock lets prompt groups come in, and the case gives no traffic"
        yield Finding((*path, "clock"), message, "give traffic as well", True)
    if case.acts and case.clock is None:
        message = "acts are done to a promotion, and the case has no clock"
        yield Finding((*path, "acts"), message, "give clock: {every: 1m, groups: 200}", True)
    ends = max((e.at or 0.0 for e in case.expect), default=0.0)
    for j, act in enumerate(case.acts):
        if case.clock is not None and act.at > case.clock.looks(ends) * case.clock.every:
            message = "the act is never done: the last look of the case is before it"
            yield Finding((*path, "acts", j, "at"), message, "expect something at a later time")
        done = [name for name in _ACTS if getattr(act, name) is not None]
        if len(done) != 1:
            message = f"an act is one of {', '.join(_ACTS)}; found {len(done)}"
            yield Finding((*path, "acts", j), message, "write {at: 20m, approve: alice}")


def _expectation_findings(
    path: tuple[str | int, ...], case: Case, expectation: Expectation
) -> Iterator[Finding]:
    says = expectation.model_dump(exclude={"after", "at"}, exclude_defaults=True)
    if not says:
        message = "the expectation expects nothing"
        yield Finding(path, message, "add verdict: holds, or cells, actions, can_promote")
    if case.clock is None:
        for name in _OF_PROMOTION:
            if getattr(expectation, name) is not None:
                message = f"{name} is about a promotion, and the case has no clock"
                hint = "give the case clock: {every: 1m, groups: 200}"
                yield Finding((*path, name), message, hint, True)
        yield from _long_enough((*path, "after"), case, expectation.after or 0)
        return
    if expectation.after is not None:
        message = "a case with a clock is looked at by its time"
        yield Finding((*path, "after"), message, "write at: 10m instead", True)
    if expectation.at is None:
        message = "the expectation does not say when"
        yield Finding(path, message, "add at: 10m, the time of the look")
        return
    groups = case.clock.looks(expectation.at) * case.clock.groups
    yield from _long_enough((*path, "at"), case, groups)


def _long_enough(path: tuple[str | int, ...], case: Case, groups: int) -> Iterator[Finding]:
    if case.recorded is None and not case.traffic and groups and case.clock is None:
        message = f"there are no {groups:,} prompt groups: the case gives no traffic"
        yield Finding(path, message, "give traffic, or write after: 0")
    for part in ("traffic", "self_noise", "stable"):
        for name, series in (getattr(case, part) or {}).items():
            if len(series) < groups:
                message = f"{part} on {name} ends after {len(series):,} prompt groups, and the "
                message += f"look is after {groups:,}"
                yield Finding(path, message, "make the series longer, or look earlier")
