# Reports: a verdict as text, JSON, JUnit, SARIF, annotations, Markdown, or a page.

from servanda.report import html, json, text
from servanda.report.base import FORMATS

__all__ = ["FORMATS", "html", "json", "text"]
