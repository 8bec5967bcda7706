# The verdict as annotations of a GitHub workflow: each open or broken cell at its clause.

from __future__ import annotations

from servanda.judgement.clauses.base import CellVerdict
from servanda.judgement.verdict import Verdict
from servanda.report import cell_text, format
from servanda.report.base import FORMATS
from servanda.report.summary import headline, impact

_MOST = 9  # a step shows ten of a kind, and the summary is one of them
_COMMANDS = {"violated": "error", "error": "error", "inconclusive": "warning"}


@FORMATS.register("github")
def render(verdict: Verdict) -> str:
    """Workflow commands, worst first, and one notice with the verdict in a sentence.

    Source:
        GitHub Docs, Workflow commands for GitHub Actions, "Setting an error message".
    """
    cells = [c for c in cell_text.worst_first(verdict.cells) if _told(c)]
    lines = [_annotation(cell) for cell in cells[:_MOST]]
    summary = f"{headline(verdict)} {impact(verdict)}"
    if len(cells) > _MOST:
        summary += f" {len(cells) - _MOST} more cells are not annotated."
    summary += "".join(f"\n{format.line(text)}" for text in verdict.circumstances.differences)
    summary += "".join(f"\nNot examined: {format.line(s.text)}" for s in verdict.blind_spots)
    title = escaped_property(f"servanda: {format.line(verdict.contract)}")
    return "\n".join([*lines, f"::notice title={title}::{escaped(summary)}"])


def _told(cell: CellVerdict) -> bool:
    return cell.outcome in _COMMANDS and (cell.enforced or cell.outcome == "violated")


def _annotation(cell: CellVerdict) -> str:
    command = _COMMANDS[cell.outcome] if cell.enforced else "warning"
    title = f"{format.line(cell.clause)} on {format.line(cell.slice)}: {cell.outcome}"
    place = []
    if cell.where is not None:
        place = [f"file={escaped_property(cell.where.file)}", f"line={cell.where.line}"]
        place.append(f"col={cell.where.column}")
    properties = ",".join([*place, f"title={escaped_property(title)}"])
    return f"::{command} {properties}::{escaped(cell_text.sentence(cell))}"


def escaped(text: str) -> str:
    """The message of a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escaped_property(text: str) -> str:
    """A property of a workflow command, such as a file or a title."""
    return escaped(text).replace(":", "%3A").replace(",", "%2C")
