# The breakdown of a dump as tables: the steps, the worst sequences, and what a filter removed.

from __future__ import annotations

from collections.abc import Iterator, Sequence

from servanda.contract.model import WHOLE
from servanda.judgement.breakdown import Removed, RuleRow, SequenceRow, StepRow
from servanda.judgement.clauses.base import ORDER
from servanda.judgement.field_rules import ONE_RESPONSE
from servanda.judgement.verdict import Verdict
from servanda.report.cell_text import GLYPH
from servanda.report.consequence import corrections_table
from servanda.report.format import count, line, number, percent
from servanda.report.rungs import HEADS, by_distance, cells, heading

STEPS = 20  # rows of a report; JSON has all
Table = tuple[str, list[str], list[list[str]]]
_STEP_HEADS = [
    "step",
    "alone",
    "sequences",
    "tokens",
    "mean TV",
    "mean |Δ logp|",
    "TME",
    "k3, nats",
]
_SEQUENCE_HEADS = [
    "step", "place", "prompt group", "tokens", "sum Δ logp", "mean exp |Δ logp|", "TV", "share",
    "",
]  # fmt: skip


_RULE_HEADS = ["project", "number", "what it is", "limit", "steps above it", "first", "largest"]


def rule_row(row: RuleRow) -> list[str]:
    return [
        row.project,
        row.name,
        row.what,
        number(row.limit),
        f"{row.red:,} of {row.steps:,}",
        "" if row.first is None else f"{row.first}",
        number(row.value) or ("not a number" if row.unknown else ""),
    ]


def rule_lines(rules: Sequence[RuleRow], verdict: Verdict) -> Iterator[str]:
    """The rules that are above their limits, since when; and why a verdict holds beside one."""
    red = [row for row in rules if row.red]
    for row in red:
        steps = f"{row.red:,} of {count(row.steps, 'step')}, first at step {row.first}"
        largest = f"{number(row.value)} at step {row.worst}"
        if row.steps == 1:
            steps, largest = f"step {row.first}", number(row.value)
        one = "response" if row.name == ONE_RESPONSE else f"token of {number(row.largest)} nats"
        alone = f"; one {one} puts it there" if row.lone else ""
        yield f"{row.project} {row.name} above {number(row.limit)}: {steps}; {largest}{alone}"
    if unknown := max((row.unknown for row in rules), default=0):
        where = f"at {unknown:,} of {count(rules[0].steps, 'step')}"
        yield f"no rule is a number {where}: a trained token has no logprob there"
    if quiet := sum(row.value is not None and not row.red for row in rules):
        others = " at all others" if unknown else " at every step"
        yield f"{count(quiet, 'other rule' if red else 'rule')} within their limits{others}"
    if red and verdict.outcome == "holds":
        yield _why_holds(verdict)


def _why_holds(verdict: Verdict) -> str:
    """Why a verdict holds beside rules that are above their limits."""
    means = [c for c in verdict.cells if c.metric == "tv" and c.slice == WHOLE and c.enforced]
    within = "".join(
        f" (mean total variation {number(c.value)} of {number(c.limit)})" for c in means[:1]
    )
    return (
        f"it holds all the same: the contract's limits are wider, and kept{within}, and no token "
        "or response is further off than the noise of the others gives"
    )


def tables(verdict: Verdict) -> list[Table]:
    """(title, heads, rows) of what a report folds: corrections, and the parts of a dump."""
    breakdown, advice = verdict.breakdown, verdict.advice
    tables: list[Table] = []
    if advice is not None and advice.corrections:
        tables.append(corrections_table(advice))
    if rungs := verdict.circumstances.rungs:
        tables.append((heading(rungs), [*HEADS], [*map(cells, by_distance(rungs))]))
    if breakdown is None:
        return tables
    steps, sequences = breakdown.steps, breakdown.sequences
    if breakdown.rules:
        title = "Rules of other projects, each in its own formula on every step"
        tables.append((title, _RULE_HEADS, [rule_row(row) for row in breakdown.rules]))
    if len(steps) > 1:
        worst = worst_steps(steps)[:STEPS]
        several = any(row.first is not None for row in steps)
        how = "with those before it where it does not decide" if several else "judged alone"
        title = f"Each step {how}: {count_of(steps)}"
        if len(worst) < len(steps):
            title += f"; the worst {len(worst)} (JSON has all)"
        tables.append((title, _STEP_HEADS, [step_row(row) for row in worst]))
    if sequences:
        title = f"The worst {count(len(sequences), 'sequence')}; {breakdown.beyond:,} of all are "
        title += "beyond the limit on their own tokens"
        tables.append((title, _SEQUENCE_HEADS, [sequence_row(row) for row in sequences]))
    return tables


def worst_steps(steps: Sequence[StepRow]) -> list[StepRow]:
    """By answer, then by mean (1 - w)^+."""
    return sorted(steps, key=lambda s: (ORDER.index(s.outcome), -(s.tv or 0.0), s.step))


def step_row(row: StepRow) -> list[str]:
    return [
        f"{row.step}",
        f"{GLYPH[row.outcome]} {row.outcome}",
        f"{row.sequences:,}",
        f"{row.tokens:,}",
        number(row.tv),
        number(row.abs_log_ratio),
        number(row.exp_abs),
        number(row.k3),
    ]


def sequence_row(row: SequenceRow) -> list[str]:
    return [
        f"{row.step}",
        line(row.source, 60),
        line(row.group, 24),
        f"{row.tokens:,}",
        f"{row.log_ratio:+.3g}",
        number(row.exp_abs),
        number(row.tv),
        percent(row.share),
        "removed by a filter" if row.removed else "beyond the limit" if row.beyond else "",
    ]


def count_of(steps: Sequence[StepRow]) -> str:
    """How the steps were answered, such as "11 hold, 1 violated"."""
    words = {"holds": "hold", "error": "without an answer", "not applicable": "without a token"}
    counts = {o: sum(s.outcome == o for s in steps) for o in reversed(ORDER)}
    return ", ".join(f"{n:,} {words.get(o, o)}" for o, n in counts.items() if n)


def removed_line(removed: Removed) -> str:
    """What the trainer's filter took out, and what it hides."""
    text = (
        f"a filter removed {removed.sequences:,} of {count(removed.of_sequences, 'sequence')} "
        f"({percent(removed.tokens / max(removed.of_tokens, 1))} of the tokens) before training"
    )
    if removed.tv is None or removed.kept is None or removed.before is None:
        return f"{text}; their divergence is unknown"
    return (
        f"{text}: their mean total variation is {number(removed.tv)}, that of the others "
        f"{number(removed.kept)}; before the filter it was {number(removed.before)}"
    )
