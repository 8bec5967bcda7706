# The verdict as annotations of a GitHub workflow: each open or broken cell at its clause.

from __future__ import annotations

from servanda.errors import Where
from servanda.judgement.verdict import FORMATS, Verdict
from servanda.report import cell_text, format
from servanda.report.summary import headline, impact, remarks

MOST_ANNOTATIONS = 9  # a step shows ten of a kind, and the summary is one of them
_COMMANDS = {"violated": "error", "error": "error", "inconclusive": "warning"}


@FORMATS.register("github")
def render(verdict: Verdict) -> str:
    """Workflow commands, worst first, and one notice with the verdict in a sentence.

    Source:
        GitHub Docs, Workflow commands for GitHub Actions, "Setting an error message".
    """
    cells = [
        cell
        for cell in cell_text.worst_first(verdict.cells)
        if cell.outcome in _COMMANDS and (cell.enforced or cell.outcome == "violated")
    ]
    lines = []
    for cell in cells[:MOST_ANNOTATIONS]:
        command = _COMMANDS[cell.outcome] if cell.enforced else "warning"
        title = f"{format.line(cell.clause)} on {format.line(cell.place)}: {cell.outcome}"
        lines.append(annotation(command, title, cell_text.sentence(cell), cell.where))
    summary = f"{headline(verdict)} {impact(verdict)}"
    if len(cells) > MOST_ANNOTATIONS:
        summary += f" {len(cells) - MOST_ANNOTATIONS} more cells are not annotated."
    summary += "".join(f"\n{text}" for text in remarks(verdict))
    summary += "".join(f"\nNot examined: {format.line(s.text)}" for s in verdict.blind_spots)
    title = f"servanda: {format.line(verdict.contract)}"
    return "\n".join([*lines, annotation("notice", title, summary)])


def annotation(command: str, title: str, message: str, where: Where | None = None) -> str:
    """A workflow command, at a place in a file where it has one."""
    place = ""
    if where is not None:
        place = f"file={_property(where.file)},line={where.line},col={where.column},"
    return f"::{command} {place}title={_property(title)}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
