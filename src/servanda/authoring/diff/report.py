# A difference as text, JSON, annotations of a GitHub workflow, or Markdown.

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from servanda.authoring.diff.difference import Difference
from servanda.authoring.diff.values import Change, Kind
from servanda.errors import Where
from servanda.report.format import line
from servanda.report.github import escaped, escaped_property
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
_MOST = 9  # a step of a GitHub workflow shows ten of a kind, and the summary is one of them


def title(difference: Difference) -> str:
    """The two versions by name, such as "tiny-int8 1.0.0 -> 1.1.0"."""
    old, new = difference.old.metadata, difference.new.metadata
    before = f"{line(old.name)} {line(old.version)}"
    after = line(new.version) if old.name == new.name else f"{line(new.name)} {line(new.version)}"
    return f"{before} -> {after}"


def text(difference: Difference) -> str:
    """A table, what breaks first, and the answer in the last line."""
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
        "old": _version(difference, "old"),
        "new": _version(difference, "new"),
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


def _version(difference: Difference, which: str) -> dict[str, str]:
    contract = getattr(difference, which)
    meta = contract.metadata
    return {"name": meta.name, "version": meta.version, "digest": contract.digest}


def _plain_change(change: Change) -> dict[str, Any]:
    places = {"where_old": change.where_old, "where_new": change.where_new}
    return {
        "kind": change.kind,
        "place": change.name,
        "what": change.what,
        "why": change.why,
        "enforced": change.enforced,
        **{
            name: {k: v for k, v in asdict(where).items() if k != "text"} if where else None
            for name, where in places.items()
        },
    }


def github(difference: Difference) -> str:
    """Workflow commands: an error for each change that breaks, and a notice with the answer.

    Source:
        GitHub Docs, Workflow commands for GitHub Actions, "Setting an error message".
    """
    told = [c for c in difference.changes if c.kind != "cosmetic"]
    lines = [_annotation(change, difference) for change in told[:_MOST]]
    summary = difference.sentence + (f". {difference.advice}" if difference.advice else "")
    if len(told) > _MOST:
        summary += f". {len(told) - _MOST} more changes are not annotated"
    head = escaped_property(f"servanda: {title(difference)}")
    return "\n".join([*lines, f"::notice title={head}::{escaped(summary)}"])


def _annotation(change: Change, difference: Difference) -> str:
    command = "error" if change.breaks(difference.side) else "notice"
    properties = [f"title={escaped_property(line(f'{change.name} {change.kind}'))}"]
    where = change.where_new
    if where is not None:  # what was removed stands in no file of the new version
        place = f"file={escaped_property(where.file)},line={where.line},col={where.column}"
        properties.insert(0, place)
    why = f" ({change.why})" if change.why else ""
    return f"::{command} {','.join(properties)}::{escaped(line(f'{change.what}{why}'))}"


def markdown(difference: Difference) -> str:
    """GitHub-flavoured Markdown."""
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
