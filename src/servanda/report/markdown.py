# The verdict as Markdown, for a pull request: the sentence, five rows, and the rest folded.

from __future__ import annotations

import re
from collections.abc import Sequence

from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.token_profile import gates
from servanda.judgement.verdict import FORMATS, Verdict
from servanda.report import cell_text, format
from servanda.report.breakdown import removed_line, tables
from servanda.report.consequence import AdviceRow, advice_rows
from servanda.report.format import count
from servanda.report.summary import gate_text, headline, impact

_WORST = 5
_ALERTS = {"violated": "CAUTION", "error": "WARNING", "inconclusive": "WARNING", "holds": "TIP"}
# everything inside a line that Markdown, the HTML in it, or GitHub could take for its own
_MARKUP = re.compile(r"[\\`*_\[\]#|~<>&@$]|:(?! )")
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
_ENTITIES |= {c: f"&#{ord(c)};" for c in "@:$#"}  # mentions, emoji, links, mathematics, issues


@FORMATS.register("markdown")
def render(verdict: Verdict) -> str:
    cells = [c for c in cell_text.worst_first(verdict.cells) if c.outcome != "not applicable"]
    text = f"**{plain(str(headline(verdict)))}**"
    lines = [f"> [!{_ALERTS[verdict.outcome]}]", f"> {text}", ">"]
    lines.append(f"> {plain(impact(verdict))}")
    lines += [f"> {plain(text)}" for text in verdict.circumstances.differences]
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
    lines += ["", *_folded("Thresholds of other projects", _gates(verdict)), "", _small(verdict)]
    return "\n".join(lines)


def _table(cells: Sequence[CellVerdict]) -> list[str]:
    lines = [
        "| | clause | slice | measured | limit | noise floor | n |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    return [*lines, *("| " + " | ".join(_row(cell)) + " |" for cell in cells)]


def _advised(row: AdviceRow) -> str:
    text = f"`{row.text}`" if row.code and "`" not in row.text else plain(row.text)
    return f"- **{row.head}:** {text}{f' ({plain(row.note)})' if row.note else ''}"


def _row(cell: CellVerdict) -> list[str]:
    answer = cell_text.reason(cell) or cell.outcome
    measured = [cell_text.of_cell(cell, cell.value), cell_text.interval(cell)]
    measured = measured if any(measured) else [cell_text.log_e_value(cell)]
    texts = [
        f"{cell_text.GLYPH[cell.outcome]} {answer if cell.enforced else f'{answer} (monitored)'}",
        f"{format.line(cell.clause, 40)}: {cell_text.quantity(cell)}",
        cell_text.where(cell, 40),
        " ".join(filter(None, measured)) or "no number",
        cell_text.signed_limit(cell),
        cell_text.of_cell(cell, cell.floor),
        cell_text.short_size(cell),
    ]
    return [plain(text) for text in texts]


def _gates(verdict: Verdict) -> list[str]:
    says = {True: "would pass", False: "would fail", None: "not measured"}
    lines = ["| threshold | value | |", "|---|--:|---|"]
    for gate in gates(verdict.portraits):
        value = gate_text(gate) if gate.passes is not None else "–"
        lines.append(f"| {plain(gate.name)} | {plain(value)} | {says[gate.passes]} |")
    return lines


def _plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [" | ".join(map(plain, heads)), "|".join(["---"] * len(heads))]
    lines += [" | ".join(map(plain, row)) for row in rows]
    return [f"| {text} |" for text in lines]


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
