# Slices: rules of a contract -> cuts, and cuts -> masks over tokens.
#
# A cut is a conjunction of terms over named columns.  The same cut classifies all tokens of
# a run (arrays) or one live request (a single value).  `request.*` and `labels.*` are known
# before the request, `context.*` before the token.

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract import WHOLE, SliceRule
from servanda.corpus import Corpus, Prompt

FIELDS = (  # numbers; besides them there are labels.<name>
    "request.prompt_tokens",
    "context.position",
    "context.entropy_nats",
    "context.p_max",
)
LABEL = "labels."
OUTCOME = "outcome."  # known only after the token was drawn
OPERATORS = ("gte", "gt", "lte", "lt", "in", "exists")
_OTHER = "(other)"
_NONE = "(none)"

Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Term:
    """One comparison of one column; `not_in` is what the rest of a split needs."""

    field: str
    op: str
    value: Any

    def mask(self, column: NDArray[Any], *, unknown: bool = False) -> NDArray[np.bool_]:
        """Which values satisfy the term.

        A label that is absent satisfies `exists: false` only; a number that is NaN was not
        recorded, and satisfies what `unknown` says.
        """
        if column.dtype == object:
            known = np.array([v is not None for v in column], dtype=bool)
        else:
            known = ~np.isnan(column)
        if self.op == "exists":
            return known == bool(self.value)
        if self.op in ("in", "not_in"):
            inside = np.array([v in self.value for v in column.tolist()], dtype=bool)
            return inside & known if self.op == "in" else known & ~inside
        with np.errstate(invalid="ignore"):
            compare = {
                "gte": np.greater_equal,
                "gt": np.greater,
                "lte": np.less_equal,
                "lt": np.less,
            }[self.op]
            met = compare(column.astype(np.float64), float(self.value)) & known
        return met | ~known if unknown else met


@dataclass(frozen=True)
class Cut:
    """A named slice of tokens: all its terms hold."""

    name: str
    terms: tuple[Term, ...] = ()

    @property
    def fields(self) -> set[str]:
        return {term.field for term in self.terms}

    @property
    def outcome(self) -> tuple[Term, ...]:
        """The terms that speak of the token which was drawn."""
        return tuple(term for term in self.terms if term.field.startswith(OUTCOME))

    @property
    def given(self) -> Cut:
        """The slice of contexts that this slice of outcomes lies in: the other terms."""
        return Cut(self.name, tuple(term for term in self.terms if term not in self.outcome))

    def mask(self, columns: Columns, n: int, *, unknown: bool = False) -> NDArray[np.bool_]:
        """Tokens in the slice, [n]; `unknown` is what a number that was not recorded counts as."""
        inside = np.ones(n, dtype=bool)
        for term in self.terms:
            inside &= term.mask(columns[term.field], unknown=unknown)
        return inside

    def may_meet(self, prompt: Prompt, prompt_tokens: int | None = None) -> bool:
        """Whether a request's tokens can fall into the slice, before any was drawn."""
        known: dict[str, Any] = {"request.prompt_tokens": prompt_tokens}
        for term in self.terms:
            if term.field.startswith(LABEL):
                known[term.field] = prompt.labels.get(term.field[len(LABEL) :])
            elif known.get(term.field) is None:
                continue  # not known before the token
            value = known[term.field]
            dtype = object if term.field.startswith(LABEL) else np.float64
            if not term.mask(np.array([value], dtype=dtype))[0]:
                return False
        return True

    def positions(self, width: int) -> int:
        """How many of the positions 0..width-1 can fall into the slice."""
        inside = np.ones(width, dtype=bool)
        for term in self.terms:
            if term.field == "context.position":
                inside &= term.mask(np.arange(width, dtype=np.float64))
        return int(inside.sum())

    def met_by(self, corpus: Corpus) -> bool:
        """Whether any line of a corpus can meet the slice."""
        return any(map(self.may_meet, corpus.prompts))

    def capacity(self, corpus: Corpus, samples: int, width: int) -> int:
        """The largest number of tokens that one prompt group can have in the slice."""
        rows = (sum(self.may_meet(corpus.prompts[r]) for r in group) for group in corpus.groups)
        return max(rows, default=0) * samples * self.positions(width)


def cuts_of(rules: Sequence[SliceRule], corpus: Corpus) -> dict[str, tuple[Cut, ...]]:
    """Every rule's cuts, the whole included; splits of a label take the corpus's values."""
    cuts: dict[str, tuple[Cut, ...]] = {WHOLE: (Cut(WHOLE),)}
    for rule in rules:
        if rule.match is not None:
            terms = tuple(
                Term(field, op, tuple(value) if isinstance(value, list) else value)
                for field, conditions in rule.match.items()
                for op, value in conditions.items()
            )
            cuts[rule.name] = (Cut(rule.name, terms),)
        elif rule.split and rule.split.startswith(LABEL):
            cuts[rule.name] = tuple(_label_cuts(rule, corpus))
        elif rule.split and rule.at:
            cuts[rule.name] = tuple(_bucket_cuts(rule.name, rule.split, rule.at))
    return cuts


def _label_cuts(rule: SliceRule, corpus: Corpus) -> list[Cut]:
    field = rule.split or ""
    counts = corpus.label_values(field[len(LABEL) :])
    # most frequent first, names break ties, so that the cells do not depend on file order
    ranked = sorted(counts, key=lambda v: (-counts[v], v))
    named = ranked[: rule.most]
    cuts = [Cut(f"{rule.name}={_shown(v)}", (Term(field, "in", (v,)),)) for v in sorted(named)]
    if len(ranked) > len(named):
        cuts.append(Cut(f"{rule.name}={_OTHER}", (Term(field, "not_in", tuple(named)),)))
    if 0 < counts.total() < len(corpus):
        cuts.append(Cut(f"{rule.name}={_NONE}", (Term(field, "exists", False),)))
    return cuts


def _shown(label: str) -> str:
    """A label as a name: quoted where it is empty, unprintable, or one of our own words."""
    plain = label.isprintable() and label.strip() == label and label not in ("", _OTHER, _NONE)
    return label if plain else ascii(label)


def _bucket_cuts(name: str, field: str, edges: Sequence[float]) -> list[Cut]:
    shown = [repr(int(e) if float(e).is_integer() else float(e)) for e in edges]
    cuts = [Cut(f"{name}<{shown[0]}", (Term(field, "lt", edges[0]),))]
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        terms = (Term(field, "gte", low), Term(field, "lt", high))
        cuts.append(Cut(f"{name}={shown[i]}..{shown[i + 1]}", terms))
    return [*cuts, Cut(f"{name}>={shown[-1]}", (Term(field, "gte", edges[-1]),))]
