# The contract of a run: its preset, the slices for which there are enough tokens, and the number of
# steps that are judged together where there are few.

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from servanda.contract.clause import SliceRule
from servanda.contract.model import EXTERNAL, Contract, Kernel
from servanda.contract.presets import PRESETS, preset_text
from servanda.errors import ContractError
from servanda.judgement import plan as planning
from servanda.judgement.clause_kinds import NotHere
from servanda.judgement.clauses.base import Cell, Kind
from servanda.judgement.clauses.draft_acceptance import DRAFT_ACCEPTANCE, DraftAcceptance
from servanda.judgement.contract_text import of_trainer
from servanda.judgement.plan import Plan
from servanda.judgement.slice_choice import apart, named
from servanda.judgement.slices.rules import LABEL
from servanda.judgement.workload_coverage import listed
from servanda.registry import did_you_mean
from servanda.report.format import count
from servanda.rl.trend.changes import with_reference
from servanda.runner import load
from servanda.theory.stats.interval import units_at_best
from servanda.traces.corpus import Corpus, Prompt
from servanda.traces.trace import TracePair

WORKLOAD = "workload"  # the only workload of such a contract
# at least one prompt group for `holds`; the size is that of the dump
_SIZES = (1, 10_000_000)
AMPLE = 4  # multiple of the tokens that identical kernels need
MOST_STEPS = 12  # most steps that a slice is judged on
_PARTS = 20  # a slice with this fraction (1/n) of the tokens should be decidable
# fields of tokens that a step's arrays have
STEP_FIELDS = (
    "request.prompt_tokens",
    "context.position",
    "context.length",
    "context.turn",
    "context.turn_position",
    "outcome.staleness",
)
_OF_FORMAT: Mapping[str, str] = {
    "nemo": "nemo-grpo",
    "prime-rl": "prime-rl",
    "slime": "slime",
    "miles": "slime",
    "skyrl": "verl-sync",
}
_OF_FRAMEWORK: Mapping[str, str] = {
    "trl": "trl",
    "verl": "verl-sync",
    "nemo": "nemo-grpo",
    "prime": "prime-rl",
    "slime": "slime",
    "miles": "slime",
}


def chosen(preset: str | None, about: Mapping[str, str], counts: Counts) -> tuple[str, str]:
    """The preset of a dump with its reason: as requested, or as detected.

    Args:
        about: the dump's summary.
        counts: counts of its first tokens.
    """
    if preset:
        return preset, "as asked"
    stale = any(n for age, n in counts.staleness.items() if age)
    return guessed(about["format"], about.get("framework", ""), stale=stale)


def guessed(format_: str, framework: str, *, stale: bool) -> tuple[str, str]:
    """The preset for a dump, with the reason.

    Args:
        stale: whether any token is older than its step.

    >>> guessed("nemo", "NeMo-RL", stale=False)
    ('nemo-grpo', 'as the format suggests')
    >>> guessed("own", "my TRL fork", stale=False)
    ('trl', 'as the dump names its trainer')
    """
    named = (p for word, p in _OF_FRAMEWORK.items() if word in framework.lower())
    if format_ in _OF_FORMAT:
        preset, why = _OF_FORMAT[format_], "as the format suggests"
    elif (preset := next(named, "")) != "":
        why = "as the dump names its trainer"
    else:
        preset, why = "verl-sync", "the default, because the dump does not name its trainer"
    if preset == "verl-sync" and stale:
        return "verl-async", "because its tokens are some updates old"
    return preset, why


def preset_of(name: str) -> str:
    """Check that a preset applies to a dump.

    Raises:
        ContractError: no such preset, or one for serving.
    """
    if name not in PRESETS or PRESETS[name] != "reinforcement learning":
        fitting = [n for n in PRESETS.names() if PRESETS[n] == "reinforcement learning"]
        what = "is for serving" if name in PRESETS else "does not exist"
        raise ContractError(
            f"a dump needs a preset for a trainer, and {name!r} {what}",
            hint=did_you_mean(name, fitting),
        )
    return name


def needed(preset: str) -> int:
    """The number of tokens that a slice needs for a cell."""
    contract = contract_of(preset, "dump", ())[1]
    limits = [
        float(c.at_most)
        for c in contract.statistical
        if c.metric == "tv" and c.enforced and isinstance(c.at_most, float)
    ]
    if not limits:  # of another package
        raise ContractError(
            f"preset {preset!r} has no enforced clause of tv with a number as its limit",
            hint="a dump needs one, as in `servanda contract presets --show verl-sync`",
        )
    limit = min(limits)
    units = units_at_best(limit, 1 - contract.confidence)
    assert units is not None  # no preset has a limit of 0
    return AMPLE * units


def window_of(needed: int, steps: int, trained: int) -> int:
    """The number of steps that a slice is judged on together: more where even the whole is thin.

    Args:
        needed: tokens that a slice needs; trained: trained tokens of the first `steps` steps.

    >>> window_of(500, 1, 20_000), window_of(500, 1, 1000), window_of(500, 1, 20)
    (1, 10, 25)
    """
    thin = needed * steps / max(trained, 1)
    return min(max(math.ceil(_PARTS * thin), 1), max(MOST_STEPS, math.ceil(thin)))


def run_slices(
    counts: Counts, needed: int, steps: int
) -> tuple[int, tuple[SliceRule, ...], tuple[str, ...]]:
    """The window of a run, its slices, and the reasons for omitted ones.

    Args:
        counts: of its first `steps` steps; needed: tokens that a slice needs in a window.
    """
    window = window_of(needed, steps, counts.turns.total())
    return window, *rules_of(counts, math.ceil(steps * needed / window))


def contract_of(
    preset: str,
    name: str,
    slices: Sequence[SliceRule],
    *,
    filtered: bool = False,
    bitwise: bool = False,
) -> tuple[str, Contract]:
    """The contract of a dump, and its text.

    Args:
        filtered: whether the source records removals by a filter of the trainer.
        bitwise: whether both kernels are declared to compute the same bits.
    """
    text = of_trainer(
        preset_text(preset),
        name=name,
        titles=("trainer", "rollout engine"),
        slices=slices,
        sizes=_SIZES,
        head=(f"Of a trainer's dump, held to the preset {preset}.",),
        filtered=filtered,
        bitwise=bitwise,
    )
    return text, load.contract_of(text, f"{name}.kernelcontract.yaml")


def of_a_trainer(path: Path) -> tuple[str, Contract]:
    """Load a contract for steps, and its text.

    Raises:
        ContractError: its kernels are not external, or its claim is not realised.
    """
    contract = load.load(path)
    sides = (contract.kernels.train, contract.kernels.infer)
    if any(kernel.engine != EXTERNAL for kernel in sides) or contract.claim != "realised":
        raise ContractError(
            f"{path} is no contract for a trainer's steps, which has external kernels and a "
            "realised claim",
            hint="servanda check DUMP --save-contract FILE writes one",
        )
    return path.read_text(encoding="utf-8-sig"), contract


def contract_name(path: Path) -> str:
    """A valid contract name from a folder's name."""
    return (re.sub(r"[^A-Za-z0-9_.-]+", "-", path.resolve().name).strip("-._") or "dump")[:60]


# The slices of a run are decided from counts, without logprobs.  Counted are the first tokens of a
# dump (HEAD_TOKENS, or all if it is smaller), or a monitor's first step.  A slice with too few
# tokens for a decision is joined to its neighbour, or omitted.

Labels = tuple[tuple[str, str], ...]  # name and value of each label of a sequence

HEAD_TOKENS = 2_000_000  # tokens in memory at once, including prompts
FIRST_OF_TURN = 3
_TURNS = 4  # the last one is "and later"
_POSITIONS = (16, 64, 256, 1024, 4096, 16384)
_LENGTHS = (256, 1024, 4096, 16384, 65536)
_STALE = 2  # the last one is "and more"
_MOST = 8  # most values of a label that become slices
_POOLED = 256  # most values of a label in one pooled slice
# labels whose values become slices; a rank where no replica is known, which often is the same
SLICED = ("env", "replica", "rank")


@dataclass
class Counts:
    """Counts over the head of a dump.

    Args:
        starts: tokens among the first FIRST_OF_TURN of turn k, by k; turns: all tokens of turn k.
        positions, lengths: tokens by bucket; staleness: tokens by its value.
        labels: name -> tokens of each value.
    """

    turns: Counter[int] = field(default_factory=Counter)
    starts: Counter[int] = field(default_factory=Counter)
    positions: Counter[int] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    labels: dict[str, Counter[str]] = field(default_factory=dict)

    def join(self, other: Counts) -> None:
        for name in ("turns", "starts", "positions", "lengths", "staleness"):
            getattr(self, name).update(getattr(other, name))
        for name, values in other.labels.items():
            self.labels.setdefault(name, Counter()).update(values)

    def add(self, pair: TracePair) -> None:
        columns = pair.infer.columns
        turn_N = np.minimum(columns["turn"], _TURNS)
        _count(self.turns, turn_N)
        _count(self.starts, turn_N[columns["turn_position"] < FIRST_OF_TURN])
        _count(self.positions, np.searchsorted(_POSITIONS, pair.position_N, side="right"))
        _count(self.lengths, np.searchsorted(_LENGTHS, columns["length"], side="right"))
        if "staleness" in columns:
            known_N = columns["staleness"][~np.isnan(columns["staleness"])]
            _count(self.staleness, np.clip(known_N, 0, _STALE))
        for name in SLICED:
            if name in pair.labels and not (name == "rank" and "replica" in pair.labels):
                counted = self.labels.setdefault(name, Counter())
                length_S = pair.infer.length_S.tolist()
                for value, n in zip(pair.labels[name], length_S, strict=True):
                    if value:  # "" is no value
                        counted[value] += n


def _count(counter: Counter[int], values_N: np.ndarray) -> None:
    values, n = np.unique(values_N.astype(np.int64), return_counts=True)
    counter.update(dict(zip(values.tolist(), n.tolist(), strict=True)))


def corpus_of(name: str, labels: Iterable[Labels], digest: str = "") -> Corpus:
    """A corpus for slices: one line for each combination of labels."""
    prompts = tuple(Prompt(row, labels=dict(own)) for row, own in enumerate(labels, 1))
    return Corpus(name, prompts or (Prompt(1),), digest)


def rules_of(counts: Counts, needed: int) -> tuple[tuple[SliceRule, ...], tuple[str, ...]]:
    """The slices of a dump, and the reasons for omitted ones.

    Args:
        needed: tokens that a slice needs.
    """
    rules: list[SliceRule] = []
    notes: list[str] = []
    if len(counts.turns) > 1:
        spans = _joined(counts.turns, needed, open_at=_TURNS)
        rules += [
            _rule(f"turn-{_span(turns, _TURNS)}", {"context.turn": _terms(turns, _TURNS)})
            for turns in spans
        ]
        later = Counter({turn: n for turn, n in counts.starts.items() if turn > 1})
        # turn 1 follows a prompt, not a tool: never joined with later turns
        first = [(1, 1)] if counts.starts[1] >= needed else []
        starts = _joined(later, needed, open_at=_TURNS, alone=True)
        for turns in [*first, *starts]:
            first_of = {"context.turn_position": {"lt": FIRST_OF_TURN}}
            start = {"context.turn": _terms(turns, _TURNS), **first_of}
            rules.append(_rule(f"start-{_span(turns, _TURNS)}", start))
        if not spans:
            n = counts.turns.total() - counts.turns[1]
            notes.append(f"no slice by turn: those after the first have {count(n, 'token')}")
        if not starts:
            notes.append(
                f"the first tokens of later turns are {later.total():,}, fewer than {needed:,}: no "
                "slice shows tool boundaries"
            )
    for name, edges, tokens in (
        ("position", _POSITIONS, counts.positions),
        ("length", _LENGTHS, counts.lengths),
    ):
        if at := _edges(edges, tokens, needed):
            rules.append(SliceRule(name=name, split=f"context.{name}", at=at))  # type: ignore[call-arg]
    if any(counts.staleness[k] for k in counts.staleness if k):
        for stale in _joined(counts.staleness, needed, open_at=_STALE):
            terms = {"outcome.staleness": _terms(stale, _STALE)}
            rules.append(_rule(f"stale-{_span(stale, _STALE)}", terms))
    for name, values in counts.labels.items():
        if len(values) < 2:
            continue
        ranked = sorted(values, key=lambda v: (-values[v], v))
        own = [value for value in ranked if values[value] >= needed][:_MOST]
        rules += [_rule(f"{name}-{named(v)}", {f"{LABEL}{name}": {"in": [v]}}) for v in own]
        rest = [value for value in ranked if value not in own]
        if not rest:
            continue
        pooled = own and sum(values[v] for v in rest) >= needed and len(rest) <= _POOLED
        if pooled:
            rules.append(_rule(f"{name}-other", {f"{LABEL}{name}": {"in": sorted(rest)}}))
        few = f"{len(rest):,} of {len(values):,} values of {name} ({listed(map(repr, rest))})"
        how = f"together, as {name}-other" if pooled else "with the whole alone"
        why = f"fewer than {count(needed, 'token')} each"
        if len(own) == _MOST:
            why = f"{why}, or are not among the {_MOST} largest"
        notes.append(f"{few} have {why}: they are judged {how}")
    return apart(rules), tuple(notes)


def _rule(name: str, match: Mapping[str, Mapping[str, object]]) -> SliceRule:
    return SliceRule(name=name, match=match)  # type: ignore[call-arg,arg-type]


def _terms(span: tuple[int, int], last: int) -> dict[str, int]:
    """The terms of a range of numbers; a range that ends at `last` is open above."""
    low, high = span
    return {"gte": low} if high >= last else {"gte": low, "lte": high}


def _joined(
    counts: Counter[int], needed: int, *, open_at: int, alone: bool = False
) -> list[tuple[int, int]]:
    """Ranges of consecutive keys with enough tokens each; the rest joins the last range.

    Args:
        alone: whether a single range is a useful slice, because there are other tokens.
    """
    spans: list[tuple[int, int]] = []
    low, held = min(counts, default=0), 0
    last = max(counts, default=0)
    for key in range(low, last + 1):
        held += counts[key]
        if held >= needed:
            spans.append((low, key))
            low, held = key + 1, 0
    if held and spans:
        spans[-1] = (spans[-1][0], last)
    if len(spans) == 1 and not alone:
        return []  # identical to the whole
    # later steps may have larger values than the head
    return [*spans[:-1], (spans[-1][0], max(spans[-1][1], open_at))] if spans else []


def _span(span: tuple[int, int], last: int) -> str:
    """
    >>> _span((2, 2), 4), _span((2, 3), 4), _span((3, 4), 4)
    ('2', '2-to-3', '3-on')
    """
    low, high = span
    if high >= last:
        return f"{low}-on"
    return f"{low}" if low == high else f"{low}-to-{high}"


def _edges(edges: Sequence[int], counts: Counter[int], needed: int) -> tuple[float, ...]:
    """Edges with enough tokens in every bucket."""
    bounds: list[float] = []
    below = 0
    for i, edge in enumerate(edges):
        below += counts[i]
        above = sum(counts[j] for j in range(i + 1, len(edges) + 1))
        if below >= needed and above >= needed:
            bounds.append(float(edge))
            below = 0
    return tuple(bounds)


# The contract of a run, and the clauses that a step can judge.
#
# A contract is completed like that of a dump: both kernels run in a trainer, its claim is realised,
# and without slices it gets those for which the first step has enough tokens.


@dataclass(frozen=True)
class RunContract:
    """The user's contract before the first step.

    Args:
        preset: its name; "" for a user's contract.
        contract: the contract without automatic slices.
    """

    preset: str
    contract: Contract

    @classmethod
    def of(
        cls,
        given: str | Path | Contract,
        *,
        bitwise: bool = False,
        reference: str | Path | None = None,
    ) -> RunContract:
        """From a contract, the path of one, or the name of a trainer preset.

        Args:
            bitwise: whether both kernels are declared to compute the same bits.
            reference: of good runs, for the contract's trend.

        Raises:
            ContractError: no such preset or file, or an invalid contract.
        """
        own = cls._of(given, bitwise)
        return replace(own, contract=with_reference(own.contract, reference))

    @classmethod
    def _of(cls, given: str | Path | Contract, bitwise: bool) -> RunContract:
        if isinstance(given, str | Path):
            name = str(given)
            if name in PRESETS or (Path(name).name == name and not Path(name).suffix):
                preset = preset_of(name)
                return cls(preset, contract_of(preset, preset, (), bitwise=bitwise)[1])
            given = load.load(given)
        if not isinstance(given, Contract):
            raise ContractError(
                f"the contract of a monitor is a {type(given).__name__}",
                hint="pass a Contract, the path of one, or a preset's name, such as 'verl-sync'",
            )
        contract = _in_a_trainer(given)
        return cls("", contract.model_copy(update={"bitwise": True}) if bitwise else contract)

    @property
    def slices_itself(self) -> bool:
        """Whether the monitor chooses the slices."""
        return bool(self.preset) or not self.contract.slices

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of sequences that slices may use."""
        if self.slices_itself:
            return SLICED
        fields = {f for rule in self.contract.slices for f in (*(rule.match or {}), rule.split)}
        return tuple(sorted(f.removeprefix(LABEL) for f in fields if f and f.startswith(LABEL)))

    @property
    def split_labels(self) -> tuple[str, ...]:
        """Labels that get a slice per value."""
        if self.slices_itself:
            return SLICED
        splits = (rule.split or "" for rule in self.contract.slices)
        return tuple(f.removeprefix(LABEL) for f in splits if f.startswith(LABEL))

    def unsliced(
        self, labels: Mapping[str, Sequence[str]], first: Sequence[Labels]
    ) -> tuple[str, ...]:
        """A note about label values that first occur after the slices were fixed.

        Args:
            first: labels of the first step.
        """
        notes = []
        for name in self.split_labels:
            known = {value for own in first for field, value in own if field == name}
            new = [v for v in dict.fromkeys(labels.get(name, ())) if v and v not in known]
            if new:
                more = f" and {len(new) - 3} more values" if len(new) > 3 else ""
                what = f"{', '.join(map(repr, new[:3]))}{more} of label {name!r}"
                notes.append(f"{what} first occurred after the first step, so it has no slice")
        return tuple(notes)

    def slices(self, counts: Counts) -> tuple[int, tuple[SliceRule, ...], tuple[str, ...]]:
        """The window of a run and its slices, from its first step, and why others are omitted."""
        if not self.slices_itself:
            return MOST_STEPS, self.contract.slices, ()
        return run_slices(counts, needed(self.preset or "verl-sync"), 1)

    def complete(self, rules: Sequence[SliceRule]) -> Contract:
        """The contract with its slices."""
        if self.preset:
            declared = self.contract.bitwise
            made = contract_of(self.preset, self.preset, rules, bitwise=declared)[1]
            return made.model_copy(update={"trend": self.contract.trend})
        return self.contract.model_copy(update={"slices": tuple(rules)})


def _in_a_trainer(contract: Contract) -> Contract:
    """A contract adapted to a trainer's steps."""
    sides = {"train": contract.kernels.train, "infer": contract.kernels.infer}
    kernels = {
        side: k if k.engine == EXTERNAL else Kernel(engine=EXTERNAL, title=str(k))  # type: ignore[call-arg]
        for side, k in sides.items()
    }
    # the parts of a preset's contract other than clauses fit any contract
    frame = contract_of("verl-sync", "frame", ())[1]
    neither = {"workload": None, "claim": None}
    return contract.model_copy(
        update={
            "kernels": contract.kernels.model_copy(update=kernels),
            "stable": None,
            "weights": frame.weights,
            "workload": frame.workload,
            "workloads": None,
            "claim": frame.claim,
            "promotion": frame.promotion,
            "statistical": tuple(c.model_copy(update=neither) for c in contract.statistical),
            "observability": contract.observability.model_copy(
                update={
                    "clauses": tuple(
                        c.model_copy(update=neither) for c in contract.observability.clauses
                    )
                }
            ),
        }
    )


def plan_of(contract: Contract, labels: Sequence[Labels]) -> Plan:
    """The plan of a run, fixed at its first step.

    Args:
        labels: labels of the first step's sequences.

    Raises:
        ContractError: a slice needs a label that the first step lacks.
    """
    corpus = corpus_of("the first step", labels)
    plan = planning.make_plan(contract, {WORKLOAD: corpus}, None)
    return replace(plan, cells=tuple(map(_in_a_step, plan.cells)))


def _in_a_step(cell: Cell) -> Cell:
    """A cell as a step judges it."""
    if cell.clause.metric == DRAFT_ACCEPTANCE:  # counted beside the tokens of the step
        return replace(cell, kind=DraftAcceptance(), workload=WORKLOAD)
    return replace(cell, kind=_kind(cell))


def _kind(cell: Cell) -> Kind:
    """The kind of a cell for a step's log ratios; a reason if they do not suffice."""
    kind = cell.kind
    if not kind.applies:
        return kind
    reason = kind.not_in_a_step(cell.clause)
    if not reason:
        fields = sorted(f for f in cell.cut.fields if not (f in STEP_FIELDS or f.startswith(LABEL)))
        reason = f"a training step has no {', '.join(fields)}" if fields else ""
    return NotHere(reason, bool(cell.clause.required)) if reason else kind


def labels_of(
    batch_labels: Mapping[str, Sequence[str]], names: Sequence[str]
) -> tuple[Labels, ...]:
    """The combinations of some labels, in order of first occurrence."""
    named = [name for name in names if name in batch_labels]
    rows = zip(*(batch_labels[name] for name in named), strict=True) if named else [()]
    labels = (tuple((n, v) for n, v in zip(named, row, strict=True) if v) for row in rows)
    return tuple(dict.fromkeys(labels))
