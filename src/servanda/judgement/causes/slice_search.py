# Slice search: the few slices of tokens that explain a gap, found without being named.
#
# The sequences of each step are divided into two parts before anything is examined.  The first
# part chooses: a greedy search over one or two conditions, for the slice that separates tokens
# best.  The second tests each chosen slice once, by a bounded e-value over its sequences.  Tokens
# are compared with others of about the same logprob: rare tokens differ more between any two
# kernels.
#
# Axes: K tokens, Q sequences.

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from servanda.contract.clause import SliceRule
from servanda.judgement.causes.token_table import STEP, Array, TokenTable
from servanda.judgement.contract_text import slice_text
from servanda.judgement.slices.rules import LABEL, Term, modulo
from servanda.theory.stats.alpha import log_price, shared
from servanda.theory.stats.bets import POS, weights_above
from servanda.theory.stats.log_moment import LogMoment

MOST = 3  # slices of an answer; each is tested at alpha / MOST
ALPHA = 0.01  # probability that any slice is returned that is not as far above the others
TIMES = 2.0  # a slice has more than this multiple of the gap of similar tokens outside
_LEAST_DEVIANCE = 30.0
_LEAST_SHARE = 0.15  # of the excess; a smaller slice explains nothing
_LARGEST = 0.7  # share of the tokens: the rest would be the slice
_MOST_STEPS = 0.9  # the same of steps: of a run that went wrong few good ones may be at hand
_CHOOSING = 0.4  # share of the sequences of a step that choose
_BEAM = 10  # best conditions that a second one is added to
_SIMPLER = 1.08  # a second condition separates better by this factor
_CORE = 0.8  # of the excess of one condition; what has less leaves too much of the place
_SAME = 0.95  # of the tokens of one condition: a second one changes nothing


@dataclass(frozen=True)
class FoundSlice:
    """Some tokens with a larger gap than others of the same logprob.

    Args:
        match: its conditions, as in a contract.
        inside, outside: mean |p - q| / (p + q) of its tokens, and of similar ones outside.
        share: share of the excess over those that it explains.
        tokens: its share of all tokens; sequences: those that it was tested on.
        log_e: evidence of the other part that its mean is above `bound`, nats.
    """

    match: Mapping[str, Mapping[str, Any]]
    inside: float
    outside: float
    share: float
    tokens: float
    sequences: int
    log_e: float
    bound: float

    @property
    def first(self) -> tuple[str, Mapping[str, Any]]:
        """Its first field, and the conditions on it."""
        return next(iter(self.match.items()))


def find_slices(
    table: TokenTable, limit: float = 0.0, alpha: float = ALPHA
) -> tuple[FoundSlice, ...]:
    """At most MOST slices that explain the gap of a table.

    Args:
        limit: of the gap, on the mean of |p - q| / (p + q): a slice that is within it in the first
            part explains nothing.
        alpha: probability that any returned slice has, in fact, at most TIMES times the mean of
            similar tokens outside, as the first part measures it.

    The guarantee is about sequences that are independent draws: within a sequence tokens may
    depend on each other in any way.
    """
    chosen_K, tested_K = halves(table)
    chosen, tested = table.taken(chosen_K), table.taken(tested_K)
    found: list[FoundSlice] = []
    if not (chosen.gap_K.any() and len(tested)):
        return ()
    left_K = np.ones(len(table), dtype=bool)
    whole = None
    while len(found) < MOST:
        best = _best(chosen, left_K[chosen_K])
        if best is None:
            break
        of_K = left_K[chosen_K]
        best = _simplest(best, chosen, of_K)
        inside, outside, excess, more = _contrast(chosen, of_K, best.mask(chosen))
        whole = excess + more if whole is None else whole
        bound = min(TIMES * outside, 1.0)
        if inside < limit or excess < _LEAST_SHARE * whole:
            break
        inside_K = left_K & best.mask(table)
        log_e, sequences = _evidence(tested, inside_K[tested_K], bound)
        if log_e < log_price(shared(alpha, MOST)):
            break
        share = min(excess / max(whole, 1e-300), 1.0)
        inside, outside, *_ = _contrast(table, left_K, inside_K)
        tokens = float(inside_K.mean())
        found.append(
            FoundSlice(best.match, inside, outside, share, tokens, sequences, log_e, bound)
        )
        left_K &= ~inside_K
    return tuple(found)


def _contrast(
    table: TokenTable, left_K: Array, inside_K: Array
) -> tuple[float, float, float, float]:
    """Mean gap of a slice, and of similar tokens outside; its excess over these, and the rest's."""
    inside_K = left_K & inside_K
    base_K = table.expected(left_K & ~inside_K)
    over_K = table.gap_K - base_K
    return (
        float(table.gap_K[inside_K].mean()),
        float(base_K[inside_K].mean()),
        float(over_K[inside_K].sum()),
        float(over_K[left_K & ~inside_K].sum()),
    )


def measured(table: TokenTable, match: Mapping[str, Mapping[str, Any]]) -> FoundSlice | None:
    """A slice that is known to be violated, in the form of one that was found; None if trivial."""
    inside_K = mask_of(match, table)
    if inside_K.all() or not inside_K.any():
        return None
    gap, base, own, rest = _contrast(table, np.ones(len(table), dtype=bool), inside_K)
    share = own / max(own + max(rest, 0.0), 1e-300)
    sequences = len(np.unique(table.sequence_K[inside_K]))
    return FoundSlice(match, gap, base, share, float(inside_K.mean()), sequences, 0.0, 0.0)


def halves(table: TokenTable) -> tuple[Array, Array]:
    """Masks of the tokens that choose and of those that test, by whole sequences of each step."""
    _, first_Q, code_K = np.unique(table.sequence_K, return_index=True, return_inverse=True)
    random_Q = np.random.default_rng(0).permutation(len(first_Q))
    order_Q = np.lexsort((random_Q, table.step_K[first_Q]))
    # every so many of a row that goes through the steps: also where a step has one sequence
    due_Q = np.floor(_CHOOSING * np.arange(len(order_Q) + 1))
    chosen_Q = np.empty(len(order_Q), dtype=bool)
    chosen_Q[order_Q] = due_Q[1:] > due_Q[:-1]
    return chosen_Q[code_K], ~chosen_Q[code_K]


def _evidence(table: TokenTable, inside_K: Array, bound: float) -> tuple[float, int]:
    """Evidence that the mean over sequences of the gap in a slice is above a bound; how many."""
    n_Q = np.bincount(table.sequence_K[inside_K])
    sum_Q = np.bincount(table.sequence_K[inside_K], table.gap_K[inside_K])
    mean_Q = np.minimum(sum_Q[n_Q > 0] / n_Q[n_Q > 0], 1.0)
    if not len(mean_Q):
        return -math.inf, 0
    return LogMoment.of(mean_Q).log_e_above(bound, weights_above(bound)), len(mean_Q)


def _best(table: TokenTable, left_K: Array) -> Candidate | None:
    """The slice of one or two conditions that separates the tokens that are left best."""
    base_K = table.expected(left_K)
    seen = [*_scored(table, left_K, base_K, None)]
    if not seen:
        return None
    # of each field and kind the best: neighbours of one edge tell the same
    seen.sort(key=lambda pair: -pair[0])
    beam, families = [], set[tuple[str, str]]()
    for score, one in seen:
        if one.family not in families:
            families.add(one.family)
            beam.append((score, one))
    least = max(beam[0][0], _LEAST_DEVIANCE)
    pairs = []
    for score, one in beam[:_BEAM]:
        if one.family[0] == STEP:  # a place is what it is at any time
            continue
        inside_K = left_K & one.mask(table)
        refined_K = table.expected(left_K & ~inside_K) if (left_K & ~inside_K).any() else base_K
        pairs += [
            (more, one.with_(other))
            for more, other in _scored(table, inside_K, refined_K, one, left_K)
            if more > _SIMPLER * max(least, score)
        ]
    pairs.sort(key=lambda pair: -pair[0])
    if not pairs:
        return beam[0][1] if beam[0][0] >= _LEAST_DEVIANCE else None
    # their scores are from different expectations
    return max(
        (pair for _, pair in pairs[: 4 * _BEAM]), key=lambda pair: _score(table, left_K, pair)
    )


def _simplest(of: Candidate, table: TokenTable, left_K: Array) -> Candidate:
    """Without the condition that hardly changes its tokens, or cuts out the core of their gap."""
    inside_K = of.mask(table)
    single = [Candidate((term,), of.kind) for term in of.terms] if len(of.terms) > 1 else []
    for alone in sorted(single, key=lambda one: -one.handicap):
        if inside_K.sum() >= _SAME * alone.mask(table).sum():
            return alone
    wide = [(_contrast(table, left_K, one.mask(table))[2], one) for one in single]
    excess, widest = max(wide, key=lambda pair: pair[0], default=(0.0, of))
    few = (left_K & widest.mask(table)).sum() <= _LARGEST * left_K.sum()
    return widest if few and _contrast(table, left_K, inside_K)[2] < _CORE * excess else of


def _score(table: TokenTable, left_K: Array, of: Candidate) -> float:
    """The deviance of one slice against the tokens outside, which alone set what is expected."""
    inside_K = left_K & of.mask(table)
    base_K = table.expected(left_K & ~inside_K)
    x, b, whole_x, whole_b = (
        float(v[k].sum()) for k in (inside_K, left_K) for v in (table.gap_K, base_K)
    )
    spread = float((table.gap_K[left_K] ** 2).sum()) / max(whole_x, 1e-300)
    score = _deviance(np.array([x]), np.array([b]), whole_x, whole_b)
    return float(score[0]) / spread * of.handicap


def _deviance(x_C: Array, b_C: Array, whole_x: float, whole_b: float) -> Array:
    """2 x log likelihood of two rates against one, where the rate inside is larger; else 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        inside_C, outside_C = x_C / b_C, (whole_x - x_C) / (whole_b - b_C)
        rate = whole_x / whole_b
        score_C = 2 * (
            x_C * np.log(np.maximum(inside_C / rate, 1e-300))
            + (whole_x - x_C) * np.log(np.maximum(outside_C / rate, 1e-300))
        )
    return np.where(inside_C > outside_C, np.nan_to_num(score_C), 0.0)


def _scored(
    table: TokenTable,
    of_K: Array,
    base_K: Array,
    given: Candidate | None,
    left_K: Array | None = None,
) -> Iterator[tuple[float, Candidate]]:
    """The deviance of each condition on some tokens, for tokens above their expected gap.

    With `given`, that of both conditions together against all tokens that are left.
    """
    left_K = of_K if left_K is None else left_K
    x_K = table.gap_K
    whole_x, whole_b = float(x_K[left_K].sum()), float(base_K[left_K].sum())
    spread = float((x_K[left_K] ** 2).sum()) / whole_x if whole_x else 1.0
    # there is always a step by which some tokens are worse
    taken = set() if given is None else {STEP, *(name for name, _ in given.terms)}
    for some in candidates(table, of_K, base_K, taken):
        most = _MOST_STEPS if some.candidate(0).family[0] == STEP else _LARGEST
        few_C = (some.n < most * left_K.sum()) & (some.n > 0)
        score = np.where(few_C, _deviance(some.x, some.b, whole_x, whole_b), 0.0) / spread
        at = int(score.argmax()) if len(score) else 0
        if len(score) and score[at] > 0:
            found = some.candidate(at)
            yield float(score[at]) * found.handicap, found


# Candidates: the conditions on one field that may cut out a slice, with the sums of their tokens.
#
# Axes: K tokens, C conditions of one kind.


_MODULI: Mapping[str, tuple[int, ...]] = {
    "request.prompt_tokens": (16, 32, 64, 128, 256, 512),
    "context.length": (16, 32, 64, 128, 256, 512),
    "context.position": (16, 32, 64, 128),
    "context.row": (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 64),
    "outcome.token_id": (2, 4, 8, 16, 64, 128),
}
_POINTS = {  # a single value of these is a slice
    *("context.position", "context.turn", "context.turn_position", "outcome.from_end"),
    *("outcome.token_id", "outcome.staleness", "request.prompt_tokens", "context.length"),
}
# of fields that cut out the same tokens the first is named: a tiny difference in the score
PREFERRED = (
    STEP,
    *("context.turn", "request.prompt_tokens", "context.position", "context.turn_position"),
    *("context.length", "outcome.token_id", "outcome.staleness", "context.row"),
    "outcome.from_end",
)
_LABELS = 512  # most texts of a label; with more it is an identifier
_OWN = 2  # sequences of a text on average; with fewer it is one as well
_VALUES = 6  # most texts of a label that are one place
_LEAST = 12  # tokens of a slice in the half that chooses

Conditions = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]


@dataclass(frozen=True)
class Candidate:
    """Conditions on one or more fields, in the order in which they were found."""

    terms: Conditions
    kind: str

    @property
    def family(self) -> tuple[str, str]:
        return self.terms[0][0], self.kind

    @property
    def handicap(self) -> float:
        """A factor just below 1 that decides between fields which cut out the same tokens."""
        bases = [modulo(name)[0] for name, _ in self.terms]
        places = sum(1 + PREFERRED.index(base) for base in bases if base in PREFERRED)
        conditions = (value for _, some in self.terms for _, value in some)
        more = sum(len(value) - 1 for value in conditions if isinstance(value, tuple))
        return 1 - 1e-5 * (places + len(PREFERRED) * more)

    @property
    def match(self) -> dict[str, dict[str, Any]]:
        """As a contract writes it."""
        return {
            field: {op: [*v] if isinstance(v, tuple) else v for op, v in conditions}
            for field, conditions in self.terms
        }

    def with_(self, other: Candidate) -> Candidate:
        return Candidate((*self.terms, *other.terms), self.kind)

    def mask(self, table: TokenTable) -> Array:
        return mask_of(self.match, table)


def mask_of(match: Mapping[str, Mapping[str, Any]], table: TokenTable) -> Array:
    """The tokens that satisfy the conditions of a slice, [K]."""
    inside_K = np.ones(len(table), dtype=bool)
    for field, conditions in match.items():
        column_K = _column(table, field)
        for op, value in conditions.items():
            inside_K &= Term(field, op, value).mask(column_K)
    return inside_K


def entry_of(match: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """A slice as a contract has it; steps, which are no slice of a contract, as words."""
    if STEP in match:
        return where(match)
    return slice_text(SliceRule(name=name, match=match))  # type: ignore[call-arg]


_WORDS = {
    STEP: "step",
    "request.prompt_tokens": "prompt tokens",
    "context.position": "position",
    "context.length": "context length",
    "context.turn": "turn",
    "context.turn_position": "position in the turn",
    "context.row": "row",
    "outcome.from_end": "tokens before the last",
    "outcome.token_id": "token id",
    "outcome.staleness": "age of the weights",
}
_FIRST = {
    "context.position": "first {}",
    "context.turn_position": "first {} of a turn",
    "outcome.from_end": "last {}",
}


def where(match: Mapping[str, Mapping[str, Any]]) -> str:
    """The conditions of a slice in words.

    >>> where({"labels.env": {"in": ["code"]}, "context.position": {"lt": 4}})
    'env code, the first 4 tokens'
    """
    parts = []
    for field, conditions in match.items():
        base, modulus = modulo(field)
        if base == STEP and {"gte", "lt"} <= {*conditions}:
            parts.append(f"steps {conditions['gte']:g} to {conditions['lt'] - 1:g}")
            continue
        name = _WORDS.get(base, base.removeprefix(LABEL))
        name = f"{name} modulo {modulus}" if modulus is not None else name
        for op, value in conditions.items():
            first = {"lt": value, "in": 1 if value == [0] else None}.get(op)
            if base == field and field in _FIRST and first is not None:
                tokens = "token" if first == 1 else f"{first:g} tokens"
                parts.append(f"the {_FIRST[field].format(tokens)}")
            elif op == "in":
                values = [f"{v:g}" if isinstance(v, int | float) else str(v) for v in value]
                parts.append(f"{name}{'s' * (base == STEP and len(values) > 1)} {_listed(values)}")
            elif op == "gte" and field == "context.turn":
                parts.append(f"turn {value:g} and later")
            else:
                parts.append(f"{name} {'below' if op == 'lt' else 'from'} {value:g}")
    return ", ".join(parts)


def _listed(values: list[str]) -> str:
    if len(values) == 1:
        return values[0]
    return f"{', '.join(values[:-1])} and {values[-1]}"


_BESIDE = ("request.prompt_tokens", "context.position", "context.length", "context.turn", STEP)


def coincident(
    table: TokenTable, inside_K: Array, fields: Collection[str], least: float
) -> dict[str, dict[str, dict[str, Any]]]:
    """Conditions on other fields that cut out the same tokens, by their words.

    Args:
        fields: those that the tokens are already known by.
        least: tokens in both over tokens in either.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    inside = float(inside_K.sum())
    for name, (texts, code_K) in table.labels.items():
        if LABEL + name in fields:
            continue
        n, x, _ = _sums(code_K, len(texts), inside_K * 1.0, inside_K * 1.0)
        overlap = x / (n + inside - x)
        overlap[[i for i, text in enumerate(texts) if not text]] = 0.0
        if overlap.max(initial=0.0) >= least:
            text = texts[int(overlap.argmax())]
            found[f"{name} {text}"] = {LABEL + name: {"in": [text]}}
    for name in _BESIDE:
        column_K = table.numbers.get(name)
        if column_K is None or name in fields or np.isnan(column_K).any():
            continue
        value, code_K = np.unique(column_K, return_inverse=True)
        n, x, _ = _sums(code_K.reshape(-1), len(value), inside_K * 1.0, inside_K * 1.0)
        for op, sums in (("lt", (n, x)), ("gte", (n[::-1], x[::-1]))):
            n_C, x_C = (s.cumsum()[:-1] for s in sums)
            overlap = x_C / np.maximum(n_C + inside - x_C, 1)
            if not len(overlap) or overlap.max() < least:
                continue
            at = int(overlap.argmax())
            edge = value[at + 1] if op == "lt" else value[len(value) - 1 - at]
            match = {name: {op: float(edge)}}
            found[where(match)] = match
            break
    return found


def _column(table: TokenTable, field: str) -> Array:
    if field.startswith(LABEL):
        texts, code_K = table.labels.get(field.removeprefix(LABEL), (("",), None))
        if code_K is None:
            return np.full(len(table), None, dtype=object)
        return np.array([text or None for text in texts], dtype=object)[code_K]
    base, modulus = modulo(field)
    column_K = table.numbers.get(base, np.full(len(table), np.nan))
    return column_K if modulus is None else column_K % modulus


class Conditioned(NamedTuple):
    """Conditions of one kind on one field.

    Args:
        n, x, b: tokens of each, and the sums of their gap and of their expected gap, [C].
        candidate: the condition of an index.
    """

    n: Array
    x: Array
    b: Array
    candidate: Callable[[int], Candidate]


def candidates(
    table: TokenTable, of_K: Array, base_K: Array, taken: Collection[str]
) -> Iterator[Conditioned]:
    """The conditions on some tokens.

    Args:
        taken: fields that have a condition already.
    """
    x_M, b_M = table.gap_K[of_K], base_K[of_K]
    sequences = len(np.unique(table.sequence_K))
    for name, (texts, code_K) in table.labels.items():
        most = min(_LABELS, sequences / _OWN)
        if 1 < len(texts) <= most and LABEL + name not in taken:
            yield from _labelled(name, texts, code_K[of_K], x_M, b_M)
    bases = {modulo(field)[0] for field in taken}
    for name, column_K in table.numbers.items():
        if name in bases:
            continue
        value_M = column_K[of_K]
        known_M = ~np.isnan(value_M)
        if not known_M.any():
            continue
        value_M, x_U, b_U = value_M[known_M].astype(np.int64), x_M[known_M], b_M[known_M]
        value, code_U = np.unique(value_M, return_inverse=True)
        if len(value) < 2:
            continue
        sums = _sums(code_U.reshape(-1), len(value), x_U, b_U)
        if name == STEP:
            yield _spans(value, sums)
            continue
        yield from _edges(name, value, sums)
        if name in _POINTS:
            yield _points(name, value, sums)
        for modulus in _MODULI.get(name, ()):
            if modulus < int(value[-1] - value[0]):
                yield _residues(name, modulus, value, sums)


def _sums(code_U: Array, size: int, x_U: Array, b_U: Array) -> tuple[Array, Array, Array]:
    n = np.bincount(code_U, minlength=size).astype(np.float64)
    return n, np.bincount(code_U, x_U, minlength=size), np.bincount(code_U, b_U, minlength=size)


def _enough(n: Array, x: Array) -> Array:
    """Sums of slices that are too small do not count."""
    return np.where(n >= _LEAST, x, 0.0)


def _labelled(
    name: str, texts: tuple[str, ...], code_M: Array, x_M: Array, b_M: Array
) -> Iterator[Conditioned]:
    n, x, b = _sums(code_M, len(texts), x_M, b_M)
    n[0] = x[0] = 0.0  # "" is no value
    b[0] = 1.0
    if not n.any():
        return
    yield Conditioned(
        *(_enough(n, n), _enough(n, x), b),
        lambda i: Candidate(((LABEL + name, (("in", (texts[i],)),)),), "label"),
    )
    # the best set of several values is one of those with the highest rates
    some = np.flatnonzero(n >= _LEAST)
    order = some[np.argsort(-x[some] / b[some], kind="stable")][:_VALUES]
    n, x, b = (np.cumsum(s[order])[1:] for s in (n, x, b))
    yield Conditioned(
        *(n, x, b),
        lambda i: Candidate(
            ((LABEL + name, (("in", tuple(sorted(texts[k] for k in order[: i + 2]))),)),), "labels"
        ),
    )


def _edges(name: str, value: Array, sums: tuple[Array, ...]) -> Iterator[Conditioned]:
    below = [np.cumsum(s)[:-1] for s in sums]
    above = [s.sum() - c for s, c in zip(sums, below, strict=True)]
    for op, (n, x, b) in (("lt", below), ("gte", above)):
        if name in _POINTS:  # of one value alone the value is named
            n = n.copy()
            n[0 if op == "lt" else -1] = 0.0

        def at(i: int, op: str = op) -> Candidate:
            edge = round_between(int(value[i]) + 1, int(value[i + 1]))
            return Candidate(((name, ((op, edge),)),), op)

        yield Conditioned(_enough(n, n), _enough(n, x), b, at)


def _spans(value: Array, sums: tuple[Array, ...]) -> Conditioned:
    """Neighbouring steps: one, some, all from one on, or all before one."""
    first_C, end_C = np.triu_indices(len(value) + 1, 1)
    n, x, b = (np.append(0.0, np.cumsum(s)) for s in sums)

    def at(i: int) -> Candidate:
        first, end = int(first_C[i]), int(end_C[i])
        if end - first == 1:
            return Candidate(((STEP, (("in", (int(value[first]),)),)),), "point")
        ends = [("gte", int(value[first]))] * (first > 0)
        ends += [("lt", int(value[end - 1]) + 1)] * (end < len(value))
        return Candidate(((STEP, tuple(ends)),), "span")

    n_C, x_C, b_C = (s[end_C] - s[first_C] for s in (n, x, b))
    return Conditioned(_enough(n_C, n_C), _enough(n_C, x_C), b_C, at)


def _points(name: str, value: Array, sums: tuple[Array, ...]) -> Conditioned:
    n, x, b = sums
    return Conditioned(
        *(_enough(n, n), _enough(n, x), b),
        lambda i: Candidate(((name, (("in", (int(value[i]),)),)),), "point"),
    )


def _residues(name: str, modulus: int, value: Array, sums: tuple[Array, ...]) -> Conditioned:
    rest = value % modulus
    n, x, b = (np.bincount(rest, s, minlength=modulus) for s in sums)
    field = f"{name} % {modulus}"
    return Conditioned(
        *(_enough(n, n), _enough(n, x), b),
        lambda i: Candidate(((field, (("in", (i,)),)),), f"modulo {modulus}"),
    )


def round_between(low: int, high: int) -> int:
    """The roundest number of low..high: a power of two, or one with the most zeros at its end.

    >>> round_between(150_991, 151_003), round_between(250, 300), round_between(7, 7)
    (151000, 256, 7)
    """
    power = 1 << max(high, 1).bit_length() - 1
    if low <= power and power > 4:
        return power
    unit = 10 ** int(math.log10(max(high, 1)))
    while unit > 1:
        if (rounded := -(-low // unit) * unit) <= high:
            return rounded
        unit //= 10
    return low


# Sequence search: whether a few sequences explain a gap, though no field separates them.
#
# Axes: K tokens, Q sequences, J bets.


_TIMES = 3.0  # the gap of similar tokens of other sequences, that those sequences exceed
_MOST_OF_IT = 0.5
_EXCEPTION = 0.4  # share of the tokens: the rest would be the exception
_MARGIN = 0.5  # standard deviations above the largest of a population


@dataclass(frozen=True)
class OddSequences:
    """Sequences whose gap is far above that of the others.

    Args:
        sequences: share of all sequences; share: share of the gap's excess over the others.
        log_e: evidence that there are any, of the half that did not choose, nats.
        worst: places of the worst, worst first.
        index: of the sequences in the table.
    """

    sequences: float
    share: float
    log_e: float
    worst: tuple[str, ...]
    index: tuple[int, ...]


def find_sequences(
    table: TokenTable, limit: float = 0.0, alpha: float = ALPHA
) -> OddSequences | None:
    """The few sequences that explain most of the gap; None if all are alike.

    Args:
        limit: on the mean of |p - q| / (p + q).
        alpha: probability of an answer although no sequence has, token by token, a mean above
            both `limit` and _TIMES that of similar tokens in the first half's other sequences.
    """
    chosen_K, tested_K = halves(table)
    if not chosen_K.any() or not tested_K.any():
        return None
    ordinary_K = _ordinary(table, chosen_K)
    base_K = table.expected(ordinary_K)
    bound_K = np.minimum(np.maximum(limit, _TIMES * base_K), 0.99)
    tested_Q = np.unique(table.sequence_K[tested_K])
    log_e_Q = _evidence_of_each(table, bound_K)
    size = len(log_e_Q)
    log_e = float(np.logaddexp.reduce(log_e_Q[tested_Q]) - math.log(len(tested_Q)))
    if log_e < log_price(alpha):
        return None
    own_Q = np.bincount(table.sequence_K, minlength=size) > 0
    odd_Q = own_Q & (log_e_Q > log_price(alpha)) & _apart(table, base_K, own_Q)
    over_Q = np.bincount(table.sequence_K, table.gap_K - base_K, minlength=size)
    in_odd_K = odd_Q[table.sequence_K]
    share = float(over_Q[odd_Q].sum() / max(over_Q.sum(), 1e-300))
    if share < _MOST_OF_IT or in_odd_K.mean() > _EXCEPTION:
        return None
    order = [int(q) for q in np.argsort(-over_Q) if odd_Q[q]]
    return OddSequences(
        float(odd_Q.sum() / own_Q.sum()),
        min(share, 1.0),
        log_e,
        tuple(table.source_Q[q] for q in order[:3] if q < len(table.source_Q)),
        tuple(order),
    )


def _apart(table: TokenTable, base_K: Array, own_Q: Array) -> Array:
    """Whether a sequence is further off than the spread of the others gives, [Q].

    Sequences differ by a factor in every population: its spread is that of the lower half, and of
    n lognormal ones the largest is some sqrt(2 log n) standard deviations above the middle.
    """
    gap_Q, expected_Q = (
        np.bincount(table.sequence_K, of_K, minlength=len(own_Q)) for of_K in (table.gap_K, base_K)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        rate_Q = np.log(gap_Q / expected_Q)
    low, middle = np.nanquantile(rate_Q[own_Q], [NormalDist().cdf(-1), 0.5])
    reach = math.sqrt(2 * math.log(max(int(own_Q.sum()), 2))) + _MARGIN
    return rate_Q > middle + reach * (middle - low)


def _ordinary(table: TokenTable, chosen_K: Array) -> Array:
    """Tokens of the half that chooses, in the half of its sequences with the smaller rates."""
    base_K = table.expected(chosen_K)
    size = int(table.sequence_K.max()) + 1
    x_Q, b_Q = (
        np.bincount(table.sequence_K[chosen_K], v[chosen_K], minlength=size)
        for v in (table.gap_K, base_K)
    )
    some_Q = b_Q > 0
    rate_Q = np.where(some_Q, x_Q / np.where(some_Q, b_Q, 1.0), np.inf)
    middle = float(np.median(rate_Q[some_Q]))
    return chosen_K & (rate_Q <= middle)[table.sequence_K]


def _evidence_of_each(table: TokenTable, bound_K: Array) -> Array:
    """Log e-value of each sequence that its tokens exceed their bounds, [Q]."""
    weight_J = weights_above()
    size = int(table.sequence_K.max()) + 1
    growth_JQ = np.stack(
        [
            np.bincount(
                table.sequence_K,
                np.log1p(bet * table.gap_K) - np.log1p(bet * bound_K),
                minlength=size,
            )
            for bet in POS
        ]
    )
    top_Q = growth_JQ.max(axis=0)
    return top_Q + np.log(weight_J @ np.exp(growth_JQ - top_Q))
