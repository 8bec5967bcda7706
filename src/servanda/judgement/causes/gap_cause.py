# The likely cause of a gap: first where it is, then which transform it is there.
#
# A cause is named if it explains most of the gap above noise on sequences that did not choose it,
# leaves the rest at noise, and does so clearly better than the next one.  A failed data check is
# the cause itself.  "Alike everywhere" is said after the test that it is so.  In any other case
# the answer is the place, if there is one, and the two most likely causes.
#
# Axes: K tokens, Q sequences.

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from shlex import quote
from typing import Any

import numpy as np

from servanda.judgement.causes.catalogue import (
    CAUSES,
    ENGINE_LABELS,
    LABEL_CAUSES,
    OF_CHECKS,
    RAW,
    TRAINER_LABELS,
    UNEXPLAINED,
    Cause,
)
from servanda.judgement.causes.gap_shape import (
    EXACT,
    FLEXIBLE,
    RAW_SETTINGS,
    SETTINGS,
    TRANSFORMS,
    Account,
    Shape,
    accounts,
    rate_of,
    shape_of,
)
from servanda.judgement.causes.slice_search import (
    TIMES,
    FoundSlice,
    OddSequences,
    coincident,
    find_sequences,
    find_slices,
    halves,
    mask_of,
    measured,
    where,
)
from servanda.judgement.causes.token_table import STEP, Array, TokenTable
from servanda.judgement.slices.rules import LABEL, modulo

EXPLAINS = 0.8  # least share of the gap above noise that a named cause explains
_SETTING = 0.9  # the same of a setting of the sampler, which much is possible under
_RIVAL = 0.7  # share of another cause that would explain nearly as much
_SOME = 0.3  # share of a cause that is said to be likely
_CLEARLY = 0.06  # by which its share is above that of another cause of its kind
_REST = 0.15  # of the gap: what a named cause may leave, if that is more than the limit
_TWO = 0.3  # least share of the larger of two places
_GROWS, _SURE_Z = 1.5, 3.0
_AT_START = 0.35  # a first step below this share of the last: nothing was wrong before an update
_STALE_CONCENTRATION, _WORST = 0.75, 0.3  # share of the gap in the worst sequences with so much
_GROWING = ("stale_weights", "stale_cache")
_OLD = 2.0  # times the rate of tokens of the current weights
_EARLY, _LATE = 0.4, 0.25  # share of the tokens that are a beginning, and an end
_BEGINNING = 48  # tokens of a response
_SAME = 0.9  # overlap of two places that are the same tokens
UNEVEN = 1.7  # largest over smallest rate of what is alike
_UNLIKE = 0.5  # relative spread of the rates of sequences that are alike
_BALANCED = 0.3  # weights above 1 over those below; of a large gap few tokens have the large ones
_OF_IDS = 0.15  # share of the gap that the mean of each token id explains
# nats a token beyond which other tokens, other routes and a bias of ids differ everywhere, too
_ARITHMETIC = 0.4
_PART = 0.04  # share of the tokens of a part that is compared
_ERRORS = 4.0  # standard errors that a difference has at least


@dataclass(frozen=True)
class Explanation:
    """The likely cause of a gap.

    Args:
        cause, rival: names of the two most likely causes; `unexplained` where none explains it.
        text: the cause, its place and its evidence in one line.
        evidence: the measured numbers that suggest it.
        experiment, command: what separates the two.
        slices: those that were found, most of the excess first.
    """

    cause: str
    rival: str
    text: str
    evidence: str
    experiment: str
    command: str
    slices: tuple[FoundSlice, ...] = ()

    @property
    def named(self) -> bool:
        return self.cause != UNEXPLAINED


def explain(
    table: TokenTable,
    limit: float = 0.0,
    problems: Mapping[str, str] | None = None,
    place: str = "DIR",
    violated: Sequence[Mapping[str, Mapping[str, Any]]] = (),
) -> Explanation:
    """The likely cause of a gap.

    Args:
        limit: of the mean of |p - q| / (p + q), which a slice has to exceed.
        violated: conditions of slices that a contract has and that are violated, which count
            where the search finds none.
        problems: failed data quality checks, by name, with what they found.
        place: of the data, for commands.
    """
    case = Case(table, limit, tuple(violated))
    found = _of_checks(case, problems) if problems else _of_gap(case)
    cause, rival = CAUSES[found.name], CAUSES[found.rival or CAUSES[found.name].rival]
    asked = cause if found.name != UNEXPLAINED else rival
    command = asked.command.replace("{dir}", quote(place))
    command = command.replace("{step}", str(case.first_step))
    text = found.text if problems else _sentence(cause, found)
    slices = () if problems else case.slices
    return Explanation(cause.name, rival.name, text, found.text, asked.experiment, command, slices)


def _sentence(cause: Cause, found: Found) -> str:
    words = cause.words
    if "{where}" in words:
        words = words.replace("{where}", found.where or "one label")
    elif found.where:
        words = f"{words}, in {found.where}"
    return f"{words}; {found.text}"


@dataclass(frozen=True)
class Found:
    """A cause before its words: name, the next likely one, place, and evidence."""

    name: str
    text: str
    where: str = ""
    rival: str = ""


@dataclass(frozen=True)
class Case:
    """The tokens of a gap, and what was measured on them."""

    table: TokenTable
    limit: float
    violated: tuple[Mapping[str, Mapping[str, Any]], ...] = ()

    @property
    def noise(self) -> float:
        """The gap of a healthy pair: limits are at least twice that, and so is what is beyond."""
        return min(self.limit / 2, self.gap / 4)

    @cached_property
    def gap(self) -> float:
        return float(self.table.gap_K.mean())

    @property
    def remains(self) -> float:
        """The largest gap that is left at noise: within the limit, and small beside this one."""
        return min(max(self.limit, _REST * self.gap), max(self.limit, self.gap) / 2)

    def inside(self, inside_K: Array) -> Found:
        """The transform of some tokens, whose noise is that of similar ones outside."""
        noise = max(self.noise, float(self.table.expected(~inside_K)[inside_K].mean()))
        case = Case(self.table.taken(inside_K), self.limit)
        return _named(accounts(*case.parts, noise, TRANSFORMS), case)

    @cached_property
    def parts(self) -> tuple[TokenTable, TokenTable]:
        """The sequences that choose, and those that judge."""
        chosen_K, tested_K = halves(self.table)
        return self.table.taken(chosen_K), self.table.taken(tested_K)

    @cached_property
    def base_K(self) -> Array:
        return self.table.expected(np.ones(len(self.table), dtype=bool))

    @cached_property
    def first_step(self) -> int:
        return int(self.table.step_K.min())

    @cached_property
    def slices(self) -> tuple[FoundSlice, ...]:
        found = find_slices(self.table, self.limit)
        return found or tuple(filter(None, (measured(self.table, one) for one in self.violated)))

    def share(self, inside_K: Array) -> tuple[float, float]:
        """Share of the gap above noise that some tokens have more than similar others; the rest.

        The rest is the mean gap of the others.
        """
        if inside_K.all() or not inside_K.any():
            return 0.0, self.gap
        base_K = self.table.expected(~inside_K)
        own = float(np.where(inside_K, self.table.gap_K - base_K, 0.0).mean())
        rest = float(self.table.gap_K[~inside_K].mean())
        whole = self.gap - min(self.limit / 2, float(base_K.mean()))
        return (min(max(own / whole, 0.0), 1.0) if whole > 0 else 0.0), rest


def _of_checks(case: Case, problems: Mapping[str, str]) -> Found:
    """A failed check is the cause; a mean weight above 1 has several, which a transform decides."""
    check = next((name for name in OF_CHECKS if name in problems), next(iter(problems)))
    name, text = OF_CHECKS.get(check, "unsound"), problems[check]
    if check == "zeros" and len(problems) == 1 and _few_zeros(case.table):
        found = _named(accounts(*case.parts, case.noise, SETTINGS), case)
    elif check in ("values", "line_up", "unrelated", "coherence"):
        found = _of_gap(case)
    else:
        return Found(name, text)
    if found.name in (*EXACT, "top_p"):
        place = f", in {found.where}" if found.where else ""
        return Found(found.name, f"{text}; {found.text}{place}")
    if name == RAW and not _sampled_otherwise(case):
        return Found(UNEXPLAINED, f"{UNEXPLAINED}; {text}", rival=RAW)
    return Found(name, text)


def _sampled_otherwise(case: Case) -> bool:
    """Whether the trainer's logprobs are those of the sampler at a setting of it.

    The tokens are then drawn from what the trainer has, and the engine's are raw.
    """
    known = [t.taken(np.isfinite(t.train_K)) for t in case.parts]
    chosen, tested = (replace(t, train_K=t.infer_K, infer_K=t.train_K) for t in known)
    tried = accounts(chosen, tested, case.noise, RAW_SETTINGS)
    return any(one.share >= EXPLAINS for one in tried)


def _few_zeros(table: TokenTable) -> bool:
    """Whether most of the gap is elsewhere: a cut that leaves one token has a logprob of 0, too."""
    return bool(table.gap_K[table.infer_K == 0].sum() < 0.5 * table.gap_K.sum())


def _of_gap(case: Case) -> Found:
    table = case.table
    steps = shape_of(table, table.numbers[STEP])
    parts = _families(case)
    main, share, rest = parts[0] if parts else None, 0.0, case.gap
    if main is not None:
        main_K = _mask(main, table)
        share, rest = case.share(main_K)
        _, left = case.share(np.any([_mask(part, table) for part in parts], axis=0))
        together = sum(case.share(_mask(part, table))[0] for part in parts)
        enough = share >= EXPLAINS or (share >= _TWO and all(map(_of_a_kind, parts)))
        explained = together >= EXPLAINS and left <= case.remains and enough
        more = "; ".join(map(where_of, parts[1:]))
        if not explained and share >= _TWO and _of_a_kind(main):
            others = Case(table.taken(~main_K), case.limit)
            elsewhere = _named(accounts(*others.parts, others.noise, EXACT), others)
            explained, more = elsewhere.name != UNEXPLAINED, elsewhere.text
        if explained:
            found = _in_place(case, main, main_K, share)
            return replace(found, text=f"{found.text}; more remains: {more}") if more else found
    odd = find_sequences(table, case.limit) if share < 0.5 else None
    if odd is not None and (found := _of_sequences(case, odd, steps)) is not None:
        return found
    found = _everywhere(case, steps)
    if main is not None and (
        found.name == UNEXPLAINED or (found.name in _GROWING and share >= _TWO)
    ):
        return _unexplained(main, share, rest)
    return found


# the place


def _of_a_kind(part: Sequence[FoundSlice]) -> bool:
    """Whether a place is one of a label or of steps: of those there may be two faults at once.

    Two places of tokens are more often one fault that is not understood.
    """
    return part[0].first[0].startswith((LABEL, STEP))


def _families(case: Case) -> list[list[FoundSlice]]:
    """The slices by field, those with the most of the gap first; of a field they are one place.

    A slice inside another one is no place of its own.
    """
    of: dict[tuple[str, ...], list[FoundSlice]] = {}
    slices = [found for found in case.slices if not _grows_from(case, found)]
    mask_of_each = [mask_of(found.match, case.table) for found in slices]
    for at, found in enumerate(slices):
        own_K = mask_of_each[at]
        others = [mask_K for i, mask_K in enumerate(mask_of_each) if i != at]
        if not any((own_K <= mask_K).all() and (own_K < mask_K).any() for mask_K in others):
            of.setdefault(tuple(found.match), []).append(found)

    def own(part: list[FoundSlice]) -> float:
        return sum(found.tokens * (found.inside - found.outside) for found in part)

    return sorted(of.values(), key=own, reverse=True)


def _grows_from(case: Case, found: FoundSlice) -> bool:
    """Whether a slice is of late steps because its gap grows: what grows is in no step alone."""
    if [*found.match.get(STEP, {})] != ["gte"]:
        return False
    shape = shape_of(case.table, case.table.numbers[STEP])
    return shape is not None and shape.kind in ("ramp", "unclear")


def _mask(part: Sequence[FoundSlice], table: TokenTable) -> Array:
    return np.any([mask_of(found.match, table) for found in part], axis=0)


def where_of(part: Sequence[FoundSlice]) -> str:
    """The place of slices of one field, in words."""
    points = [found.match[STEP].get("in") for found in part if STEP in found.match]
    if len(points) == len(part) > 1 and all(points):
        return where({STEP: {"in": sorted(v for point in points if point for v in point)}})
    return " or ".join(where(found.match) for found in part)


def _in_place(case: Case, part: Sequence[FoundSlice], inside_K: Array, share: float) -> Found:
    """The cause of a gap in one place: the transform there, or what the place is."""
    table, place = case.table, where_of(part)
    outside = float(table.gap_K[~inside_K].mean())
    level = float(table.gap_K[inside_K].mean())
    text = (
        f"{100 * share:.0f} % of the gap above noise is there ({level:.2g} against {outside:.2g} "
        "elsewhere)"
    )
    found = case.inside(inside_K)
    fields = {modulo(field)[0] for one in part for field in one.match}
    beside = coincident(table, inside_K, fields, _SAME)
    same = [name for name, match in beside.items() if not _told_apart(case, inside_K, match)]
    if found.name != UNEXPLAINED:
        return replace(found, where=place, text=f"{found.text}; {text}")
    name = _kind_of(case, part, inside_K, same)
    if name in ("one_engine", "batch"):
        shape = shape_of(table, table.numbers[STEP], inside_K)
        if shape is not None and _grown(shape):
            text = f"its gap grows x{shape.times:.2g}; {text}"
            name = "stale_replica" if name == "one_engine" else None
    if name is None:
        return _unexplained(part, share, outside, same)
    also = f", which are also {' and '.join(same)}" if same else ""
    return Found(name, text, f"{place}{also}")


def _told_apart(case: Case, inside_K: Array, match: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the tokens that only one of two places has say that the gap is in the first.

    Those of the first alone are far above the others, and those of the second alone are far below
    those of both: one of the two is certain, and the other says nothing else.
    """
    table, other_K = case.table, mask_of(match, case.table)
    base_K = table.expected(~inside_K)
    high, low = (rate_of(table, base_K, of)[0] for of in (inside_K & other_K, ~inside_K & ~other_K))
    says = []
    for only_K, bound, sign in (
        (inside_K & ~other_K, TIMES * low, 1),
        (other_K & ~inside_K, high / TIMES, -1),
    ):
        if only_K.any():
            rate, error = rate_of(table, base_K, only_K)
            says.append(sign * (rate - bound) / max(error, 1e-9))
    return max(says, default=0.0) > _ERRORS and min(says) > -1


def _kind_of(
    case: Case, part: Sequence[FoundSlice], inside_K: Array, same: Sequence[str]
) -> str | None:
    """The cause that a place is; None where the place alone tells none."""
    table, fields = case.table, [modulo(field) for field in part[0].match]
    bases = {base for base, _ in fields}
    base, (_, conditions) = fields[0][0], part[0].first
    tokens = float(inside_K.mean())
    if labels := {b.removeprefix(LABEL) for b in bases if b.startswith(LABEL)}:
        return _of_label(labels, same)
    if any(modulus is not None for b, modulus in fields if b != "context.row"):
        return "blocks"
    if "context.row" in bases:
        return "batch"
    if base == STEP:
        return "change" if [*conditions] == ["gte"] else "steps"
    if base == "outcome.staleness":
        return "old_weights"
    if base == "outcome.token_id":
        return "vocabulary"
    if base == "outcome.from_end":
        return "end_of_answer"
    if bases & {"context.turn", "context.turn_position"}:
        return None if _positions(same) else _of_turns(case, inside_K)
    if base == "context.position" and ("lt" in conditions or conditions.get("in") == [0]):
        edge = conditions.get("lt", 1)
        if tokens > _EARLY or edge > _BEGINNING:
            return None
        return "packing" if _in_some(case, inside_K) else None
    if base in ("context.position", "context.length") and "gte" in conditions:
        if any(name.startswith("turn") for name in same):
            return None
        shape = shape_of(table, table.numbers[base])
        if shape is not None and shape.kind == "ramp":
            return "positions"
        ends = base == "context.position" and tokens <= _LATE and _ends(case, inside_K)
        long = base == "context.length" or _positions(same)
        if ends == long:  # both, or neither
            return None
        return "end_of_answer" if ends else "long_context"
    return None


def _positions(same: Sequence[str]) -> bool:
    return any(name.startswith(("position", "context length")) for name in same)


def _of_label(labels: set[str], same: Sequence[str]) -> str | None:
    """The cause of a label, of its own side; None if something else cuts the same tokens."""
    others = {name.partition(" ")[0] for name in same}
    every = labels | others
    engine, trainer = bool(every & ENGINE_LABELS), bool(every & TRAINER_LABELS)
    if engine and trainer:
        return "one_machine"
    if engine or trainer:
        return "one_engine" if engine else "one_rank"
    known = next((LABEL_CAUSES[name] for name in sorted(labels) if name in LABEL_CAUSES), None)
    if known is not None:
        return known
    return None if same else "one_kind"


def _turns(table: TokenTable) -> Array | None:
    turn_K = table.numbers.get("context.turn")
    return None if turn_K is None or not (turn_K > 1).any() else turn_K > 1


def _of_turns(case: Case, inside_K: Array) -> str | None:
    turns = _turns(case.table)
    at_K = case.table.numbers.get("context.turn_position")
    if turns is None or at_K is None:
        return None
    starts_K = turns & (at_K < 3)
    if float((inside_K & starts_K).sum()) > 0.5 * float(inside_K.sum()):
        return "retokenised"
    if _overlap(inside_K, turns) > _SAME or not (inside_K & ~turns).any():
        return "turns"
    return None


def _overlap(one_K: Array, other_K: Array) -> float:
    return float((one_K & other_K).sum() / max((one_K | other_K).sum(), 1))


def _ends(case: Case, inside_K: Array) -> bool:
    """Whether late positions are the end of their responses, and not of long ones alone."""
    end_K = case.table.numbers.get("outcome.from_end")
    if end_K is None:
        return True
    deep = float(end_K[inside_K].max())
    return _overlap(inside_K, end_K <= deep) > _SAME


def _in_some(case: Case, inside_K: Array) -> bool:
    """Whether the tokens of a place have their gap in some of the sequences only."""
    _, code_M = np.unique(case.table.sequence_K[inside_K], return_inverse=True)
    base_K = case.table.expected(~inside_K)
    x_Q, b_Q = (np.bincount(code_M, v[inside_K]) for v in (case.table.gap_K, base_K))
    rates = x_Q / np.maximum(b_Q, 1e-300)
    return float(np.median(rates)) < 0.25 * float(rates.mean()) if len(rates) >= 10 else False


# sequences


def _of_sequences(case: Case, odd: OddSequences, steps: Shape | None) -> Found | None:
    """The cause of a gap in a few sequences that no field tells apart."""
    table = case.table
    inside_K = np.isin(table.sequence_K, odd.index)
    share, _ = case.share(inside_K)
    places = f", such as {', '.join(odd.worst)}" if odd.worst else ""
    text = (
        f"{100 * odd.sequences:.2g} % of the sequences have {100 * share:.0f} % of the gap above "
        f"noise{places}"
    )
    if share < EXPLAINS:
        return None
    if steps is not None and _grown(steps):
        if steps.start >= _AT_START:
            return None  # of a gap that grows, they are those of late steps
        return Found("stale_cache", f"it grows x{steps.times:.2g} over the steps; {text}")
    found = case.inside(inside_K)
    if found.name != UNEXPLAINED:
        return replace(found, where="a few sequences", text=f"{found.text}; {text}")
    inside = table.taken(inside_K)
    at_K = inside.numbers["context.position"]
    early = find_slices(replace(inside, labels={}, numbers={"context.position": at_K}), case.limit)
    if early and "gte" not in early[0].first[1] and early[0].tokens <= _EARLY:
        return Found("packing", f"their first tokens ({where(early[0].match)}); {text}")
    return Found("odd_sequences", text)


# everywhere


def _everywhere(case: Case, steps: Shape | None) -> Found:
    """The cause of a gap that is in no place: a transform, a growth, or the same everywhere."""
    table = case.table
    grows = steps is not None and _grown(steps)
    # where a gap grows, that of each sequence is that of its step
    tried = accounts(*case.parts, case.noise, {**EXACT, **SETTINGS} if grows else TRANSFORMS)
    found = _named(tried, case)
    if found.name != UNEXPLAINED:
        return found
    most = max((one.share for one in tried), default=0.0)
    # what a transform explains in part may be one whose parameter grows
    if steps is not None and grows and most < _SOME and (grown := _growth(case, steps)):
        return grown
    flexible = accounts(*case.parts, case.noise, FLEXIBLE)
    alike, text = alike_everywhere(case)
    if most < _RIVAL:
        for shaped in (_of_age, _of_length):
            if (found := shaped(case)) is not None:
                return found
        found = _named(flexible, case)
        if found.name != UNEXPLAINED and (alike or found.name != "routing"):
            return found
        if (
            alike
            and _nats(table) <= _ARITHMETIC
            and _balanced(table)
            and max((one.share for one in [*tried, *flexible]), default=0.0) < _SOME
        ):
            return Found("numerics", text)
    likely = sorted((one for one in [*tried, *flexible] if one.share > _SOME), key=_by_share)[:2]
    if likely:
        text += "; most likely " + ", or ".join(
            f"{_short(one.name)} ({100 * one.share:.0f} % of the gap above noise)" for one in likely
        )
    rival = likely[0].name if likely else "numerics" if alike else ""
    return Found(UNEXPLAINED, text, rival=rival)


def _by_share(one: Account) -> float:
    return -one.share


def _nats(table: TokenTable) -> float:
    """Root of the mean square of the log ratios."""
    return float(np.sqrt((np.clip(table.log_ratio_K, -5.0, 5.0) ** 2).mean()))


def _balanced(table: TokenTable) -> bool:
    """Whether weights above 1 make up for those below, as those of two distributions do."""
    over_K = np.expm1(np.clip(table.log_ratio_K, -5.0, 5.0))
    above, below = float(np.maximum(over_K, 0.0).sum()), float(np.maximum(-over_K, 0.0).sum())
    return above >= _BALANCED * below


def _short(name: str, place: str = "one label") -> str:
    words = CAUSES[name].words.partition(":")[0].partition(", {where}")[0]
    return words.replace("{where}", place)


def _grown(shape: Shape) -> bool:
    later = shape.start < 1 if shape.kind != "jump" else shape.above
    return shape.kind != "flat" and shape.times >= _GROWS and shape.z >= _SURE_Z and later


def _growth(case: Case, steps: Shape) -> Found | None:
    table, first = case.table, case.first_step
    begin_K = table.step_K == first
    late_K = table.step_K > np.quantile(np.unique(table.step_K), 2 / 3)
    begin, late = (rate_of(table, case.base_K, of)[0] for of in (begin_K, late_K))
    start = begin / max(late, 1e-9)
    growth = f"it grows x{steps.times:.2g} over the steps"
    if steps.kind == "jump":
        return None
    if _concentration(case) >= _STALE_CONCENTRATION and start < _AT_START:
        return Found(
            "stale_cache",
            f"{growth}, with {100 * _concentration(case):.0f} % of it in the sequences with "
            f"{100 * _WORST:.0f} % of the tokens",
        )
    at = f"step {first} has {100 * start:.0f} % of the last third's"
    own = float(table.gap_K[begin_K].mean())
    from_nothing = start < _AT_START and own <= max(case.limit / 2, _REST * case.gap)
    if from_nothing or (first <= 1 and start >= _REST and steps.steady):
        return Found("stale_weights", f"{growth}; {at}")
    return None


def _concentration(case: Case) -> float:
    """Share of the gap in the worst sequences of each step that have _WORST of its tokens."""
    table = case.table
    _, first_Q, code_K = np.unique(table.sequence_K, return_index=True, return_inverse=True)
    x_Q, b_Q, n_Q = (np.bincount(code_K, of_K) for of_K in (table.gap_K, case.base_K, None))
    step_Q, worst = table.step_K[first_Q], 0.0
    for step in np.unique(step_Q):
        x_P, b_P, n_P = (column[step_Q == step] for column in (x_Q, b_Q, n_Q))
        order = np.argsort(-x_P / b_P, kind="stable")
        before_P = n_P[order].cumsum() - n_P[order]
        part_P = np.clip((_WORST * n_P.sum() - before_P) / n_P[order], 0, 1)
        worst += float(part_P @ x_P[order])
    return worst / max(float(x_Q.sum()), 1e-300)


def _of_age(case: Case) -> Found | None:
    age_K = case.table.numbers.get("outcome.staleness")
    if age_K is None or not ((age_K > 0).any() and (age_K == 0).any()):
        return None
    old, new = (rate_of(case.table, case.base_K, of)[0] for of in (age_K > 0, age_K == 0))
    share, _ = case.share(age_K > 0)
    if old < _OLD * new or share < EXPLAINS:
        return None
    text = f"tokens of older weights have x{old / new:.2g} the gap of the others"
    return Found("old_weights", f"{text}, {100 * share:.0f} % of the gap above noise")


def _of_length(case: Case) -> Found | None:
    """A gap that grows along the context, so that its beginning is at noise."""
    table = case.table
    for field in ("context.length", "context.position"):
        column_K = table.numbers.get(field)
        shape = None if column_K is None else shape_of(table, column_K)
        if column_K is None or shape is None or shape.kind != "ramp" or shape.start >= 1:
            continue
        late_K = column_K >= np.quantile(column_K, 0.1)
        share, _ = case.share(late_K)
        if share < EXPLAINS or shape.z < _SURE_Z:
            continue
        return Found("positions", f"the rate grows x{shape.times:.2g} from the shortest on")
    return None


def alike_everywhere(case: Case) -> tuple[bool, str]:
    """Whether tokens of equal probability differ alike in all parts, and the numbers."""
    table, worst = case.table, (1.0, "")
    for name, parts in _parts(case):
        rates = [rate_of(table, case.base_K, of) for of in parts if of.mean() >= _PART]
        if len(rates) < 2:
            continue
        (low, low_error), (high, high_error) = min(rates), max(rates)
        if high - low > _ERRORS * math.hypot(low_error, high_error):
            worst = max(worst, (high / max(low, 1e-9), name))
    spread = _spread(case)
    ids = next((one.share for one in accounts(*case.parts, 0.0, {"head": FLEXIBLE["head"]})), 0.0)
    size = f"{_nats(table):.2g} nats a token"
    if worst[0] > UNEVEN:
        return False, f"{size}, uneven by {worst[1]} (x{worst[0]:.2g} at equal probability)"
    if spread > _UNLIKE:
        return False, f"{size}, uneven by sequence (their rates vary by {100 * spread:.0f} %)"
    if ids > _OF_IDS:
        return False, f"{size}, uneven by token id (which explains {100 * ids:.0f} % of it)"
    by = f"at most x{worst[0]:.2g} by {worst[1]}" if worst[1] else "no part differs"
    text = f"{size}, alike at equal probability: {by}, {100 * spread:.0f} % between sequences"
    return True, text


def _parts(case: Case) -> Iterator[tuple[str, list[Array]]]:
    """The parts of each field: values of a label, quarters of a number; and violated slices."""
    table = case.table
    for name, (texts, code_K) in table.labels.items():
        if len(texts) <= 1 / _PART:
            yield name, [code_K == i for i, text in enumerate(texts) if text]
    for name, column_K in table.numbers.items():
        if name in ("outcome.token_id", "context.row"):
            continue
        known_K = ~np.isnan(column_K)
        edges = np.unique(np.quantile(column_K[known_K], [0.25, 0.5, 0.75]))
        bin_K = np.searchsorted(edges, column_K, side="right")
        yield where({name: {"in": [0]}})[:-2], [known_K & (bin_K == b) for b in range(4)]
    for match in case.violated:
        inside_K = mask_of(match, table)
        yield where(match), [inside_K, ~inside_K]


def _spread(case: Case) -> float:
    """The spread of the rates of sequences beyond what their tokens give, relative to the mean."""
    table = case.table
    _, code_K = np.unique(table.sequence_K, return_inverse=True)
    x_Q, b_Q = (np.bincount(code_K, v) for v in (table.gap_K, case.base_K))
    own_Q = np.bincount(code_K, (table.gap_K - case.base_K) ** 2)
    n_Q = np.bincount(code_K)
    some_Q = n_Q >= 8
    if some_Q.sum() < 10:
        return 0.0
    mean = float(x_Q[some_Q].sum() / b_Q[some_Q].sum())
    over = (x_Q - mean * b_Q)[some_Q]
    beyond = float((over**2 - own_Q[some_Q]).sum() / (b_Q[some_Q] ** 2).sum())
    return math.sqrt(max(beyond, 0.0)) / max(mean, 1e-9)


# the decision between transforms


def _named(tried: Sequence[Account], case: Case) -> Found:
    """The first transform that explains nearly as much as any; none where that is not clear.

    They are in the order of their freedom: what has fewer parameters is preferred.
    """
    best = max((one.share for one in tried), default=0.0)
    enough = [
        one
        for one in tried
        if one.share >= max(_least(one), best - _CLEARLY) and one.left <= case.remains
    ]
    if not enough:
        return Found(UNEXPLAINED, "")
    first, *others = enough
    text = f"{first.text}; it explains {100 * first.share:.0f} % of the gap above noise"
    return Found(first.name, text, rival=others[0].name if others else "")


def _least(one: Account) -> float:
    return _SETTING if one.name in ("temperature", "top_p") else EXPLAINS


def _unexplained(
    part: Sequence[FoundSlice],
    share: float,
    rest: float,
    same: Sequence[str] = (),
) -> Found:
    """A place without a cause: where, how much, and what is most likely there."""
    place = where_of(part)
    also = f", the same tokens as {' and '.join(same)}" if same else ""
    first = _most_likely(part)
    second = "long_context" if first == "turns" and _positions(same) else CAUSES[first].rival
    text = (
        f"{100 * share:.0f} % of the gap above noise is in {place}{also}; "
        f"the others have {rest:.2g}; most likely {_short(first, place)}, or "
        f"{_short(second, place)}"
    )
    return Found(UNEXPLAINED, text, rival=first)


def _most_likely(part: Sequence[FoundSlice]) -> str:
    field, conditions = part[0].first
    base, modulus = modulo(field)
    if modulus is not None and base != "context.row":
        return "blocks"
    if base.startswith(LABEL):
        return "one_kind"
    if base in ("request.prompt_tokens", "context.length", "context.position"):
        return "positions" if "gte" in conditions else "beginning"
    return {
        "context.row": "stale_cache",
        "context.turn": "turns",
        "context.turn_position": "retokenised",
        "outcome.token_id": "vocabulary",
        "outcome.from_end": "end_of_answer",
        STEP: "steps",
    }.get(base, "numerics")
