# The verdict as text: one sentence first, then what breaks where, worst first.

from __future__ import annotations

from servanda.clauses import CellVerdict
from servanda.clauses.base import ORDER
from servanda.report.base import FORMATS
from servanda.verdict import Verdict

_GLYPH = {"violated": "✗", "error": "!", "inconclusive": "?", "holds": "✓", "not applicable": "-"}
_WIDTH_CLAUSE, _WIDTH_SLICE = 24, 22


@FORMATS.register("text")
def render(verdict: Verdict) -> str:
    lines = [
        f"{verdict.contract}: {verdict.infer}  against  {verdict.train}",
        f"weights {verdict.key.grade} {verdict.key.weights[:8]} · {verdict.sequences:,} sequences "
        f"of {verdict.groups:,} prompt groups · {verdict.tokens:,} tokens"
        + (f" · {verdict.lost:,} lost" if verdict.lost else ""),
        "",
    ]
    header = f"  {'clause':<{_WIDTH_CLAUSE}} {'slice':<{_WIDTH_SLICE}} {'measured':>10}"
    lines.append(f"{header}  {'interval':<18} {'limit':>8} {'floor':>8} {'n':>9}")
    rank = {outcome: i for i, outcome in enumerate(ORDER)}
    cells = sorted(verdict.cells, key=lambda c: rank.get(c.outcome, len(ORDER)))
    lines += [line for cell in cells for line in _cell(cell)]
    lines += ["", sentence(verdict), _small_print(verdict)]
    return "\n".join(lines)


def sentence(verdict: Verdict) -> str:
    """The answer in one sentence: what breaks where, or what is missing."""
    word = verdict.outcome.upper()
    cells = [c for c in verdict.cells if c.enforced]
    bad = [c for c in cells if c.outcome == verdict.outcome]
    if verdict.outcome == "holds":
        return f"{word}: all {len(bad)} enforced cells."
    names = ", ".join(f"{c.clause} on {c.slice}" for c in bad[:4])
    names += f" and {len(bad) - 4} more" if len(bad) > 4 else ""
    rest = sum(c.outcome == "holds" for c in cells)
    text = f"{word}: {names}. {rest} of {len(cells)} enforced cells hold."
    if verdict.outcome == "inconclusive" and verdict.more:
        text += f" About {verdict.more:,} more prompt groups would decide."
    return text


def _cell(cell: CellVerdict) -> list[str]:
    clause = f"{cell.clause}: {cell.aggregate or ''} {cell.metric}".replace(":  ", ": ")
    clause = clause if len(clause) <= _WIDTH_CLAUSE else f"{cell.clause}"
    is_share = cell.aggregate.startswith("p") and cell.kind == "certificate"
    show = _percent if is_share else _number
    absent = "not measured" if cell.kind in ("certificate", "fact") else ""
    value = absent if cell.value is None else show(cell.value)
    low_high = f"[{show(cell.interval[0])}, {show(cell.interval[1])}]" if cell.interval else ""
    line = (
        f"{_GLYPH[cell.outcome]} {clause:<{_WIDTH_CLAUSE}} {cell.slice:<{_WIDTH_SLICE}} "
        f"{value:>10}  {low_high:<18} {show(cell.limit):>8} {show(cell.floor):>8} {cell.n:>9,}"
    )
    notes = [cell.note] if cell.note else []
    if cell.outcome == "inconclusive" and cell.more:
        notes.append(f"about {cell.more:,} more prompt groups would decide")
    if cell.missing:
        notes.append(f"{cell.missing:,} missing")
    if not cell.enforced and cell.outcome != "not applicable":
        notes.append("monitored, not enforced")
    return [line.rstrip(), *(f"    {note}" for note in notes)]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.2g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f}%"


def _small_print(verdict: Verdict) -> str:
    claims = sorted({c.claim for c in verdict.cells if c.kind == "certificate"})
    says = {
        "population": "of tokens that this workload's prompts bring forth",
        "realised": "of the tokens that were measured",
    }
    spoken = "; ".join(f"claim {c}: {says[c]}" for c in claims)
    return (
        f"{spoken + chr(10) if spoken else ''}alpha {verdict.alpha:.3g} "
        f"(attempt {verdict.key.attempt} at confidence {verdict.confidence:g}), a violation pays "
        f"for {verdict.price_cells} cells; intervals are simultaneous in time\n"
        f"stage {verdict.stage} · contract {verdict.key.contract[:8]} · evidence "
        f"{verdict.evidence[:8]} · exit {verdict.exit_code}"
    )
