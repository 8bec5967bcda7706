# Slice coverage: the parts of a workload that no slice of a verdict covers.
#
# From the plan and the token count of each slice, without logprobs.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from servanda.contract.clause import WHOLE
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.slices.rules import LABEL, Cut, Term, cuts_of
from servanda.traces.corpus import Corpus

if TYPE_CHECKING:
    from servanda.judgement.plan import Plan

_NAMED = 3  # most values or slices in one sentence
_SHALLOW = 5  # fewest new tokens for a slice of late ones
_DEPTHS = {"context.position", "context.length", "context.turn", "context.turn_position"}
_HARDLY = 0.01  # share of tokens below which an undecided slice is rarely reached
# the assumption `order`: satisfied by a run of Servanda, perhaps not by a trainer's batch
OF_A_TRAINER = (
    "the trainer selected the responses of this batch: those still running, aborted or filtered by "
    "reward are missing, and if the selection depends on the divergence, the divergence of all "
    "responses differs from the measured one"
)


def uncovered(plan: Plan, cells: Sequence[CellVerdict]) -> tuple[str, ...]:
    """One sentence for each part without its own judgement or without data.

    Args:
        cells: the verdicts on the plan's cells, with their token counts.
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
    """Slices without sampled tokens, and those with too few to be decided."""
    by_slice: dict[str, list[CellVerdict]] = {}
    for cell in cells:
        if cell.section == "statistical" and cell.outcome != "not applicable" and cell.workload:
            by_slice.setdefault(cell.slice, []).append(cell)
    if not any(cell.n for of in by_slice.values() for cell in of):
        return  # the run has no tokens
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
    """Declared slices without a clause."""
    judged = {cell.cut for cell in plan.cells}
    corpora = [*plan.corpora.values(), *([plan.golden] if plan.golden else [])]
    for rule in plan.contract.slices:
        own = [cut for corpus in corpora for cut in cuts_of([rule], corpus)[rule.name]]
        if own and not judged.intersection(own):
            yield f"slice {rule.name!r} is declared, and no clause is judged on it"


def _depth(plan: Plan) -> Iterator[str]:
    """A sentence if no slice separates late tokens."""
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
    """Values of a label without their own slice.

    Args:
        counted: whether each line of the corpus is one prompt, so that shares are meaningful.
    """
    values = corpus.label_values(name)
    if len(values) < 2 or (counted and max(values.values()) == 1):
        return  # a constant, or an identifier
    field = f"{LABEL}{name}"
    terms = [t for cut in cuts for t in cut.terms if t.field == field]
    if not terms:
        yield (
            f"label {name!r} ({len(values):,} values) is in no slice: a value that differs is "
            "averaged with the others"
        )
        return
    # a slice with further terms covers only a part of the value
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
    """Whether a value shares a slice with others."""
    return any(
        (t.op == "not_in" and value not in t.value)
        or (t.op == "in" and len(t.value) > 1 and value in t.value)
        for t in terms
    )
