# The verdict as Markdown, for a pull request: the sentence, five rows, and the rest folded.

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.token_profile import gates
from servanda.judgement.verdict import FORMATS, Verdict
from servanda.report import cell_text, format
from servanda.report.breakdown import removed_line, tables
from servanda.report.consequence import AdviceRow, advice_rows
from servanda.report.format import count
from servanda.report.summary import gate_text, headline, impact, remarks

_WORST = 5
_ALERTS = {"violated": "CAUTION", "error": "WARNING", "inconclusive": "WARNING", "holds": "TIP"}
# everything inside a line that Markdown, the HTML in it, or GitHub could take for its own
_MARKUP = re.compile(r"[\\`*_\[\]#|~<>&@$]|:(?! )")
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
_ENTITIES |= {c: f"&#{ord(c)};" for c in "@:$#"}  # mentions, emoji, links, mathematics, issues


@FORMATS.register("markdown")
def render(verdict: Verdict) -> str:
    cells = [c for c in cell_text.worst_first(verdict.cells) if c.outcome != "not applicable"]
    head, *more = map(plain, (str(headline(verdict)), impact(verdict), *remarks(verdict)))
    lines = [f"> [!{_ALERTS[verdict.outcome]}]", "\n>\n> ".join((f"> **{head}**", *more))]
    if advice := [*map(_advised, advice_rows(verdict.advice))]:
        lines += ["", *advice]
    lines += ["", *_table(cells[:_WORST])]
    if cells[_WORST:]:
        title = f"{count(len(cells) - _WORST, 'more cell')} (clause × slice)"
        lines += ["", *_folded(title, _table(cells[_WORST:]))]
    if verdict.blind_spots:
        spots = [f"- {plain(spot.text)}" for spot in verdict.blind_spots]
        lines += ["", "Not examined by this run:", "", *spots]
    if verdict.breakdown is not None and verdict.breakdown.removed is not None:
        lines += ["", plain(removed_line(verdict.breakdown.removed))]
    for title, heads, rows in tables(verdict):
        lines += ["", *_folded(plain(title), _plain_table(heads, rows))]
    if verdict.breakdown is None or not verdict.breakdown.rules:
        lines += ["", *_folded("Thresholds of other projects", _gates(verdict))]
    lines += ["", _small(verdict)]
    return "\n".join(lines)


def _table(cells: Sequence[CellVerdict]) -> list[str]:
    heads = ("", "clause", "slice", "measured", "limit", "noise floor", "n")
    lines = _plain_table(heads, map(_row, cells), right=range(3, 7))
    notes = [_noted(cell) for cell in cells if cell.rounding]
    return [*lines, "", *notes] if notes else lines


def _noted(cell: CellVerdict) -> str:
    return f"- {plain(f'{cell.clause} on {cell_text.where(cell)}: {cell_text.remark(cell)}')}"


def _advised(row: AdviceRow) -> str:
    text = f"`{row.text}`" if row.code and "`" not in row.text else plain(row.text)
    return f"- **{row.head}:** {text}{f' ({plain(row.note)})' if row.note else ''}"


def _row(cell: CellVerdict) -> list[str]:
    answer = cell_text.reason(cell) or cell.outcome
    measured = [cell_text.of_cell(cell, cell.value), cell_text.interval(cell)]
    measured = measured if any(measured) else [cell_text.log_e_value(cell)]
    return [
        f"{cell_text.glyph_of(cell)} {answer if cell.enforced else f'{answer} (monitored)'}",
        f"{format.line(cell.clause, 40)}: {cell_text.quantity(cell)}",
        cell_text.where(cell, 40),
        " ".join(filter(None, measured)) or "no number",
        cell_text.signed_limit(cell),
        cell_text.of_cell(cell, cell.floor),
        cell_text.short_size(cell),
    ]


def _gates(verdict: Verdict) -> list[str]:
    says = {True: "would pass", False: "would fail", None: "–"}
    rows = [(g.name, gate_text(g), says[g.passes]) for g in gates(verdict.portraits)]
    return _plain_table(("threshold", "value", ""), rows, right=(1,))


def _plain_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[int] = ()
) -> list[str]:
    rule = ["--:" if i in right else "---" for i in range(len(heads))]
    lines = [map(plain, heads), rule, *(map(plain, row) for row in rows)]
    return [f"| {' | '.join(texts)} |" for texts in lines]


def _folded(title: str, lines: Sequence[str]) -> list[str]:
    return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>"]


def _small(verdict: Verdict) -> str:
    parts = [f"{plain(format.line(verdict.infer))} against {plain(format.line(verdict.train))}"]
    if verdict.sequences:
        parts.append(f"{count(verdict.tokens, 'token')} of {count(verdict.groups, 'prompt group')}")
    if verdict.golden_tokens:
        parts.append(count(verdict.golden_tokens, "golden position"))
    parts.append(f"evidence {verdict.evidence[:8]}, exit {verdict.exit_code}")
    return f"<sub>{' · '.join(parts)}</sub>"


def plain(text: str) -> str:
    """Text that means itself, on one line."""
    return _MARKUP.sub(lambda m: _ENTITIES.get(m[0], f"\\{m[0]}"), format.line(text))
