# Reports: a verdict as text, JSON, JUnit, SARIF, annotations, Markdown, or a page.

from servanda.report import github, html, json, junit, markdown, sarif, text
from servanda.report.base import FORMATS, format_of

__all__ = [
    "FORMATS",
    "format_of",
    "github",
    "html",
    "json",
    "junit",
    "markdown",
    "sarif",
    "text",
]
