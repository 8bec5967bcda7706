# Slice coverage: which parts of a workload no slice of a verdict shows.
#
# Decided from the plan and from how many tokens each slice met; no logprob is looked at.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from servanda.contract.clause import WHOLE
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.slices.rules import LABEL, Cut, Term, cuts_of
from servanda.traces.corpus import Corpus

if TYPE_CHECKING:
    from servanda.judgement.plan import Plan

_NAMED = 3  # values or slices that one sentence names
_SHALLOW = 5  # new tokens, of which the late ones are no slice
_DEPTHS = {"context.position", "context.length", "context.turn", "context.turn_position"}
_HARDLY = 0.01  # of the tokens: an undecided slice of fewer is hardly ever reached


def uncovered(plan: Plan, cells: Sequence[CellVerdict]) -> tuple[str, ...]:
    """One sentence for each part that is not judged by itself, or on which nothing was measured.

    Args:
        cells: the verdicts of the plan's cells, with their tokens.
    """
    return (
        *_hardly_reached(cells),
        *_unjudged(plan),
        *_depth(plan),
        *_labels(plan),
    )


def listed(names: Iterable[str]) -> str:
    """
    >>> listed("abcde"), listed("ab")
    ('a, b, c and 2 more', 'a, b')
    """
    names = [*names]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _hardly_reached(cells: Sequence[CellVerdict]) -> Iterator[str]:
    """Slices that met no sampled token, and those that met too few to be decided."""
    by_slice: dict[str, list[CellVerdict]] = {}
    for cell in cells:
        if cell.section == "statistical" and cell.outcome != "not applicable" and cell.workload:
            by_slice.setdefault(cell.slice, []).append(cell)
    if not any(cell.n for of in by_slice.values() for cell in of):
        return  # the run has no token at all
    by_slice.pop(WHOLE, None)
    none = [repr(name) for name, of in by_slice.items() if not any(c.n for c in of)]
    if none:
        yield (
            f"slice{'s' if len(none) > 1 else ''} {listed(none)} met no token: nothing is known "
            f"of {'them' if len(none) > 1 else 'it'}"
        )
    for name, of in by_slice.items():
        open_ = [c for c in of if c.n and c.enforced and c.outcome == "inconclusive"]
        shares = [c.share for c in open_ if c.share is not None]
        if shares and shares[0] < _HARDLY:
            yield (
                f"slice {name!r} has {100 * shares[0]:.2g} % of the tokens, too few to decide its "
                "limit: move its edges to where answers end, or promise nothing on it"
            )


def _unjudged(plan: Plan) -> Iterator[str]:
    """Declared slices on which no clause is judged."""
    judged = {cell.cut for cell in plan.cells}
    corpora = [*plan.corpora.values(), *([plan.golden] if plan.golden else [])]
    for rule in plan.contract.slices:
        own = [cut for corpus in corpora for cut in cuts_of([rule], corpus)[rule.name]]
        if own and not judged.intersection(own):
            yield f"slice {rule.name!r} is declared, and no clause is judged on it"


def _depth(plan: Plan) -> Iterator[str]:
    """Whether late tokens are judged by themselves."""
    widths = [s.width for s in plan.schedules if any(c.workload == s.name for c in plan.cells)]
    fields = {field for cell in plan.cells for field in cell.cut.fields}
    if max(widths, default=0) > _SHALLOW and not fields & _DEPTHS:
        yield "no slice is by depth: tokens late in an answer are averaged with the early ones"


def _labels(plan: Plan) -> Iterator[str]:
    cuts = {cell.cut for cell in plan.cells if cell.workload}
    counted = plan.contract.workload is None or plan.contract.workload.source != "trainer"
    for corpus in plan.corpora.values():
        for name in sorted({name for prompt in corpus.prompts for name in prompt.labels}):
            yield from _label(name, corpus, cuts, counted=counted)


def _label(name: str, corpus: Corpus, cuts: Iterable[Cut], *, counted: bool) -> Iterator[str]:
    """Values of a label that no slice shows alone.

    Args:
        counted: whether each line of the corpus is one prompt, so that shares mean something.
    """
    values = corpus.label_values(name)
    if len(values) < 2 or (counted and max(values.values()) == 1):
        return  # all alike, or an identifier and no category
    field = f"{LABEL}{name}"
    terms = [t for cut in cuts for t in cut.terms if t.field == field]
    if not terms:
        yield (
            f"label {name!r} ({len(values):,} values) is in no slice: a value that differs is "
            "averaged with the others"
        )
        return
    # a slice that asks for more than the label shows a part of its value
    own = [t for cut in cuts if {*cut.fields} == {field} for t in cut.terms]
    alone = {t.value[0] for t in own if t.op == "in" and len(t.value) == 1}
    for pooled in (True, False):
        some = [v for v in values if v not in alone and _pooled(v, own) == pooled]
        if not some:
            continue
        share = sum(values[v] for v in some) / len(corpus)
        of = f", {100 * share:.2g} % of the prompts," if counted else ""
        how = "judged together in one slice" if pooled else "judged with the whole alone"
        some.sort(key=lambda v: (-values[v], v))
        yield f"label {name!r}: {listed(map(repr, some))}{of} not by itself: {how}"


def _pooled(value: str, terms: Iterable[Term]) -> bool:
    """Whether a value lies in a slice together with others."""
    return any(
        (t.op == "not_in" and value not in t.value)
        or (t.op == "in" and len(t.value) > 1 and value in t.value)
        for t in terms
    )
