# Reports: a verdict as text, JSON, JUnit, SARIF, annotations, Markdown, or a page.

# these register their formats
from servanda.report import github, html, json, junit, markdown, sarif, text  # noqa: F401
