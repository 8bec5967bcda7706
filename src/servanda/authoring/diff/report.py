# A difference as text, JSON, annotations of a GitHub workflow, or Markdown.

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from servanda.authoring.diff.difference import Difference
from servanda.authoring.diff.values import Change, Kind
from servanda.contract.model import Contract
from servanda.errors import Where
from servanda.report.format import line
from servanda.report.github import MOST_ANNOTATIONS, annotation
from servanda.report.markdown import plain
from servanda.report.table import table

GLYPH: Mapping[Kind, str] = MappingProxyType(
    {
        "retargeted": "≠",
        "loosened": "▼",
        "removed": "−",
        "tightened": "▲",
        "added": "+",
        "cosmetic": "·",
    }
)
_BREAKS = "✗"


def title(difference: Difference) -> str:
    """The two versions by name, such as "tiny-int8 1.0.0 -> 1.1.0"."""
    old, new = difference.old.metadata, difference.new.metadata
    before = f"{line(old.name)} {line(old.version)}"
    after = line(new.version) if old.name == new.name else f"{line(new.name)} {line(new.version)}"
    return f"{before} -> {after}"


def text(difference: Difference) -> str:
    """A table, breaking changes first, and the conclusion in the last line."""
    lines = [title(difference)]
    if difference.changes:
        marks = [_BREAKS if c.breaks(difference.side) else " " for c in difference.changes]
        rows = table([_row(change) for change in difference.changes])
        lines += ["", *(f"{mark} {row}" for mark, row in zip(marks, rows, strict=True)), ""]
    lines += [difference.sentence]
    return "\n".join(lines + ([f"  hint: {difference.advice}"] if difference.advice else []))


def _row(change: Change) -> list[str]:
    return [
        f"{GLYPH[change.kind]} {change.kind}",
        line(change.name),
        line(change.what if change.enforced else f"{change.what} (monitored)"),
        _at(change.where_old),
        _at(change.where_new),
    ]


def _at(where: Where | None) -> str:
    return f"{line(where.file)}:{where.line}" if where else "-"


def to_json(difference: Difference) -> str:
    """Every change with its two places and its reason."""
    data = {
        "old": _version(difference.old),
        "new": _version(difference.new),
        "side": difference.side,
        "compatible": difference.compatible,
        "evidence": "expires" if difference.evidence_expires else "carries over",
        "sentence": difference.sentence,
        "advice": difference.advice,
        "changes": [
            {**_plain_change(change), "breaking": change.breaks(difference.side)}
            for change in difference.changes
        ],
    }
    return json.dumps(data, indent=1)


def _version(contract: Contract) -> dict[str, str]:
    meta = contract.metadata
    return {"name": meta.name, "version": meta.version, "digest": contract.digest}


def _plain_change(change: Change) -> dict[str, Any]:
    return {
        "kind": change.kind,
        "place": change.name,
        "what": change.what,
        "why": change.why,
        "enforced": change.enforced,
        "where_old": _plain_place(change.where_old),
        "where_new": _plain_place(change.where_new),
    }


def _plain_place(where: Where | None) -> dict[str, Any] | None:
    return where and {k: v for k, v in asdict(where).items() if k != "text"}


def github(difference: Difference) -> str:
    """Workflow commands: an error for each change that breaks, and a notice with the answer.

    Source:
        GitHub Docs, Workflow commands for GitHub Actions, "Setting an error message".
    """
    changes = [c for c in difference.changes if c.kind != "cosmetic"]
    lines = []
    for change in changes[:MOST_ANNOTATIONS]:
        command = "error" if change.breaks(difference.side) else "notice"
        why = f" ({change.why})" if change.why else ""
        head, message = line(f"{change.name} {change.kind}"), line(f"{change.what}{why}")
        # a removed part is in no file of the new version
        lines.append(annotation(command, head, message, change.where_new))
    summary = difference.sentence + (f". {difference.advice}" if difference.advice else "")
    if len(changes) > MOST_ANNOTATIONS:
        summary += f". {len(changes) - MOST_ANNOTATIONS} more changes are not annotated"
    return "\n".join([*lines, annotation("notice", f"servanda: {title(difference)}", summary)])


def markdown(difference: Difference) -> str:
    lines = [f"> [!{'TIP' if difference.compatible else 'CAUTION'}]"]
    lines += [f"> **{plain(title(difference))}**: {plain(difference.sentence)}"]
    if difference.advice:
        lines += [">", f"> {plain(difference.advice)}"]
    if difference.changes:
        lines += ["", "| | | part | was -> is | because |", "|---|---|---|---|---|"]
    for change in difference.changes:
        kind, name, what, *_ = _row(change)
        mark = _BREAKS if change.breaks(difference.side) else ""
        cells = (mark, kind, name, what, change.why)
        lines.append(f"| {' | '.join(map(plain, cells))} |")
    return "\n".join(lines)


FORMATS: Mapping[str, Callable[[Difference], str]] = MappingProxyType(
    {"text": text, "json": to_json, "github": github, "markdown": markdown}
)
