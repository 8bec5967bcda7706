# Slices: rules of a contract -> cuts, and cuts -> masks over tokens.
#
# A cut is a conjunction of terms over named columns.  The same cut classifies all tokens of
# a run (arrays) or one live request (a single value).  `request.*` and `labels.*` are known
# before the request, `context.*` before the token, `outcome.*` after it.

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from servanda.contract.clause import WHOLE, SliceRule

if TYPE_CHECKING:
    from servanda.traces.corpus import Corpus, Prompt

Known = Literal["request", "context", "outcome"]  # before the request, the token, or after it
TOKEN_CLASSES = ("digit", "letter", "space", "punctuation", "other", "end")


@dataclass(frozen=True)
class Field:
    """A field that defines slices: when it is known, and its values.

    Args:
        values: its possible texts; None for a number, () for any text.
    """

    known: Known
    meaning: str
    values: tuple[str, ...] | None = None

    @property
    def is_text(self) -> bool:
        return self.values is not None


# further fields are labels.<name>
FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "request.prompt_tokens": Field("request", "tokens of the prompt"),
        "context.position": Field("context", "number of response tokens before this one, from 0"),
        "context.length": Field(
            "context", "number of tokens before this one: of the prompt, the response and tools"
        ),
        "context.turn": Field(
            "context", "number of the stretch of sampled tokens, from 1; tool results separate them"
        ),
        "context.turn_position": Field(
            "context", "number of tokens of its turn before this one, from 0"
        ),
        "context.row": Field(
            "context", "index of the sequence in the order of dispatch; in a dump, in its step"
        ),
        "context.entropy_nats": Field(
            "context",
            "entropy of the processed distribution of the infer kernel, before sampling",
        ),
        "context.p_max": Field(
            "context", "probability of the most likely token of the infer kernel"
        ),
        "context.previous_class": Field("context", "class of the previous token", TOKEN_CLASSES),
        "outcome.rank": Field(
            "outcome",
            "number of tokens that are more likely than the sampled one (infer kernel), from 0",
        ),
        "outcome.logp_nats": Field("outcome", "logprob of the sampled token in the infer kernel"),
        "outcome.token_id": Field("outcome", "id of the sampled token"),
        "outcome.from_end": Field(
            "outcome", "number of response tokens after this one; the last has 0"
        ),
        "outcome.flipped_layers": Field(
            "outcome",
            "number of layers in which the two kernels route the token to other experts, where "
            "both record them",
        ),
        "outcome.token_class": Field("outcome", "class of the sampled token", TOKEN_CLASSES),
        # a diverging, long response is trained later, so its age is an outcome
        "outcome.staleness": Field(
            "outcome",
            "weight updates between sampling the token and training on it; it depends on when the "
            "response was finished",
        ),
    }
)
# former names of fields
MOVED: Mapping[str, str] = MappingProxyType({"context.staleness": "outcome.staleness"})
LABEL = "labels."
_MODULO = re.compile(r"(.+) % ([1-9][0-9]*)")
_LABEL_FIELD = Field(
    "request", "a label of the prompt, or of live traffic; never of the response", ()
)
_LATEST_FIRST: tuple[Known, ...] = ("outcome", "context")
OPERATORS = ("gte", "gt", "lte", "lt", "in", "exists")
_OTHER = "(other)"
_NONE = "(none)"

Columns = Mapping[str, NDArray[Any]]


def field_of(name: str) -> Field | None:
    """The field of that name; every name after `labels.` is one, and every number modulo one.

    >>> field_of("request.prompt_tokens % 64").meaning
    'tokens of the prompt, modulo 64'
    """
    if name.startswith(LABEL) and len(name) > len(LABEL):
        return _LABEL_FIELD
    base, modulus = modulo(name)
    field = FIELDS.get(base)
    if field is None or modulus is None:
        return field
    if field.is_text:
        return None
    # a router does not compute it, so that no request is diverted by it
    known = "context" if field.known == "request" else field.known
    return Field(known, f"{field.meaning}, modulo {modulus}")


def modulo(name: str) -> tuple[str, int | None]:
    """A field's name without its modulus, and the modulus.

    >>> modulo("context.length % 16"), modulo("context.length")
    (('context.length', 16), ('context.length', None))
    """
    match = None if name.startswith(LABEL) else _MODULO.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, None)


def column(name: str, recorded: Mapping[str, NDArray[np.float64]], n: int) -> NDArray[Any]:
    """A `context.*` or `outcome.*` field at each token, [n], from a kernel's record.

    Args:
        recorded: columns of a trace, float64; a class is its index in TOKEN_CLASSES.

    Returns:
        NaN, or None for a class, if not recorded.
    """
    own = "logp" if name == "outcome.logp_nats" else name.partition(".")[2]
    values_N = recorded.get(own, np.full(n, np.nan))
    if not FIELDS[name].is_text:
        return values_N
    classes = dict(enumerate(FIELDS[name].values or ()))
    return np.array([classes.get(value) for value in values_N.tolist()], dtype=object)


def known(rule: SliceRule) -> Known:
    """When membership in a slice is known: when its last field is."""
    names = [*(rule.match or {}), *([rule.split] if rule.split else [])]
    moments = {field.known for field in map(field_of, names) if field is not None}
    for when in _LATEST_FIRST:
        if when in moments:
            return when
    return "request"


@dataclass(frozen=True)
class Term:
    """One comparison of one column; `not_in` is for the rest of a split."""

    field: str
    op: str
    value: Any

    def mask(self, column: NDArray[Any], *, unknown: bool = False) -> NDArray[np.bool_]:
        """The values that satisfy the term, as a mask.

        A missing label satisfies only `exists: false`; any other missing value was not recorded,
        and its result is `unknown`.
        """
        unknown = unknown and not self.field.startswith(LABEL)
        if column.dtype == object and len(column) > 1:
            # texts repeat, such as a label for all tokens of a sequence: evaluate each once
            begins = np.flatnonzero(np.r_[True, column[1:] != column[:-1]])
            if len(begins) < len(column):
                length = np.diff(np.r_[begins, len(column)])
                return np.repeat(self.mask(column[begins], unknown=unknown), length)
        if column.dtype == object:
            known = np.array([v is not None for v in column], dtype=bool)
        else:
            known = ~np.isnan(column)
        if self.op == "exists":
            return known == bool(self.value)
        if self.op in ("in", "not_in"):
            inside = np.array([v in self.value for v in column.tolist()], dtype=bool)
            meets = inside & known if self.op == "in" else known & ~inside
            return meets | ~known if unknown else meets
        with np.errstate(invalid="ignore"):
            compare = {
                "gte": np.greater_equal,
                "gt": np.greater,
                "lte": np.less_equal,
                "lt": np.less,
            }[self.op]
            meets = compare(column.astype(np.float64), float(self.value)) & known
        return meets | ~known if unknown else meets

    def met_by(self, value: str | float | None) -> bool:
        """Whether one live request satisfies the term; None: no such value.

        The same result as `mask` of the one value, at 1 % of its cost.
        """
        if self.op == "exists":
            return (value is not None) == bool(self.value)
        if value is None:
            return False
        if self.op in ("in", "not_in"):
            return (value in self.value) == (self.op == "in")
        number, edge = float(value), float(self.value)
        if self.op in ("gte", "gt"):
            return number > edge or (self.op == "gte" and number == edge)
        return number < edge or (self.op == "lte" and number == edge)


@dataclass(frozen=True)
class Cut:
    """A named slice of tokens: a conjunction of terms."""

    name: str
    terms: tuple[Term, ...] = ()

    @property
    def fields(self) -> set[str]:
        return {term.field for term in self.terms}

    @property
    def outcome(self) -> tuple[Term, ...]:
        """The terms about the sampled token."""
        return tuple(
            term
            for term in self.terms
            if (field := field_of(term.field)) is not None and field.known == "outcome"
        )

    @property
    def given(self) -> Cut:
        """The slice of contexts that contains this slice of outcomes: the other terms."""
        return Cut(self.name, tuple(term for term in self.terms if term not in self.outcome))

    def mask(self, columns: Columns, n: int, *, unknown: bool = False) -> NDArray[np.bool_]:
        """Tokens in the slice, [n]; `unknown` is the result for numbers that were not recorded."""
        inside = np.ones(n, dtype=bool)
        for term in self.terms:
            inside &= term.mask(columns[term.field], unknown=unknown)
        return inside

    def may_meet(self, prompt: Prompt, prompt_tokens: int | None = None) -> bool:
        """Whether a request's tokens can fall into the slice, before sampling."""
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
        """The number of positions 0..width-1 that can fall into the slice."""
        inside = np.ones(width, dtype=bool)
        for term in self.terms:
            if term.field == "context.position":
                inside &= term.mask(np.arange(width, dtype=np.float64))
        return int(inside.sum())

    def met_by(self, corpus: Corpus) -> bool:
        """Whether any line of a corpus can meet the slice."""
        return any(map(self.may_meet, corpus.prompts))


def cuts_of(rules: Sequence[SliceRule], corpus: Corpus) -> dict[str, tuple[Cut, ...]]:
    """The cuts of all rules and the whole; splits of a label use the corpus's values."""
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
        elif rule.split and (values := getattr(field_of(rule.split), "values", None)):
            cuts[rule.name] = tuple(
                Cut(f"{rule.name}={value}", (Term(rule.split, "in", (value,)),)) for value in values
            )
        elif rule.split and rule.at:
            cuts[rule.name] = tuple(_bucket_cuts(rule.name, rule.split, rule.at))
    return cuts


def _label_cuts(rule: SliceRule, corpus: Corpus) -> list[Cut]:
    field = rule.split or ""
    counts = corpus.label_values(field[len(LABEL) :])
    # most frequent first, ties by name, so that cells do not depend on file order
    ranked = sorted(counts, key=lambda v: (-counts[v], v))
    named = ranked[: rule.most]
    cuts = []
    for value in sorted(named):  # quoted if it is empty, unprintable, or a reserved word
        plain = value.isprintable() and value.strip() == value and value not in ("", _OTHER, _NONE)
        text = value if plain else ascii(value)
        cuts.append(Cut(f"{rule.name}={text}", (Term(field, "in", (value,)),)))
    if len(ranked) > len(named):
        cuts.append(Cut(f"{rule.name}={_OTHER}", (Term(field, "not_in", tuple(named)),)))
    if 0 < counts.total() < len(corpus):
        cuts.append(Cut(f"{rule.name}={_NONE}", (Term(field, "exists", False),)))
    return cuts


def _bucket_cuts(name: str, field: str, edges: Sequence[float]) -> list[Cut]:
    labels = [repr(int(e) if float(e).is_integer() else float(e)) for e in edges]
    cuts = [Cut(f"{name}<{labels[0]}", (Term(field, "lt", edges[0]),))]
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        terms = (Term(field, "gte", low), Term(field, "lt", high))
        cuts.append(Cut(f"{name}={labels[i]}..{labels[i + 1]}", terms))
    return [*cuts, Cut(f"{name}>={labels[-1]}", (Term(field, "gte", edges[-1]),))]
