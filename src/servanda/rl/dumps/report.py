# The verdict on a dump as people read it.

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from shlex import quote

from servanda.contract.model import WHOLE
from servanda.judgement.breakdown import SequenceRow, StepRow
from servanda.judgement.clauses.base import CellVerdict, worst
from servanda.judgement.clauses.whole_responses import OUTLIERS
from servanda.judgement.token_profile import Portrait, quantile_text
from servanda.judgement.verdict import BITWISE
from servanda.report.breakdown import (
    count_of,
    rule_lines,
    sequence_row,
    step_row,
    worst_steps,
)
from servanda.report.cell_text import GLYPH, REALISED, excess, glyph_of, interval, limit, of_cell
from servanda.report.consequence import advice_lines
from servanda.report.format import count, line, number, percent
from servanda.report.text import not_examined
from servanda.rl.dumps.judge import DumpVerdict
from servanda.rl.steps import format
from servanda.rl.steps.causes import of_tokens
from servanda.rl.steps.judge import ONLY_FILTERED
from servanda.rl.trend.changes import TREND, RunChart

_LEVEL = {"error": "✗", "warning": "!", "fine": "✓"}
_WORST = 6  # most violated slices in the report
_WORST_STEPS, _WORST_SEQUENCES = 3, 3  # that are shown
_MOST = 0.9  # share of tokens: if more are violated, no slice explains it
_NAME, _VALUE = 46, 30  # widths


def render(answer: DumpVerdict) -> str:
    """The data, its quality checks, the verdict by slice and step, and the next command."""
    return "\n".join(text.rstrip() for text in _lines(answer))


def _lines(answer: DumpVerdict) -> Iterator[str]:
    verdict, statistics = answer.verdict, answer.statistics
    yield from _dump(answer)
    yield ""
    yield "Data quality checks"
    for data in answer.lines:
        yield f"  {_LEVEL[data.level]} {data.text}"
    for cell in verdict.cells:
        # the mean weight has its own finding
        failed = cell.section == "observability" and cell.outcome in ("violated", "error")
        failed |= cell.metric == OUTLIERS and cell.outcome == "inconclusive"
        if failed and cell.metric != "coherence":
            yield f"  {GLYPH[cell.outcome if cell.enforced else 'error']} {cell.note}"
    yield f"{'Measured, with its interval'.ljust(_NAME + _VALUE)}limit"
    if verdict.outcome == "error":
        yield "  ! no answer: the data cannot be trusted"
    else:
        yield from _clauses(answer)
        yield from _steps(_rows(answer))
        yield from _sequences(verdict.breakdown.sequences if verdict.breakdown else ())
        yield from _trend(answer)
        yield from (f"  ✗ {c.note}" for c in verdict.cells if c.clause == BITWISE)
        if statistics.largest_staleness and not answer.ageless:
            yield (
                "  ! kernel mismatch and staleness are mixed: tokens are up to "
                f"{statistics.largest_staleness:g} updates old"
            )
    yield from advice_lines(verdict.advice)
    if verdict.outcome != "error":
        yield from _panel(answer)
        yield from _rules(answer)
    yield from _answer(answer)
    if verdict.outcome != "error":
        yield from not_examined(verdict)
    yield from _next(answer)


def _dump(answer: DumpVerdict) -> Iterator[str]:
    dump, statistics = answer.dump, answer.statistics
    steps = [*statistics.steps]
    files, low, high = len(dump.files), min(steps), max(steps)
    framework = line(dump.about.get("framework", dump.format))
    parts = [
        f"{count(files, 'file')} of {framework}",
        f"steps {low} to {high}" if high > low else f"step {low}",
        count(statistics.sequences, "sequence"),
        count(statistics.trained, "trained token"),
    ]
    parts += [f"up to {statistics.turns} turns"] if statistics.turns > 1 else []
    yield f"found    {' · '.join(parts)}"
    for note in dump.detection.notes:
        yield f"         {line(note)}"
    own = answer.options.contract
    if own is None:
        yield (
            f"preset   {answer.preset}, {answer.why}   "
            f"(its limits: servanda contract presets --show {answer.preset}; choose: --preset NAME)"
        )
        none = "too few tokens, or all tokens alike"
    else:
        shown = quote(str(own))
        yield f"contract {shown}, {answer.why}   (its promises: servanda contract explain {shown})"
        none = "the contract has none that the dump can have"
    names = [line(cut.name) for cut in statistics.cuts]
    yield f"slices   {', '.join(names) if names else f'none: {none}'}"
    if answer.partly:
        yield "         chosen from the first tokens; later labels are judged with the whole"
    yield (
        "floor    noise floor unknown, because neither side scored a token twice: ✗ means above "
        "the limit, whatever the noise"
    )


def _clauses(answer: DumpVerdict) -> Iterator[str]:
    cells = [c for c in answer.verdict.cells if c.section == "statistical"]
    for cell in cells:
        # a clause that is not enforced is shown only above its limit
        if cell.place != WHOLE or not (cell.enforced or cell.outcome == "violated"):
            continue
        yield _row(cell, format.clause(cell), answer)
        if format.is_gradient(cell) and cell.value is not None:
            yield (
                "      without a correction, the bias of a policy gradient is at most "
                f"{number(2 * cell.value)} x the largest |advantage| x the largest score norm "
                "(2 x tv)"
            )
        own = [c for c in cells if c.clause == cell.clause and c.place != WHOLE]
        red = sorted((c for c in own if c.outcome == "violated"), key=excess, reverse=True)
        for part in red[:_WORST]:
            yield _row(part, f"  … {format.where(part)}", answer)
        if len(red) > _WORST:
            yield f"      and {count(len(red) - _WORST, 'more slice')}"
        sliced = [c for c in own if c.steps is None]
        undecided = sum(c.outcome == "inconclusive" for c in sliced)
        holds = sum(c.outcome == "holds" for c in sliced)
        if sliced:
            rest = f", {undecided} not decided" if undecided else ""
            yield f"      {holds} of {count(len(sliced), 'slice')} hold{rest}"


def _row(cell: CellVerdict, name: str, answer: DumpVerdict) -> str:
    glyph = glyph_of(cell) if cell.enforced else "!"
    value = "  ".join(filter(None, (of_cell(cell, cell.value), interval(cell))))
    step = None if cell.steps else answer.since.get(f"{cell.clause}[{cell.slice}]")
    tail = f"   since step {step}" if step is not None else ""
    tail += "" if cell.enforced else "   a warning only"
    tail += f"   {cell.note}" if cell.outcome == "not applicable" else ""
    return f"  {glyph} {name.ljust(_NAME - 4)}{value.ljust(_VALUE)}{limit(cell)}{tail}"


def _steps(rows: Sequence[StepRow]) -> Iterator[str]:
    """A summary of the steps: how many hold, and the worst."""
    if len(rows) < 2:
        return
    red = [row for row in rows if row.outcome == "violated"]
    glyph = GLYPH[worst([row.outcome for row in rows])]
    named = f" (step{'s' if len(red) > 1 else ''} {_numbers(r.step for r in red)})" if red else ""
    thin = any(row.first is not None for row in rows)
    how = "each step, with those before it where it does not decide" if thin else "each step alone"
    yield f"  {glyph} {how}: {count_of(rows)}{named}"
    for row in worst_steps(rows)[: max(1, min(len(red), _WORST_STEPS))]:
        step, _, _, tokens, share, *numbers = step_row(row)
        if not row.tokens:
            yield f"      step {step}: no token was trained on"
            continue
        parts = [f"tv {share}" if share else "", f"{tokens} tokens"]
        names = ("mean |Δ logp|", "TME", "k3")
        parts += [f"{name} {n or 'infinite'}" for name, n in zip(names, numbers, strict=True)]
        yield f"      step {step}: {', '.join(filter(None, parts))}"


def _sequences(rows: Sequence[SequenceRow]) -> Iterator[str]:
    for row in [row for row in rows if row.beyond][:_WORST_SEQUENCES]:
        _, place, group, tokens, total, mean, share, part, _ = sequence_row(row)
        removed = ", removed by a filter" if row.removed else ""
        yield (
            f"  ! {place} (step {row.step}, group {group}): tv {share}, sum Δ logp "
            f"{total}, mean exp |Δ logp| {mean}, {tokens} tokens, {part} of all mismatch{removed}"
        )


def _numbers(steps: Iterable[int]) -> str:
    """Step numbers, consecutive ones as a range."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    spans = [f"{a}" if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in runs]
    more = f" and {len(spans) - _WORST} more" if len(spans) > _WORST else ""
    return f"{', '.join(spans[:_WORST])}{more}"


def _panel(answer: DumpVerdict) -> Iterator[str]:
    """The trainer's own metrics, under its names."""
    portrait = answer.verdict.portraits.get("infer", Portrait())
    total, ends = portrait.total, portrait.quantile(0.99)
    if not total.n or ends is None:
        return
    largest = portrait.worst[0].abs_log_ratio if portrait.worst else None
    parts = [
        f"mean |Δ logp| {number(total.mean('abs_log_ratio'))}",
        f"TME {number(total.mean('exp_abs'))}",
        f"k3 {number(total.mean('k3'))}",
        f"p99 |Δ logp| {quantile_text(ends)[1]}",
        f"max {number(largest)}",
    ]
    if (weight := answer.mean_weight) is not None:
        # |w - 1| = 2 (1 - w)^+ + (w - 1)
        apart = 2 * (total.mean("tv") or 0.0) + weight - 1
        parts += [f"mean w {number(weight)}", f"mean |w - 1| {number(apart)}"]
    yield f"panel    {' · '.join(parts)}"


def _rules(answer: DumpVerdict) -> Iterator[str]:
    """The rules of other projects, each step in the project's own formula."""
    breakdown = answer.verdict.breakdown
    if breakdown is not None and breakdown.rules:
        head, *more = rule_lines(breakdown.rules, answer.verdict)
        yield f"rules    {head}"
        yield from (f"         {text}" for text in more)


def _trend(answer: DumpVerdict) -> Iterator[str]:
    if answer.chart is not None:
        yield from _change(answer, answer.chart)
        return
    trend = answer.trend
    if trend is None:
        return
    low, high = trend.interval
    word = {"error": "   it has doubled", "warning": "   it grows"}.get(trend.level, "")
    value = f"x{trend.ratio:.2f}  [{low:.2f}, {high:.2f}]"
    name = f"trend of tv: last {trend.steps} steps against first {trend.steps}"
    text = f"{name.ljust(_NAME - 4)}{value.ljust(_VALUE)}x2   not a bound{word}"
    yield f"  {'!' if trend.level else '✓'} {text}"


def _change(answer: DumpVerdict, chart: RunChart) -> Iterator[str]:
    """The steps against good runs, one line per metric."""
    for cell in answer.verdict.cells:
        if cell.section != TREND:
            continue
        glyph = glyph_of(cell) if cell.enforced else "!"
        name = f"change of {cell.metric}"
        lost = f"   missing at {count(cell.missing, 'step')}" if cell.missing else ""
        tail = f"   from step {cell.steps[0]} on" if cell.steps else ""
        value = f"{number(cell.value)} of its threshold" if cell.value is not None else "-"
        yield f"  {glyph} {name.ljust(_NAME - 4)}{value.ljust(_VALUE)}1{lost}{tail}"
    yield f"      {chart.reference.promise}"


def _answer(answer: DumpVerdict) -> Iterator[str]:
    verdict = answer.verdict
    word = verdict.outcome.upper()
    if verdict.outcome == "error":
        unsound = [t.text for t in answer.lines if t.level == "error"]
        notes = [c.note for c in verdict.cells if c.outcome == "error" and c.note]
        yield f"UNSOUND: {[*unsound, *notes][0]}"
    elif verdict.outcome == "holds":
        yield f"HOLDS at confidence {verdict.confidence:g}: go on."
    elif verdict.outcome == "violated" and _only_changed(answer):
        since = min(c.steps[0] for c in verdict.cells if c.section == TREND and c.steps)
        yield (
            f"VIOLATED: the gap has changed since step {since} against the good runs. It is still "
            "within its limits."
        )
    elif verdict.outcome == "violated" and _only_far(answer):
        yield "VIOLATED by single responses: the averages over tokens are within their limits."
    elif verdict.outcome == "violated" and _at_steps(answer):
        red = [row.step for row in _rows(answer) if row.outcome == "violated"]
        yield (
            f"VIOLATED at step{'s' if len(red) > 1 else ''} {_numbers(red)}, judged alone; the "
            f"average over all {len(_rows(answer)):,} steps is within its limits."
        )
    elif verdict.outcome == "violated" and _parted(answer):
        yield (
            f"VIOLATED on slices with {percent(answer.share)} of the tokens. "
            f"Without them the mean total variation is {number(answer.left) or 'unknown'}."
        )
        if names := _only(answer):
            yield f"         those of {names};"
            yield "         the other red slices share tokens with them"
    elif verdict.outcome == "violated":
        found = verdict.advice is not None and bool(verdict.advice.slices)
        known = "no slice of the contract explains it; the search found the slice above"
        yield f"VIOLATED on the whole: {known if found else 'no slice explains it'}."
    elif doubtful := [c for c in verdict.cells if c.metric == OUTLIERS and c.enforced and c.open]:
        yield f"{word}: {doubtful[0].note}"
    elif hidden := [c for c in verdict.cells if c.enforced and c.reason in ONLY_FILTERED]:
        broken = any(c.reason == "violated unfiltered" for c in hidden)
        yield f"{word}: it holds only after a filter; before the filter it is " + (
            "violated." if broken else "not decided."
        )
    else:
        more = (
            f" About {count(verdict.more, 'more prompt group')} would decide."
            if verdict.more
            else ""
        )
        yield f"{word}: too few tokens for a decision.{more}"


def _rows(answer: DumpVerdict) -> Sequence[StepRow]:
    breakdown = answer.verdict.breakdown
    return breakdown.steps if breakdown is not None else ()


def _only_changed(answer: DumpVerdict) -> bool:
    """Whether only the trend is violated."""
    cells = (c for c in answer.verdict.cells if c.enforced and c.outcome == "violated")
    return {c.section for c in cells} == {TREND}


def _only_far(answer: DumpVerdict) -> bool:
    """Whether only a few responses are beyond what the noise of the others gives."""
    cells = (c for c in answer.verdict.cells if c.enforced and c.outcome == "violated")
    return not any(map(of_tokens, cells)) and any(
        c.metric == OUTLIERS for c in answer.verdict.cells if c.outcome == "violated"
    )


def _at_steps(answer: DumpVerdict) -> bool:
    """Whether only single steps are violated."""
    cells = [c for c in answer.verdict.cells if c.enforced and c.outcome == "violated"]
    return all(c.steps for c in cells if c.metric != OUTLIERS)


def _parted(answer: DumpVerdict) -> bool:
    """Whether most of the tokens remain after excluding slices."""
    return 0 < answer.share <= _MOST


def _only(answer: DumpVerdict) -> str:
    """The slices to exclude, if others are violated too."""
    cells = [c for c in answer.verdict.cells if c.steps is None]
    red = {c.slice for c in cells if c.enforced and c.outcome == "violated"}
    if red <= {*answer.out, WHOLE}:
        return ""
    return ", ".join(format.place(name) for name in answer.out)


def _next(answer: DumpVerdict) -> Iterator[str]:
    verdict, statistics = answer.verdict, answer.statistics
    own = answer.options.contract
    asked = "" if own is None else f" --contract {quote(str(own))}"
    command = f"servanda check {quote(str(answer.options.path))}{asked}"
    if answer.masked is not None:
        yield f"masks    {count(answer.masked, 'token')} in {answer.options.mask}/step_*.npz"
    elif verdict.outcome == "violated" and _only_changed(answer):
        yield "next     servanda preflight FILE.py:NAME    (does every weight reach the engine?)"
    elif verdict.outcome == "violated" and (_at_steps(answer) or _only_far(answer)):
        worst = worst_steps(_rows(answer))[0].step
        yield f"next     {command} --steps {worst}    (this step alone)"
    elif verdict.outcome == "violated" and _parted(answer):
        yield f"next     {command} --mask masks    (writes these tokens, step by step)"
    elif verdict.outcome == "holds" and own is None:
        yield (
            f"next     {command} --save-contract rollout.kernelcontract.yaml    (keep it; then "
            "check with --contract)"
        )
    yield f"{verdict.tokens:,} tokens, and the verdict is about these alone: {REALISED}"
    yield f"contract {verdict.key.contract[:8]} · evidence {verdict.evidence[:8]}"
    rate = statistics.tokens / max(answer.seconds, 1e-9)
    yield f"exit {verdict.exit_code} · {answer.seconds:.0f} s · {_rate(rate)} tokens/s"


def _rate(per_s: float) -> str:
    """Tokens per second, to two digits.

    >>> _rate(432_100), _rate(1_510_000), _rate(74)
    ('430,000', '1.5 M', '74')
    """
    if per_s >= 1e6:
        return f"{per_s / 1e6:.1f} M"
    digits = 1 - math.floor(math.log10(max(per_s, 1.0)))
    return f"{round(per_s, digits):,.0f}"
