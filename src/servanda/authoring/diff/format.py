# Values of a contract on one line, as a contract writes them.

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_jsonable_python

from servanda.contract.model import Clause
from servanda.report.format import line

_LONGEST = 40  # characters of one value; a description may be a page
_PLAIN = re.compile(r"[A-Za-z0-9_./+\-][\w ./+\-]*")


def flow_text(value: Any, longest: int = _LONGEST) -> str:
    """A value in the flow style of YAML, cut where it is long; longest: 0 cuts nothing.

    >>> flow_text(0.02), flow_text(1000.0), flow_text((0.01, 0.05))
    ('0.02', '1000', '[0.01, 0.05]')
    >>> flow_text({"labels.x": {"in": ["a"]}})
    '{labels.x: {in: [a]}}'
    """
    return line(_flow(to_jsonable_python(value)), longest)


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        items = (f"{key}: {_flow(v)}" for key, v in value.items() if v is not None)
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else repr(value)
    text = str(value)
    return text if _PLAIN.fullmatch(text) else f"'{text}'"


def clause_text(clause: Clause) -> str:
    """A clause in a few words, such as "mean tv at most 0.02, monitored"."""
    parts = [f"{clause.aggregate or ''} {clause.metric}".strip()]
    for words in ("at_most", "at_least"):
        limit = getattr(clause, words)
        if limit is not None:
            parts[0] += f" {words.replace('_', ' ')} {flow_text(limit)}"
    if clause.slices is not None:
        parts.append(f"on {', '.join(clause.slices)}")
    return line(", ".join([*parts, *([] if clause.enforced else ["monitored"])]), 2 * _LONGEST)
