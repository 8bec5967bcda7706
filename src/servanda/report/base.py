# What a report is called as a file; the formats register in `judgement.verdict.FORMATS`.

from __future__ import annotations

from pathlib import PurePath

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
