# Reports: a verdict as text, JSON, JUnit, SARIF, annotations, Markdown, or a page.
