# What a report is called as a file, and the formats, which register in `judgement.verdict.FORMATS`.

from __future__ import annotations

from pathlib import PurePath

# these register their formats
from servanda.report import github, html, json, junit, markdown, sarif, text  # noqa: F401

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
