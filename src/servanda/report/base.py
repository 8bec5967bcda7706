# What a report is: a function from a verdict to a text.

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath

from servanda.judgement.verdict import Verdict
from servanda.registry import Registry

FORMATS: Registry[Callable[[Verdict], str]] = Registry("format")
SUFFIXES = {
    ".html": "html",
    ".htm": "html",
    ".json": "json",
    ".xml": "junit",
    ".sarif": "sarif",
    ".md": "markdown",
    ".txt": "text",
}


def format_of(name: str) -> str | None:
    """The format that a file's name asks for, by its last suffix; None where it asks for none.

    >>> format_of("out/report.html"), format_of("a.sarif"), format_of("report")
    ('html', 'sarif', None)
    """
    return SUFFIXES.get(PurePath(name).suffix.lower())
