# The text of a mutation: who passes, what is noticed, what is not and which case would notice it.

from __future__ import annotations

from collections.abc import Iterator

from servanda.authoring.mutation.result import (
    Conformance,
    FaultResult,
    MutantResult,
    Mutation,
    Part,
)
from servanda.report.format import count, line, percent, wrapped

_WIDTH = 96
_CELLS = 3  # that made an outcome, by name; the rest is counted
_GLYPH = {"caught": "✓", "missed": "✗", "undecided": "?", "open": " "}


def render(result: Mutation) -> str:
    """Survivors with their places, faults one by one, and the score."""
    checks = [line for check in (result.itself, result.own) if check for line in _check(check)]
    blocks = [[*_head(result)], [*_limits(result)], checks, [*_faults(result)]]
    blocks.append([*_contract_faults(result), score_line(result)])
    return "\n\n".join("\n".join(block) for block in blocks if block)


def score_line(result: Mutation) -> str:
    """The score, and that of each part.

    >>> from servanda.authoring.mutation.result import Mutation
    >>> score_line(Mutation("toy", "", ("limits",)))
    'mutation score: none, for nothing was asked'
    """
    noticed, counted = result.counts()
    if not counted:
        return "mutation score: none, for nothing was asked"
    shares = [(part, *result.counts(part)) for part in result.asked]
    parts = ", ".join(f"{part} {some} of {whole}" for part, some, whole in shares if whole)
    score = f"mutation score {noticed} of {counted} ({percent(noticed / counted)}): {parts}"
    if result.stopped == "interrupted":
        return f"{score}; interrupted before the rest"
    return f"{score}; the time was over for {result.open} more" if result.open else score


def _head(result: Mutation) -> Iterator[str]:
    what = []
    if "limits" in result.asked:
        what.append(f"{count(len(result.limits), 'mutant')} against {count(result.cases, 'case')}")
    if result.faults:
        what.append(f"{count(len(result.faults), 'fault')} in {line(result.faulty)}")
    name = line(result.contract)
    yield from _wrapped(f"{name}: {', '.join(what)}" if what else name, "")


def _limits(result: Mutation) -> Iterator[str]:
    if not result.limits:
        return
    noticed, counted = result.counts("limits")
    yield f"limits    {noticed} of {counted} noticed by a case"
    for mutant in result.limits:
        if mutant.mark == "survived":
            near = f" (nearest: {line(str(mutant.near))})" if mutant.near else ""
            yield from _wrapped(f"✗ {_change(mutant)}", "  ")
            yield from _wrapped(f"{line(mutant.why)}{near}", "      ", hang=0)
    for mark, words in (
        ("equivalent", "no data can tell it apart"),
        ("refused", "refused by the plan, before any test"),
    ):
        for mutant in result.limits:
            if mutant.mark == mark:
                yield from _wrapped(f"– {_change(mutant)}: {words}: {line(mutant.why)}", "  ")


def _change(mutant: MutantResult) -> str:
    where = f"{mutant.where.file}:{mutant.where.line} " if mutant.where else ""
    return f"{where}{line(mutant.sentence)}"


def _check(check: Conformance) -> Iterator[str]:
    glyph = "✓" if check.holds else "✗"
    size = (
        f", all {count(check.cells, 'cell')}, {count(check.groups, 'prompt group')}"
        if check.holds
        else ""
    )
    yield from _wrapped(
        f"{glyph} without a fault: {line(check.kernels)}: {check.outcome}{size}", ""
    )
    for failing in check.failing:
        what = line(failing.why)
        if failing.outcome != "out of reach":  # that sentence names the cell itself
            what = f"{failing.cell} {failing.outcome}: {what}"
        yield from _wrapped(what, "    ")


def _faults(result: Mutation) -> Iterator[str]:
    if not result.faults:
        return
    noticed, counted = result.counts("faults")
    yield f"faults    {noticed} of {counted} caught"
    unfit = [f.fault for f in result.faults if f.fate == "not applicable"]
    applicable = [f for f in result.faults if f.fate != "not applicable"]
    longest = max((len(f.fault) for f in applicable), default=0)
    for fault in applicable:
        head = f"{_GLYPH[fault.fate]} {fault.fault:<{longest}}  {fault.fate:<10}  "
        yield from _wrapped(f"{head}{_fault_text(fault)}", "  ", hang=2)

    if unfit:
        yield from _wrapped(f"– not applicable to these engines: {', '.join(unfit)}", "  ", hang=2)


def _fault_text(fault: FaultResult) -> str:
    if fault.fate == "open":
        return "the time was over"
    if fault.why:
        return f"{fault.outcome}: {line(fault.why)}" if fault.outcome else line(fault.why)
    by = ", ".join(map(line, fault.by[:_CELLS]))
    more = f" and {len(fault.by) - _CELLS} more" if len(fault.by) > _CELLS else ""
    near = f"; nearest: {line(str(fault.near))}" if fault.near else ""
    return f"{fault.outcome}{f': {by}{more}' if by else ''}{near}"


def _contract_faults(result: Mutation) -> Iterator[str]:
    """What is wrong with the contract as a whole, by its name."""
    if result.unsatisfiable and result.conforming is not None:
        yield from _wrapped(
            f"UNSATISFIABLE: a kernel that is right does not pass: {result.conforming.kernels} "
            f"is {result.conforming.outcome}",
            "",
        )
    sentences: dict[Part, str] = {
        "limits": "no case notices that a limit moved",
        "faults": "no fault is caught",
    }
    if result.toothless:
        biting = [p for p in result.asked if p not in result.toothless and result.counts(p)[1]]
        where = f" for {result.toothless[0]}, not for {biting[0]}" if biting else ""
        what = " and ".join(sentences[part] for part in result.toothless)
        near = _nearest(result)
        yield from _wrapped(
            f"TOOTHLESS{where}: {what}{f'; nearest came {near}' if near else ''}", ""
        )


def _nearest(result: Mutation) -> str:
    """Of what was not noticed, by the clause that came nearest to it."""
    if "faults" in result.toothless:
        missed = [(f.near.part, f) for f in result.faults if f.near is not None]
        if missed:
            _, fault = max(missed, key=lambda pair: pair[0])
            return f"{line(str(fault.near))}, with {fault.fault}"
    near = [t.near for t in result.limits if t.near is not None]
    return line(str(max(near, key=lambda n: n.part))) if near else ""


def _wrapped(text: str, indent: str, hang: int = 4) -> list[str]:
    return wrapped(text, _WIDTH, indent, indent + " " * hang)
