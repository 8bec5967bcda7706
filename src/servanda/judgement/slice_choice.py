# Slice choice: the slices of a comparison without a contract.
#
# Decided from labels, prompt lengths, and the lengths of a few responses that are not judged: a
# decision after the evidence would be a selection (law 5).

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from servanda.contract.clause import SliceRule
from servanda.contract.model import Contract
from servanda.judgement.slices.rules import LABEL
from servanda.judgement.workload_coverage import listed
from servanda.theory.stats.interval import units_at_best
from servanda.traces.corpus import Corpus

_MOST = 8  # most values of a label that become slices
_POOLED = 256  # most values of a label in one pooled slice
_TAKEN = ("all", "depth", "prompt_tokens")  # names of slices not from labels
_AMPLE = 1.5  # multiple of the units that identical kernels need
_EDGES = (16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0)  # of prompt_tokens
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def starting_slices(
    corpus: Corpus,
    lengths: Sequence[int],
    *,
    width: int,
    groups: int,
    limit: float,
    contract: Contract,
    answers: Sequence[int] = (),
) -> tuple[tuple[SliceRule, ...], tuple[str, ...]]:
    """Slices that a run of this size can judge, and the reasons for omitted ones.

    Args:
        lengths: tokens of each prompt.
        width: most new tokens of a sequence.
        groups: number of prompt groups of the whole run.
        limit: limit of a slice, as the mean of x.
        contract: its claim and confidence define the units that a slice needs.
        answers: lengths of a few responses that are not judged; (): none, and every response counts
            with its largest length.
    """
    needed = units_at_best(limit, 1 - contract.confidence)
    if needed is None:
        return (), ("no slice: a limit of 0 cannot be shown",)
    answers = answers or (width,)
    # tokens are the units of a realised claim
    each = sum(answers) / len(answers) if contract.claim == "realised" else 1
    room = _Room(corpus, groups * each, _AMPLE * needed)
    rules: list[SliceRule] = []
    notes: list[str] = []
    for label in sorted({name for prompt in corpus.prompts for name in prompt.labels}):
        labelled, note = _by_label(room, label)
        rules += labelled
        notes += note
    edges = _edges(room, lengths)
    if edges:
        rules.append(_rule("prompt_tokens", "request.prompt_tokens", edges))
    depths, note = _depths(room, answers, width, realised=contract.claim == "realised")
    if depths:
        rules.append(_rule("depth", "context.position", depths))
    return tuple(rules), (*notes, *note)


def _by_label(room: _Room, label: str) -> tuple[list[SliceRule], list[str]]:
    """The slices of a label: one per value with enough units, and one for the others."""
    counts = room.corpus.label_values(label)
    if len(counts) < 2:
        return [], []
    if max(counts.values()) == 1:
        return [], [f"label {label!r} differs on every line: an identifier, and no slice"]
    name = label if _NAME.fullmatch(label) and label not in _TAKEN else f"label-{named(label)}"
    field = f"{LABEL}{label}"
    ranked = sorted(counts, key=lambda v: (-counts[v], v))
    units = {value: room.labelled(label, (value,)) for value in ranked}
    own = [value for value in ranked if units[value] >= room.needed][:_MOST]
    rest = [value for value in ranked if value not in own]
    together = room.labelled(label, rest)
    bare = room.labelled(label, (None,))
    fine = bare == 0 or bare >= room.needed
    if not own:
        most = max(units.values())
        return [], [
            f"label {label!r}: its {len(counts):,} values would have {most:,.0f} of the "
            f"{room.needed:,.0f} units that a limit needs, or fewer"
        ]
    if fine and own == ranked[: len(own)] and (not rest or together >= room.needed):
        rules = [_rule(name, field, most=len(own) if rest else None)]
        how = f"they are judged together, as {name}=(other)"
    else:
        # a split has a slice for every value, also for undecidable ones
        rules = [_match(f"{name}-{named(v)}", {field: {"in": [v]}}) for v in own]
        how = "they are judged with the whole alone"
        if together >= room.needed and len(rest) <= _POOLED:
            rules.append(_match(f"{name}-other", {field: {"in": sorted(rest)}}))
            how = f"they are judged together, as {name}-other"
        if bare >= room.needed:
            rules.append(_match(f"{name}-none", {field: {"exists": False}}))
    notes = []
    if rest:
        few = f"{len(rest):,} of {len(counts):,} values of label {label!r}"
        few = f"{few} ({listed(map(repr, rest))})"
        why = f"would have {units[rest[0]]:,.0f} of the {room.needed:,.0f} units that a limit needs"
        if units[rest[0]] >= room.needed:
            why = f"are beyond the {_MOST} largest"
        notes.append(f"{few} {why}, or fewer: {how}")
    if not fine:
        notes.append(f"prompts without label {label!r} are too few for a slice")
    return [*apart(rules)], notes


def named(value: str) -> str:
    """A label or a value as a part of a slice's name."""
    letters = "".join(c if c.isascii() and (c.isalnum() or c in "_.") else "-" for c in value)
    return letters[:40] or "none"


def apart(rules: Sequence[SliceRule]) -> tuple[SliceRule, ...]:
    """Rules with unique names: two labels may give the same name."""
    seen: Counter[str] = Counter()
    renamed = []
    for rule in rules:
        seen[rule.name] += 1
        n = seen[rule.name]
        renamed.append(rule if n == 1 else rule.model_copy(update={"name": f"{rule.name}.{n}"}))
    return tuple(renamed)


def _depths(
    room: _Room, answers: Sequence[int], width: int, *, realised: bool
) -> tuple[tuple[float, ...], list[str]]:
    """Position edges with enough units in every bucket, from the lengths of responses."""
    if width < 6:
        return (), []

    def units(low: float, high: float) -> float:
        """Units of the whole run between two positions."""
        tokens = sum(min(n, high) - min(n, low) for n in answers)
        if realised:
            return room.whole * tokens / max(sum(answers), 1)
        # unused length costs prompt groups
        return room.whole * tokens / (len(answers) * (min(high, width) - low))

    def bear(edges: Sequence[float]) -> bool:
        ends = [0.0, *edges, float(width)]
        return all(units(low, high) >= room.needed for low, high in itertools.pairwise(ends))

    thirds = (float(width // 3), float(2 * width // 3))
    if bear(thirds):
        return thirds, []
    edges: list[float] = []
    for edge in (float(2**k) for k in range(1, width.bit_length()) if 2**k < width):
        if units(edges[-1] if edges else 0.0, edge) >= room.needed and bear([*edges, edge]):
            edges.append(edge)
    longest = max(answers)
    if not edges:
        return (), [
            f"depth: the {len(answers)} answers drawn to look have {longest} tokens at most, of "
            f"{width}: too few are deep in an answer to judge them alone"
        ]
    return tuple(edges), [
        f"depth beyond token {edges[-1]:g} of {width}: the {len(answers)} answers drawn to look "
        f"have {longest} tokens at most"
    ]


def _rule(
    name: str, split: str, at: tuple[float, ...] | None = None, most: int | None = None
) -> SliceRule:
    more = {} if most is None else {"most": most}
    return SliceRule(name=name, split=split, at=at, **more)  # type: ignore[call-arg,arg-type]


def _match(name: str, match: Mapping[str, Mapping[str, object]]) -> SliceRule:
    return SliceRule(name=name, match=match)  # type: ignore[call-arg,arg-type]


@dataclass(frozen=True)
class _Room:
    corpus: Corpus
    whole: float  # units of the whole run
    needed: float  # units that a slice needs

    def units(self, meets: Callable[[int], bool]) -> float:
        """Units of the groups with a matching row."""
        groups = self.corpus.groups
        return self.whole * sum(any(map(meets, group)) for group in groups) / len(groups)

    def labelled(self, label: str, values: Collection[str | None]) -> float:
        """Units of these values; None: of lines without the label."""
        prompts = self.corpus.prompts
        return self.units(lambda row: prompts[row].labels.get(label) in values)


def _edges(room: _Room, lengths: Sequence[int]) -> tuple[float, ...]:
    """Prompt length edges with enough units in every bucket; none for similar lengths."""
    if max(lengths) < 4 * min(lengths):
        return ()
    edges = [0.0]
    for edge in (edge for edge in _EDGES if edge <= max(lengths)):
        below = room.units(partial(_within, lengths, edges[-1], edge))
        above = room.units(partial(_within, lengths, edge, math.inf))
        if min(below, above) >= room.needed:
            edges.append(edge)
    return tuple(edges[1:])


def _within(lengths: Sequence[int], low: float, high: float, row: int) -> bool:
    return low <= lengths[row] < high
