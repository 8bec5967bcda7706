# Judging a dump: found, preset, read once, judged.

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from servanda.contract.model import WHOLE
from servanda.errors import MeasurementError
from servanda.judgement.breakdown import Breakdown
from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.clauses.statistical import Certificate
from servanda.judgement.verdict import BlindSpot, Circumstances, Verdict, judge, unsound
from servanda.report.breakdown import removed_line
from servanda.rl.dumps import diagnosis
from servanda.rl.dumps import preset as dump_preset
from servanda.rl.dumps.blocks import blocks, paired
from servanda.rl.dumps.checks import Finding, Soundness
from servanda.rl.dumps.filters import bracketed
from servanda.rl.dumps.formats import Dump, open_dump
from servanda.rl.dumps.masks import write_masks
from servanda.rl.dumps.slicing import HEAD_TOKENS, Counts, rules_of
from servanda.rl.dumps.soundness import Told, sides
from servanda.rl.dumps.soundness import told as told_of
from servanda.rl.dumps.statistics import Weighing
from servanda.rl.dumps.step_verdicts import JudgedSteps, is_step
from servanda.rl.dumps.steps import Trend, concentration, since, trend
from servanda.rl.dumps.window import Window, window_of
from servanda.runner.measurement import Progress, Watch, unwatched
from servanda.traces.rollouts import Rollouts

_MB = 1_000_000


@dataclass(frozen=True)
class Asked:
    """What a user asks of a dump.

    Args:
        format, preset: None: guessed.
        steps: (first, last) of the trainer; None: from the beginning, to the end.
        mask: folder for the tokens of red slices.
        bitwise: whether the trainer and the engine compute the same bits.
    """

    path: Path
    format: str | None = None
    preset: str | None = None
    steps: tuple[int | None, int | None] = (None, None)
    unsafe_pickles: bool = False
    mask: Path | None = None
    bitwise: bool = False


@dataclass(frozen=True)
class Answer:
    """The verdict of a dump, and what is told beside it.

    Args:
        why: the preset was chosen.
        contract_text: for keeping.
        told: of the data, worst first.
        since: name of a cell -> first step from which on it is beyond its limit.
        out: the red slices to leave out; the others are red for the tokens they share with them.
        share: of the tokens that lie in those; left: mean (1 - w)^+ of all others.
        partly: whether slices were chosen from the first tokens alone.
        masked: tokens named in `asked.mask`; None where nothing was written.
        mean_weight: of all trained tokens, w = p_train / p_infer; None where it is not known.
    """

    asked: Asked
    dump: Dump
    preset: str
    why: str
    contract_text: str
    verdict: Verdict
    weighing: Weighing
    told: tuple[Told, ...]
    since: dict[str, int]
    trend: Trend | None
    cause: str
    out: tuple[str, ...]
    share: float
    left: float | None
    partly: bool
    notes: tuple[str, ...]
    seconds: float
    masked: int | None = None
    mean_weight: float | None = None


def judge_dump(asked: Asked, watch: Watch | None = None) -> Answer:
    """Read a dump once and judge it.

    Raises:
        ContractError: no dump there, or no such preset or format.
        EvidenceError: no sequence that can be used.
        MeasurementError: a file cannot be read, or no step lies in the asked range.
    """
    began, watch = time.monotonic(), watch or unwatched
    if asked.preset is not None:
        dump_preset.preset_of(asked.preset)
    dump = _opened(asked)
    sound = Soundness()
    read = blocks(_read(dump, watch))
    head, whole = _head(read)
    counts = Counts()
    for block in head:
        counts.add(paired(block, 0))
    stale = any(n for age, n in counts.staleness.items() if age)
    preset, why = (asked.preset, "as asked") if asked.preset else ("", "")
    if not preset:
        framework = dump.about.get("framework", "")
        preset, why = dump_preset.guessed(dump.format, framework, stale=stale)
    rules, notes = rules_of(counts, dump_preset.needed(preset))
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", asked.path.resolve().name).strip("-._") or "dump"
    text, contract = dump_preset.contract_of(
        preset, name[:60], rules, filtered=True, bitwise=asked.bitwise
    )
    weighing = Weighing(contract, str(asked.path))
    for block in head:
        weighing.meet(paired(block, 0))
    trained = counts.turns.total()
    window = window_of(dump_preset.needed(preset), len({b.step for b in head}), trained)
    by_step = JudgedSteps(Window(window), alone=len(dump.steps) < 2)
    current = head[0].step if head else None
    for block in itertools.chain(head, read):
        if block.step != current:
            by_step.close(weighing)
            current = block.step
        sound.add(block)
        by_step.add(block)
        weighing.add(block)
    by_step.close(weighing)
    plan, evidence = weighing.evidence()
    verdict = judge(plan, evidence)
    if (drawn := weighing.before_filter(evidence)) is not None:
        verdict = bracketed(verdict, judge(plan, drawn))
    findings = (*sound.findings(), *sides(contract, weighing.agreement))
    told = told_of(findings, dump.refused, weighing.sequences, dump.empty, weighing)
    if not any(line.level == "error" for line in told):  # what all of it shows, its steps do too
        told = (*by_step.told(), *told)
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
    errors = [t for t in told if t.level == "error"]
    if errors:
        verdict = unsound(verdict, errors[0].text)
    dated = _since(weighing, verdict)
    coherence = next(f for f in findings if f.check == "coherence")
    noted = (_noted(c, dated) for c in verdict.cells)
    verdict = replace(verdict, cells=tuple(_as_found(c, coherence) for c in noted))
    limits = _limits(verdict)
    found = Breakdown(
        tuple(by_step.rows), weighing.outliers.rows(), weighing.outliers.beyond, weighing.removed
    )
    spots = verdict.blind_spots
    if found.removed is not None and found.removed.tv is None:
        spots = (*spots, BlindSpot("rows", removed_line(found.removed)))
    for finding in findings:
        if finding.check == "ends" and "untold" in finding.numbers:
            spots = (*spots, BlindSpot("sample", finding.text))
    open_ = sum(row.outcome == "inconclusive" and row.tokens > 0 for row in found.steps)
    if open_ and len(found.steps) > 1:
        few = f"{open_:,} of {len(found.steps):,} steps are too small to be judged alone: one of "
        spots = (*spots, BlindSpot("sample", f"{few}them can be beyond the limit unseen"))
    silent = sum(row.outcome == "error" for row in found.steps)
    if silent and verdict.outcome != "error":
        few = f"{silent:,} of {len(found.steps):,} steps have no answer"
        spots = (*spots, BlindSpot("sample", f"{few}: too many of their tokens have no logprob"))
    verdict = replace(verdict, breakdown=found, blind_spots=spots)
    if verdict.outcome != "error":
        verdict = by_step.joined(verdict)
    names = [cut.name for cut in weighing.cuts]
    out = diagnosis.fewest(names, limits, weighing.atoms)
    bits = sum(1 << i for i, name in enumerate(names) if name in out)
    inside, outside = diagnosis.within(weighing.atoms, bits)
    grown = trend(*weighing.ends)
    masked = None
    if asked.mask is not None and out:
        cuts = [cut for cut in weighing.cuts if cut.name in out]
        masked = write_masks(_read(_opened(asked), watch), cuts, asked.mask)
    return Answer(
        asked,
        dump,
        preset,
        why,
        text,
        verdict,
        weighing,
        told,
        dated,
        grown,
        "" if errors else _cause(weighing, verdict, grown),
        out,
        inside.n / (inside.n + outside.n) if inside.n else 0.0,
        outside.mean,
        not whole,
        notes,
        time.monotonic() - began,
        masked,
        coherence.numbers.get("mean"),
    )


def _cause(weighing: Weighing, verdict: Verdict, grown: Trend | None) -> str:
    """Of slices that tell it apart, of the sampler where all are alike, or of the steps."""
    red, held = _red(verdict), concentration(weighing.ends[1])
    undecided = verdict.outcome in ("violated", "inconclusive")
    return (
        diagnosis.likely(weighing.cuts, red, weighing.atoms, None)
        or (weighing.transform.cause() if undecided else "")
        or diagnosis.likely(weighing.cuts, red, weighing.atoms, grown, held)
    )


def _red(verdict: Verdict) -> list[str]:
    """Slices on which an enforced clause is violated over the whole dump, `all` among them."""
    cells = (c for c in verdict.cells if c.enforced and not is_step(c))
    found = (c.slice for c in cells if c.outcome == "violated")
    return [*dict.fromkeys(found)]


def _limits(verdict: Verdict) -> dict[str, float | None]:
    """Of each slice that is red, and of the whole, the limit on mean TV it is beyond, if any."""
    found: dict[str, float | None] = {}
    for cell in verdict.cells:
        if cell.enforced and cell.outcome == "violated":
            of_tv = cell.metric == "tv" and cell.threshold is None
            if of_tv or (cell.slice != WHOLE and cell.slice not in found):
                found[cell.slice] = cell.limit if of_tv else found.get(cell.slice)
    return found


def _since(weighing: Weighing, verdict: Verdict) -> dict[str, int]:
    plan, _ = weighing.evidence()
    found: dict[str, int] = {}
    for i, (cell, judged) in enumerate(zip(plan.cells, verdict.cells, strict=True)):
        if judged.outcome == "violated" and isinstance(cell.kind, Certificate):
            means = [(s.step, s.mean(i)) for s in weighing.steps.values()]
            step = since(means, cell.kind.feed.limit)
            if step is not None:
                found[cell.name] = step
    return found


def _noted(cell: CellVerdict, dated: Mapping[str, int]) -> CellVerdict:
    """With the step for reports, which know of no other axis."""
    step = dated.get(f"{cell.clause}[{cell.slice}]")
    return cell if step is None else cell.but(note=f"since step {step}")


def _as_found(cell: CellVerdict, finding: Finding) -> CellVerdict:
    """The mean weight as the finding has it, so that every report says of it what the text says."""
    if cell.metric != "coherence" or cell.outcome not in ("holds", "violated"):
        return cell
    outcome = "holds" if finding.state == "ok" else "violated"
    return cell.but(outcome=outcome, value=finding.numbers.get("mean"), note=finding.text)


def _opened(asked: Asked) -> Dump:
    """The dump, of the asked steps alone."""
    dump = open_dump(asked.path, asked.format, unsafe_pickles=asked.unsafe_pickles)
    first, last = asked.steps
    low, high = -math.inf if first is None else first, math.inf if last is None else last
    files = tuple(file for file in dump.found.files if low <= file.step <= high)
    if not files:
        shown = [str(end) if end is not None else "" for end in asked.steps]
        raise MeasurementError(
            f"no step of {asked.path} lies in {':'.join(shown)}",
            hint=f"its steps are {min(dump.steps)} to {max(dump.steps)}",
        )
    return Dump(replace(dump.found, files=files))


def _read(dump: Dump, watch: Watch) -> Iterator[Rollouts]:
    def progress(done: int, total: int) -> None:
        watch(Progress("reading, MB", done // _MB, max(total // _MB, 1)))

    yield from (chunk for chunk in dump.read(progress) if len(chunk))


def _head(read: Iterable[Rollouts]) -> tuple[list[Rollouts], bool]:
    """The first HEAD_TOKENS tokens, and whether that is all."""
    head, held = [], 0
    for block in read:
        head.append(block)
        held += len(block.token_N)
        if held >= HEAD_TOKENS:
            return head, False
    return head, True
