# The cost and the power of a run, before it starts.
#
# Arithmetic on a plan: the seed determines the prompts.  A probe measures the lengths of responses
# and the speed of the kernels.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from servanda.judgement.clauses.base import DRAWS, Cell
from servanda.judgement.plan import Plan
from servanda.judgement.schedule import NOISE_STRIDE, Schedule
from servanda.theory.stats.reachable import reach
from servanda.traces.corpus import Corpus

CHARACTERS_A_TOKEN = 4  # of plain text, without a tokenizer


@dataclass(frozen=True)
class Probe:
    """A few sequences, timed.

    Args:
        sequences: number of sequences.
        lengths: new tokens of each sequence.
        seconds: kernel -> time to sample them ("infer", "stable") or to score them ("train",
            "format");
            "train_draws": for train to sample them too, if rewards are compared.
        memory_bytes: kernel -> peak memory of its process; absent if unknown.
        disk_bytes: size of their traces.
    """

    sequences: int
    lengths: tuple[int, ...]
    seconds: Mapping[str, float]
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    disk_bytes: int = 0


@dataclass(frozen=True)
class Decides:
    """The expected decisions of one cell by the end of the run, in units of the metric.

    `holds` and `violated` are for the worst case, every token of a prompt group at 0 or at
    the top of the metric; the `_even` ones for tokens that all equal the mean.  `fill`: the share
    of its room that a prompt group fills.
    """

    clause: str
    slice: str
    units: str
    n: int
    limit: float
    threshold: float | None
    holds: float | None
    violated: float | None
    holds_even: float | None
    violated_even: float | None
    fill: float = 1.0


@dataclass(frozen=True)
class Cost:
    """The largest cost of a run; it ends sooner once all is decided.

    Args:
        groups, sequences: number dispatched at most; `expected`: sequences until all is decided,
            if the kernels are within half of every limit and all their tokens alike.
        prompt_tokens: of all sequences; `exact`: whether they were tokenised.
        new_tokens: sampled tokens: the maximum, and the estimate of the probe.
        seconds, memory_bytes, disk_bytes: None without a probe.
    """

    groups: int
    sequences: int
    expected: int
    prompt_tokens: int
    exact: bool
    new_tokens_at_most: int
    new_tokens: int | None
    seconds: float | None
    memory_bytes: Mapping[str, int]
    disk_bytes: int | None
    probed: int
    decides: tuple[Decides, ...]


Lengths = Mapping[str, Sequence[int]]


def estimated_lengths(corpus: Corpus) -> list[int]:
    """Tokens of each prompt, estimated from characters for text."""
    return [
        len(p.token_ids) if p.token_ids is not None else -(-len(p.text) // CHARACTERS_A_TOKEN)
        for p in corpus.prompts
    ]


def cost_of(plan: Plan, lengths: Lengths | None = None, probe: Probe | None = None) -> Cost:
    """The cost of a plan at its full size.

    Args:
        lengths: workload -> tokens of each prompt; None: estimated from characters.
        probe: a probe of the first workload.
    """
    prompt_lengths = {
        s.name: (lengths or {}).get(s.name) or estimated_lengths(s.corpus) for s in plan.schedules
    }
    prompt_tokens = sequences = width = 0
    for schedule in plan.schedules:
        rows = [u.row for i in range(schedule.rounds) for u in schedule.units(i)]
        prompt_tokens += sum(prompt_lengths[schedule.name][row] for row in rows)
        sequences += len(rows)
        width += len(rows) * schedule.width
    schedules = {s.name: s for s in plan.schedules}
    decides = tuple(
        _at_size(plan, c, *_expected(c, schedules[c.workload], prompt_lengths[c.workload], probe))
        for c in plan.cells
        if c.kind.certificate and c.workload
    )
    return Cost(
        groups=sum(s.rounds * s.workload.round for s in plan.schedules),
        sequences=sequences,
        expected=min(sequences, _until_decided(plan, decides)),
        prompt_tokens=prompt_tokens,
        exact=lengths is not None,
        new_tokens_at_most=width,
        new_tokens=None if probe is None else round(sequences * _mean(probe.lengths)),
        seconds=None if probe is None else sequences * _seconds_each(probe),
        memory_bytes={} if probe is None else probe.memory_bytes,
        disk_bytes=None if probe is None else sequences * probe.disk_bytes // probe.sequences,
        probed=0 if probe is None else probe.sequences,
        decides=decides,
    )


_HALF = 2  # times the units of identical kernels: what a mean of half the limit needs


def _until_decided(plan: Plan, decides: Sequence[Decides]) -> int:
    """Sequences until every enforced cell holds at half of its limit."""
    sequences, of = 0, {(d.clause, d.slice): d for d in decides}
    for schedule in plan.schedules:
        share = schedule.first / schedule.last
        for cell in plan.cells:
            decided = of.get((cell.clause.id, cell.cut.name))
            best = cell.kind.units_at_best(plan.alpha)
            if cell.workload == schedule.name and cell.clause.enforced and decided and best:
                share = max(share, _HALF * best / max(decided.n, 1))
        rounds = math.ceil(min(share, 1.0) * schedule.rounds)
        sequences += sum(len(schedule.units(i)) for i in range(rounds))
    return sequences


def _seconds_each(probe: Probe) -> float:
    """Seconds per sequence: the kernels run in parallel, so the slower one counts."""
    seconds = dict(probe.seconds)
    again = 1 + 1 / NOISE_STRIDE  # the 10 % that are scored again
    # train also scores the stable kernel's samples
    scored = 2 if "stable" in seconds else 1
    train = seconds.pop("train", 0.0) * (scored + 1 / NOISE_STRIDE)
    train += seconds.pop(DRAWS, 0.0)
    return max([train, *(again * s for s in seconds.values())]) / probe.sequences


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def power_curve(plan: Plan, decided: Decides, sizes: Sequence[int]) -> tuple[Decides, ...]:
    """What a cell would decide with other numbers of units."""
    cell = next(
        c for c in plan.cells if (c.clause.id, c.cut.name) == (decided.clause, decided.slice)
    )
    return tuple(_at_size(plan, cell, n, decided.fill) for n in sizes)


def _at_size(plan: Plan, cell: Cell, n: int, fill: float) -> Decides:
    assert cell.kind.certificate
    feed = cell.kind.certificate.feed
    reachable = reach(
        n, feed.limit, alpha=plan.alpha, cells=plan.price_cells, fill=fill, best=feed.best
    )

    def in_unit(x: float | None) -> float | None:
        return None if x is None else feed.value(x)

    return Decides(
        clause=cell.clause.id,
        slice=cell.cut.name,
        units=cell.units_of(cell.kind.each),
        n=n,
        limit=feed.value(feed.limit),
        threshold=feed.threshold,
        holds=in_unit(reachable.holds) if feed.proves else None,
        violated=in_unit(reachable.violated),
        holds_even=in_unit(reachable.holds_even) if feed.proves else None,
        violated_even=in_unit(reachable.violated_even),
        fill=fill,
    )


def _expected(
    cell: Cell, schedule: Schedule, lengths: Sequence[int], probe: Probe | None
) -> tuple[int, float]:
    """Expected units of a cell at the end of the run, and the fill of a group.

    Contexts that depend on the run (entropy, p_max) count as always met.
    """
    groups, prompts = schedule.corpus.groups, schedule.corpus.prompts
    rows = [
        [row for row in group if cell.cut.may_meet(prompts[row], lengths[row])] for group in groups
    ]
    meeting = [group for group in rows if group]
    answers = probe.lengths if probe is not None and probe.lengths else (schedule.width,)
    inside = [cell.cut.positions(length) if length else 0 for length in answers]
    reached = sum(count > 0 for count in inside) / len(inside)
    launched = schedule.rounds * schedule.workload.round
    samples = schedule.workload.samples
    share = len(meeting) / len(groups)
    sequences = _mean([len(group) for group in meeting]) * samples
    if cell.kind.each == "sequence":
        if cell.claim == "realised":
            return int(launched * share * sequences), 1.0
        return int(launched * share), sequences / cell.capacity if cell.capacity else 1.0
    tokens = sequences * _mean(inside)  # of a meeting group
    if cell.claim == "realised":
        return int(launched * share * tokens), 1.0
    if not reached or not cell.capacity:
        return 0, 1.0
    # a group of several responses meets the slice if one of them does
    several = samples * max((len(group) for group in meeting), default=1) > 1
    reached = 1.0 if several else reached
    return int(launched * share * reached), min(tokens / reached / cell.capacity, 1.0)
