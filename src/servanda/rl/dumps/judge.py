# A dump's verdict: the dump is found, its limits are chosen, it is read once and judged.

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from servanda.contract.model import WHOLE
from servanda.errors import MeasurementError
from servanda.judgement.breakdown import (
    Advice,
    Breakdown,
    RuleRow,
    SliceAdvice,
    StepPoint,
    StepRow,
    StepSeries,
)
from servanda.judgement.clauses.base import CellVerdict, worst
from servanda.judgement.clauses.statistical import Feed
from servanda.judgement.clauses.whole_responses import OUTLIERS
from servanda.judgement.field_rules import RuleSums, rows
from servanda.judgement.plan import Plan
from servanda.judgement.slices.atoms import atoms_of
from servanda.judgement.slices.rules import Cut
from servanda.judgement.verdict import (
    BlindSpot,
    Circumstances,
    Verdict,
    judge,
    outcome_of,
    refuted,
    unsound,
)
from servanda.report.breakdown import removed_line, rule_lines
from servanda.report.cell_text import excess
from servanda.report.format import count
from servanda.rl.dumps import workers
from servanda.rl.dumps.checks import Finding, Soundness, errors_of, of_step
from servanda.rl.dumps.formats import Dump, Refused, open_dump
from servanda.rl.dumps.statistics import (
    DataLine,
    DumpStatistics,
    Measures,
    PairFields,
    StepPart,
    data_lines,
    sides,
    tv_limit,
)
from servanda.rl.dumps.workers import StepResult
from servanda.rl.steps import contract as of_run
from servanda.rl.steps.blocks import blocks, paired
from servanda.rl.steps.causes import (
    FirstSequences,
    Match,
    explained,
    findings_of,
    of_tokens,
    pairs_of,
    places,
)
from servanda.rl.steps.contract import HEAD_TOKENS, MOST_STEPS, Counts, rules_of
from servanda.rl.steps.drift import Trend, since
from servanda.rl.steps.format import is_gradient
from servanda.rl.steps.judge import (
    WHOLE_PART,
    StepJudge,
    StepSums,
    bracketed,
    fewest,
    limits_of,
    within,
)
from servanda.rl.trend.changes import RunChart, changed, chart_for, joined
from servanda.runner.measurement import Progress, Watch, unwatched
from servanda.runner.ray_cluster import Cluster
from servanda.theory.stats.interval import interval
from servanda.traces.rollouts import Rollouts

# Masks: the tokens of violated slices, for a trainer to exclude.


def write_masks(chunks: Iterable[Rollouts], cuts: Sequence[Cut], folder: Path) -> int:
    """Write one file per step, step_N.npz, with the tokens in any of the slices (at least one).

    Each has `source` (the place of the sequence), `sequence` (its index in `source`) and
    `token` (its index in the sequence, prompt included), the last two of equal length.

    Returns:
        The number of tokens.

    Raises:
        MeasurementError: a file cannot be written.
    """
    total, step = 0, None
    source: list[str] = []
    sequence: list[np.ndarray] = []
    token: list[np.ndarray] = []

    def flush() -> None:
        if step is None:
            return
        sequence_M, token_M = np.concatenate(sequence), np.concatenate(token)
        with MeasurementError.of_system(f"{folder} cannot be written", hint="name another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(
                folder / f"step_{step}.npz",
                source=np.array(source),
                sequence=sequence_M,
                token=token_M,
            )

    for block in blocks(chunks):
        if block.step != step:
            flush()
            step, source, sequence, token = block.step, [], [], []
        atoms = atoms_of(cuts, PairFields(paired(block, 0)))
        inside_K = np.any(atoms.inside_CA[:, atoms.atom], axis=0)
        at_N = np.flatnonzero(block.mask_N.astype(bool))[inside_K]
        of_N = block.sequence_N[at_N]
        sequence.append(of_N + len(source))
        token.append(at_N - block.start_S[of_N])
        source += block.source_S
        total += len(at_N)
    flush()
    return total


# The verdicts on each training step, and those that join the whole verdict.

SHOWN = 6  # most cells of single steps in a verdict
_SERIES = 4  # most cells with a series over steps: the whole, and the worst slices
_REASONS = 3  # most steps with unsound data that are listed


@dataclass
class JudgedSteps:
    """Judges each step of a dump.

    Args:
        alone: whether the dump has one step, whose data is checked as that of the dump.
        chart: its steps against good runs; None: not asked.
    """

    judge: StepJudge
    alone: bool = False
    chart: RunChart | None = None
    rows: list[StepRow] = field(default_factory=list)
    red: list[CellVerdict] = field(default_factory=list)
    trend: dict[str, CellVerdict] = field(default_factory=dict)  # metric -> first change, or last
    unsound: dict[int, str] = field(default_factory=dict)  # step -> why it cannot be evidence
    rules: list[tuple[int, RuleSums]] = field(default_factory=list)  # of each step
    _processes: dict[int, list[tuple[int, Any]]] = field(default_factory=dict)

    def add(self, part: StepPart, sound: Soundness, before: Soundness) -> None:
        """Judge the next step.

        Args:
            sound: its data quality checks; before: those of the earlier steps.
        """
        plan, errors = self.judge.plan, ()
        if not self.alone:
            own = sides(plan.contract, part.weighed.agreement)
            errors = errors_of(map(of_step, (*sound.findings_after(before), *own)))
        sums = StepSums(part.step, part.weighed, part.drawn)
        judged = self.judge.add(sums, errors)
        if judged.errors and not self.alone:
            self.unsound[part.step] = judged.errors[0]
        if self.chart is not None:
            values = {} if judged.errors else part.scalars.values
            for cell in self.chart.add(part.step, values):
                known = self.trend.get(cell.metric)
                if known is None or known.outcome != "violated":  # the first change stays
                    red = cell.outcome == "violated"
                    self.trend[cell.metric] = cell.but(steps=(part.step,) * 2) if red else cell
        self.rules.append((part.step, part.rules))
        violated = []
        for i, (planned, cell) in enumerate(zip(plan.cells, judged.quick.cells, strict=True)):
            certificate, statistic = planned.kind.certificate, part.weighed.statistics[i]
            if cell.enforced and certificate is not None and is_gradient(cell):
                self._processes.setdefault(i, []).append((part.step, statistic.process))
            if not cell.enforced or cell.outcome != "violated":
                continue
            violated.append(f"{cell.clause}[{cell.slice}]")
            if cell.steps is None:
                cell = cell.but(steps=(part.step, part.step))
                if certificate is not None:
                    ends = _interval(certificate.feed, statistic.process, plan.alpha)
                    cell = cell.but(interval=ends)
            self.red.append(cell)
        pooled = (c.steps[0] for c in judged.quick.cells if c.slice == WHOLE and c.steps)
        means = map(part.portrait.total.mean, ("tv", "abs_log_ratio", "exp_abs", "k3"))
        tv, gap, tme, k3 = (x if x is not None and math.isfinite(x) else None for x in means)
        self.rows.append(
            StepRow(
                part.step,
                judged.quick.outcome,
                part.sequences,
                part.trained,
                tv,
                gap,
                tme,
                k3,
                tuple(violated),
                next(pooled, None),
            )
        )

    def series(self, plan: Plan, verdict: Verdict) -> tuple[StepSeries, ...]:
        """The series of the whole and its worst slices over the steps; empty for one step."""
        if len(self.rows) < 2:
            return ()
        kept = [(i, verdict.cells[i]) for i in self._processes]
        kept.sort(key=lambda pair: (pair[1].slice != WHOLE, -excess(pair[1])))
        return tuple(self._series(plan, i, cell) for i, cell in kept[:_SERIES])

    def _series(self, plan: Plan, i: int, cell: CellVerdict) -> StepSeries:
        certificate, points = plan.cells[i].kind.certificate, []
        assert certificate is not None
        feed = certificate.feed
        for step, process in self._processes[i]:
            n = int(process.known)
            ends = _interval(feed, process, plan.alpha) if n else (None, None)
            mean = feed.value(process.total / process.known) if n else None
            points.append(StepPoint(step, n, mean, *ends))
        limit = feed.value(feed.limit)
        first = since([(point.step, point.mean) for point in points], limit)
        return StepSeries(
            cell.clause, cell.metric, cell.slice, limit, 1 - plan.alpha, first, tuple(points)
        )

    @property
    def violated(self) -> list[int]:
        return [row.step for row in self.rows if row.outcome == "violated"]

    def lines(self) -> tuple[DataLine, ...]:
        """Steps with unsound data, which the whole dump may hide."""
        if len(self.rows) < 2:
            return ()
        lines = [DataLine("error", f"step {n}: {why}") for n, why in self.unsound.items()]
        more = len(lines) - _REASONS
        if more > 0:
            lines[_REASONS:] = [
                DataLine("error", f"{count(more, 'more step')} whose data is not sound")
            ]
        return tuple(lines)

    def joined(self, verdict: Verdict) -> Verdict:
        """The verdict on the whole, violated if any step is.

        Adds the worst violated cells of steps for clauses and slices that are not violated on the
        whole.  A dump of one step is unchanged.
        """
        if len(self.rows) < 2:
            return verdict
        verdict = joined(verdict, [*self.trend.values()])
        known = {(c.clause, c.slice) for c in verdict.cells if c.outcome == "violated"}
        fresh = [c for c in self.red if (c.clause, c.slice) not in known]
        # without slices of steps that are violated as a whole
        whole = {c.steps for c in fresh if c.slice == WHOLE}
        best: dict[tuple[tuple[int, int] | None, str], CellVerdict] = {}
        for cell in fresh:
            key = (cell.steps, cell.clause if cell.slice == WHOLE else "")
            beside = cell.slice != WHOLE and cell.steps in whole
            if not beside and (key not in best or excess(cell) > excess(best[key])):
                best[key] = cell
        shown = sorted(best.values(), key=lambda c: -excess(c))[:SHOWN]
        outcome = worst([verdict.outcome, "violated"]) if self.red else verdict.outcome
        return replace(verdict, outcome=outcome, cells=(*verdict.cells, *shown))


def _interval(feed: Feed, process: Any, alpha: float) -> tuple[float, float]:
    """The interval of a step alone, at the confidence of one look."""
    low, high = interval(process, alpha, feed.limit, feed.best)
    return feed.value(low), feed.value(high)


# The likely cause, from a sample of the steps that is read once more.

SAMPLE_TOKENS = 400_000  # trained tokens of the sample
_STEPS = 32  # most steps of the sample


def explain_dump(
    dump: Dump,
    limit: float,
    problems: Mapping[str, str],
    place: str,
    update_tokens: int,
    red: Collection[int] = (),
    violated: Sequence[Match] = (),
) -> Advice | None:
    """The likely cause of a dump's gap, and what to do; None without a usable token.

    Args: those of `explained`.
        red: violated steps, which are in the sample before others.
    """
    spread = np.linspace(0, len(dump.steps) - 1, min(_STEPS, len(dump.steps))).round().astype(int)
    # evenly spread, with the first and the last
    kept = {dump.steps[i] for i in spread} | {*[s for s in dump.steps if s in red][:_STEPS]}
    steps = [step for step in dump.steps if step in kept]
    read = _sample(dump, steps, SAMPLE_TOKENS // max(len(steps), 1))
    return explained(pairs_of(read), limit, problems, place, update_tokens, violated)


def _sample(dump: Dump, steps: Sequence[int], each: int) -> Iterator[Rollouts]:
    step, first = None, FirstSequences(each)
    for block in blocks(dump.of(steps).read()):
        if block.step != step:
            yield from first.parts
            step, first = block.step, FirstSequences(each)
        first.add(block)
    yield from first.parts


_MB = 1_000_000


@dataclass(frozen=True)
class DumpOptions:
    """The options for judging a dump.

    Args:
        format, preset: None: detected.
        contract: file of the limits and slices that are used instead of a preset's.
        steps: (first, last) step of the trainer; None: from the beginning, to the end.
        mask: folder for the tokens of violated slices.
        bitwise: whether the trainer and the engine compute the same bits.
        reference: of good runs, which the steps are compared with.
        jobs: number of processes; None: as many as the size of the dump is worth.
        cluster: whose nodes read the steps, instead of processes.
    """

    path: Path
    format: str | None = None
    preset: str | None = None
    contract: Path | None = None
    steps: tuple[int | None, int | None] = (None, None)
    unsafe_pickles: bool = False
    mask: Path | None = None
    bitwise: bool = False
    jobs: int | None = 1
    cluster: Cluster | None = None
    reference: Path | None = None


@dataclass(frozen=True)
class DumpVerdict:
    """The verdict on a dump, with further numbers for the report.

    Args:
        preset: name of the preset, or the file of the requested contract.
        why: the reason for it.
        contract_text: text of the contract.
        lines: findings about the data, worst first.
        since: name of a cell -> first step after which it always exceeds its limit.
        out: the violated slices to exclude; the others are violated by shared tokens.
        share: share of tokens in those; left: mean (1 - w)^+ of all others.
        partly: whether slices were chosen from the first tokens only.
        masked: number of tokens in `options.mask`; None if not written.
        mean_weight: mean of w = p_train / p_infer over trained tokens; None if unknown.
        chart: its steps against good runs; None: not asked.
        ageless: whether all steps have one version of the weights, so that their age is unknown.
    """

    options: DumpOptions
    dump: Dump
    preset: str
    why: str
    contract_text: str
    verdict: Verdict
    statistics: DumpStatistics
    lines: tuple[DataLine, ...]
    since: dict[str, int]
    trend: Trend | None
    out: tuple[str, ...]
    share: float
    left: float | None
    partly: bool
    notes: tuple[str, ...]
    seconds: float
    masked: int | None = None
    mean_weight: float | None = None
    chart: RunChart | None = None
    ageless: bool = False


def judge_dump(options: DumpOptions, watch: Watch | None = None) -> DumpVerdict:
    """Read a dump once and judge it.

    Raises:
        ContractError: no dump, or no such preset or format.
        EvidenceError: no usable sequence.
        MeasurementError: a file cannot be read, or no step is in the requested range.
    """
    began, watch = time.monotonic(), watch or unwatched
    if options.preset is not None:
        of_run.preset_of(options.preset)
    own = None if options.contract is None else of_run.of_a_trainer(options.contract)
    chart = chart_for(options.reference, own and own[1])
    dump = selected_dump(options)
    dump.refuse_alone()
    sound = Soundness()
    head, whole = _head(blocks(dump.read()))
    counts = Counts()
    for block in head:
        counts.add(paired(block, 0))
    notes: tuple[str, ...] = ()
    if own is not None:
        preset, why = str(options.contract), "as asked"
        text, contract = own
        window = MOST_STEPS  # the sizes of its slices are unknown
    else:
        preset, why = of_run.chosen(options.preset, dump.about, counts)
        needed = of_run.needed(preset)
        rules, notes = rules_of(counts, needed)
        name = of_run.contract_name(options.path)
        text, contract = of_run.contract_of(
            preset, name, rules, filtered=True, bitwise=options.bitwise
        )
        window = of_run.window_of(needed, len({b.step for b in head}), counts.turns.total())
    statistics = DumpStatistics(contract, str(options.path))
    for block in head:
        statistics.add_labels(paired(block, 0))
    measures = statistics.measures
    by_step = JudgedSteps(StepJudge(measures.plan, window), len(dump.steps) < 2, chart)
    results = _results(options, dump, measures, head if whole else [])
    del head
    for result in _watched(results, dump, watch):
        if result.part is not None:
            by_step.add(result.part, result.sound, sound)
            statistics.join(result.part)
        sound.join(result.sound)
        dump.join(result.read)
    dump.settle()
    plan, evidence = statistics.evidence()
    part = WHOLE_PART if len(by_step.rows) > 1 else 1.0  # a dump of one step has only the whole
    verdict = judge(plan, evidence, part=part)
    if (drawn := statistics.before_filter(evidence)) is not None:
        verdict = bracketed(verdict, judge(plan, drawn, part=part))
    findings = (*sound.findings(), *sides(contract, statistics.agreement))
    lines = data_lines(findings, dump.refused, statistics.sequences, dump.empty, statistics)
    if not any(line.level == "error" for line in lines):  # its steps have the same errors
        lines = (*by_step.lines(), *lines)
    verdict = replace(
        verdict,
        blind_spots=(*verdict.blind_spots, *(BlindSpot("slice", note) for note in notes)),
        circumstances=Circumstances(
            {"train": dump.about, "infer": dump.about},
            seconds=time.monotonic() - began,
            stopped="size",
            contract_text=text,
        ),
    )
    errors = [line for line in lines if line.level == "error"]
    if errors:
        verdict = unsound(verdict, errors[0].text)
    dated = _since(statistics, verdict)
    coherence = next(f for f in findings if f.check == "coherence")
    cells = tuple(_annotated(cell, dated, coherence) for cell in verdict.cells)
    verdict = replace(verdict, cells=cells)
    limits = limits_of(red_of(verdict))
    outliers = statistics.outliers
    breakdown = Breakdown(
        tuple(by_step.rows),
        outliers.rows(),
        outliers.beyond,
        statistics.removed,
        by_step.series(plan, verdict),
        rows(by_step.rules),
    )
    spots = (*verdict.blind_spots, *_blind_spots(breakdown, findings))
    verdict = replace(verdict, breakdown=breakdown, blind_spots=spots)
    if verdict.outcome != "error":
        verdict = joined(by_step.joined(verdict), refuted(contract, statistics.agreement))
    names = [cut.name for cut in statistics.cuts]
    out = fewest(names, limits, statistics.atoms)
    bits = sum(1 << i for i, name in enumerate(names) if name in out)
    inside, outside = within(statistics.atoms, bits)
    trend = statistics.ends.trend()
    masked = None
    if options.mask is not None and out:
        cuts = [cut for cut in statistics.cuts if cut.name in out]
        masked = write_masks(selected_dump(options).read(), cuts, options.mask)
    beside = _beside(verdict, breakdown.rules)
    if verdict.outcome != "holds" or beside:
        problems = {f.problem or f.check: f.text for f in findings if f.state == "unsound"}
        if verdict.outcome == "error" and not problems:
            problems = {lines[0].problem or "steps": lines[0].text}
        advice = explain_dump(
            selected_dump(options),
            tv_limit(contract),
            problems,
            str(options.path),
            round(statistics.trained / max(len(statistics.steps), 1)),
            by_step.violated,
            places(plan, {c.slice for c in red_of(verdict)}),
        )
        verdict = _doubted(verdict, beside, () if advice is None else advice.slices)
        if verdict.outcome != "holds":
            verdict = replace(verdict, advice=_advice(advice, verdict))
    return DumpVerdict(
        options,
        dump,
        preset,
        why,
        text,
        verdict,
        statistics,
        lines,
        dated,
        trend,
        out,
        inside.n / (inside.n + outside.n) if inside.n else 0.0,
        outside.mean,
        not whole,
        notes,
        time.monotonic() - began,
        masked,
        coherence.numbers.get("mean"),
        chart,
        any(f.check == "lag" and "constant" in f.numbers for f in findings),
    )


def _results(
    options: DumpOptions, dump: Dump, measures: Measures, head: Sequence[Rollouts]
) -> Iterator[StepResult]:
    """The result of each step: of a small dump from memory, of any other read again."""
    if not head:
        dump.refused, dump.empty = Refused(), {}
        jobs = options.jobs or workers.worthwhile(dump)
        yield from workers.results(measures, dump, jobs, options.cluster)
        return
    of_steps = {step: [*of] for step, of in itertools.groupby(head, lambda block: block.step)}
    for number, step in enumerate(dump.steps, 1):
        nothing = Dump(dump.detection)  # the rejected rows are known
        yield workers.of_blocks(measures, of_steps.pop(step, ()), number, nothing)


def _watched(results: Iterable[StepResult], dump: Dump, watch: Watch) -> Iterator[StepResult]:
    done, total = 0, max(dump.bytes // _MB, 1)
    for step, result in zip(dump.steps, results, strict=True):
        yield result
        done += dump.of([step]).bytes
        watch(Progress("reading, MB", done // _MB, total))


def _beside(verdict: Verdict, rules: Sequence[RuleRow]) -> list[RuleRow]:
    """The red rules of others beside a verdict that holds; none if it asks for no far tokens."""
    asked = any(c.metric == OUTLIERS and c.enforced for c in verdict.cells)
    return [row for row in rules if row.red] if asked and verdict.outcome == "holds" else []


def _doubted(verdict: Verdict, red: Sequence[RuleRow], slices: Sequence[SliceAdvice]) -> Verdict:
    """The verdict, inconclusive where a rule of others is above its limit and few have the gap.

    One token or response far off may be noise, or not: the mean of such a rule has no bound.  A
    mean over all tokens dilutes a gap that is in one place, however well it is measured.
    """
    lone = next((row for row in red if row.lone), None)
    if lone is not None:
        note = f"one alone may be noise, or not: {next(rule_lines([lone], verdict))}"
    elif red and slices:
        note = f"the gap is in one place, {slices[0].entry}: {next(rule_lines(red, verdict))}"
    else:
        return verdict
    cells = tuple(
        c.but(outcome="inconclusive", open=True, note=note) if c.metric == OUTLIERS else c
        for c in verdict.cells
    )
    return replace(verdict, cells=cells, outcome=outcome_of(cells))


def _blind_spots(breakdown: Breakdown, findings: Iterable[Finding]) -> Iterator[BlindSpot]:
    """The blind spots: unscored tokens, aborted responses, steps with few tokens."""
    removed, steps = breakdown.removed, breakdown.steps
    if removed is not None and removed.tv is None:
        yield BlindSpot("rows", removed_line(removed))
    for finding in findings:
        if finding.check == "ends" and "untold" in finding.numbers:
            yield BlindSpot("sample", finding.text)
    undecided = sum(row.outcome == "inconclusive" and row.tokens > 0 for row in steps)
    if undecided and len(steps) > 1:
        few = f"{undecided:,} of {len(steps):,} steps are too small to be judged: one of "
        yield BlindSpot("sample", f"{few}them can exceed the limit unnoticed")
    pooled = sum(row.first is not None and row.outcome == "holds" for row in steps)
    if pooled:
        few = f"{pooled:,} of {len(steps):,} steps hold only together with those before them: one "
        yield BlindSpot("sample", f"{few}of them can exceed the limit unnoticed")


def red_of(verdict: Verdict) -> list[CellVerdict]:
    """The cells that make it violated."""
    return [c for c in verdict.cells if c.enforced and c.outcome == "violated"]


def _advice(advice: Advice | None, verdict: Verdict) -> Advice | None:
    """The advice: a cause only where a mean of tokens is beyond its limit, or a check has failed.

    Of a few responses the finding is the cause, and of a change the change.
    """
    advice = advice or Advice("", "")
    unnamed = replace(advice, name="", cause="", slices=(), experiment="", command="", switch="")
    if verdict.outcome == "error":
        return replace(advice, corrections=(), before=None) if advice.cause else None
    red = red_of(verdict)
    if any(map(of_tokens, red)):
        return advice
    if findings := "; ".join(dict.fromkeys(findings_of(red))):
        return replace(unnamed, cause=findings)
    if change := changed(red):
        known = advice.named and advice.cause
        return (
            replace(advice, cause=f"{change}; {advice.cause}")
            if known
            else replace(unnamed, cause=change)
        )
    return unnamed if unnamed.corrections else None


def _since(statistics: DumpStatistics, verdict: Verdict) -> dict[str, int]:
    plan, _ = statistics.evidence()
    dated: dict[str, int] = {}
    for i, (cell, judged) in enumerate(zip(plan.cells, verdict.cells, strict=True)):
        certificate = cell.kind.certificate
        if judged.outcome == "violated" and certificate is not None:
            means = [(s.step, s.mean(i)) for s in statistics.steps.values()]
            step = since(means, certificate.feed.limit)
            if step is not None:
                dated[cell.name] = step
    return dated


def _annotated(cell: CellVerdict, dated: Mapping[str, int], coherence: Finding) -> CellVerdict:
    """Add the first step and the mean weight to the verdict, for all reports."""
    if cell.metric == "coherence" and cell.outcome in ("holds", "violated"):
        below = coherence.state == "ok" or "never" in coherence.numbers
        outcome = "holds" if below else "violated"
        mean = coherence.numbers.get("mean")
        return cell.but(outcome=outcome, value=mean, note=coherence.text)
    step = dated.get(f"{cell.clause}[{cell.slice}]")
    return cell if step is None else cell.but(note=f"since step {step}")


def selected_dump(options: DumpOptions) -> Dump:
    """The dump, restricted to the requested steps and to finished ones."""
    dump = open_dump(options.path, options.format, unsafe_pickles=options.unsafe_pickles)
    first, last = options.steps
    low, high = -math.inf if first is None else first, math.inf if last is None else last
    wanted = dump.of(step for step in dump.steps if low <= step <= high)
    if not wanted.steps:
        ends = [str(end) if end is not None else "" for end in options.steps]
        raise MeasurementError(
            f"no step of {options.path} lies in {':'.join(ends)}",
            hint=f"its steps are {min(dump.steps)} to {max(dump.steps)}",
        )
    return wanted.finished()


def _head(read: Iterable[Rollouts]) -> tuple[list[Rollouts], bool]:
    """The first HEAD_TOKENS tokens, and whether these are all."""
    head, tokens = [], 0
    for block in read:
        head.append(block)
        tokens += len(block.token_N)
        if tokens >= HEAD_TOKENS:
            return head, False
    return head, True
