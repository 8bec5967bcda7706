# The bound chain as text: vacuous bounds first, then number by number, then the assumptions.

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping

from servanda.judgement.bound_chain.chain import Chain, Step
from servanda.report import format
from servanda.report.format import count, wrapped
from servanda.report.table import table
from servanda.theory.bounds.theorem import THEOREMS

_WIDTH = 98
_MARKS = string.ascii_lowercase
_HEADS = ("at most", "guarantee", "by", "assumes")
_SHORT = {"conditional bound": "conditional"}


def chain_text(chain: Chain) -> str:
    marks = {rest.name: _MARKS[i % len(_MARKS)] for i, rest in enumerate(chain.rests)}
    theorems = dict.fromkeys(s.theorem for s in (*chain.steps, *chain.further) if s.theorem)
    laws = {name: i for i, name in enumerate(theorems, start=1)}
    blocks = [_head(chain)]
    if chain.vacuous:
        blocks.append(_vacuous(chain))
    if chain.steps:
        blocks.append("\n".join(_table(chain, marks, laws)))
    if chain.further:
        lines = [f"  {f.clause}: {f.what}: {f.bound}  [{laws[f.theorem]}]" for f in chain.further]
        blocks.append("\n".join(["with one more number", *_wrapped(lines, 4)]))
    if chain.rests:
        blocks.append("\n".join(["assumes", *_rests(chain, marks)]))
    if laws:
        blocks.append("\n".join(["by", *_by(laws)]))
    if chain.left_out:
        lines = [f"  {clause}: {reason}" for clause, reason in chain.left_out]
        blocks.append("\n".join(["left out", *_wrapped(lines, 4)]))
    return "\n\n".join(blocks)


def number(step: Step) -> str:
    """The number of a step, or that it is vacuous."""
    return "vacuous" if step.vacuous else f"{format.number(step.number)} {step.unit}".rstrip()


def _head(chain: Chain) -> str:
    what = (
        "implications of this run's upper bounds" if chain.shown else "implications of its limits"
    )
    if chain.tokens is None:
        return f"{chain.contract}: {what}; the length of a response is not declared"
    return f"{chain.contract}: {what}, for responses of up to {count(chain.tokens, 'token')}"


def _vacuous(chain: Chain) -> str:
    """Which paths end, and where; the worst thing to overlook, so it comes first."""
    ends: dict[str, Step] = {}
    for step in chain.vacuous:
        ends.setdefault(f"{step.clause} {step.theorem}", step)
    first: dict[str, str] = {}
    for step in ends.values():
        first.setdefault(step.clause, step.what)
    where = "; ".join(f"{clause}: from '{what}' on" for clause, what in first.items())
    n, all_ = len(chain.vacuous), len(chain.steps)
    text = (
        f"VACUOUS: {n} of {all_} bounds are no smaller than the range of their quantity ({where})."
    )
    if any(step.what.startswith("share of the clip range") for step in chain.vacuous):
        text += " Where the clip range is used up, none of it is left for the policy's update."
    answers = [step for step in chain.steps if step.what.startswith("drift of any reward")]
    if answers and all(step.vacuous for step in answers):
        text += (
            " No number here bounds whole responses: measure your own reward on both kernels "
            "(metric reward_gap), or shorten the responses."
        )
    return "\n".join(_wrapped([text], 0))


def _table(chain: Chain, marks: Mapping[str, str], laws: Mapping[str, int]) -> Iterator[str]:
    heads = ("", *_HEADS)
    rows = [
        (
            "  " * (step.level + 1) + step.what,
            number(step),
            _SHORT.get(step.standing, step.standing),
            f"[{laws[step.theorem]}]" if step.theorem else "",
            "".join(sorted(marks[name] for name in step.assumes)),
        )
        for step in chain.steps
    ]
    head, *lines = table([heads, *rows], right={1})
    yield head
    clause = None
    for step, row in zip(chain.steps, lines, strict=True):
        if step.clause != clause:
            clause = step.clause
            yield clause if step.enforced else f"{clause}  (monitored, not promised)"
        yield row


def _rests(chain: Chain, marks: Mapping[str, str]) -> Iterator[str]:
    for rest in chain.rests:
        yield from _wrapped([f"  {marks[rest.name]}  {rest.text}", f"     {rest.said}"], 5)


def _by(laws: Mapping[str, int]) -> Iterator[str]:
    for name, i in laws.items():
        law = THEOREMS[name]
        sharp = "sharp" if law.sharp else "not sharp"
        yield from _wrapped([f"  [{i}]  {name}: {law.statement} ({sharp}; {law.source})"], 7)


def _wrapped(lines: list[str], hang: int) -> list[str]:
    return [part for line in lines for part in wrapped(line, _WIDTH, rest=" " * hang)]
