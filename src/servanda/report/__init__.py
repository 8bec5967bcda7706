# Reports: a verdict as text and as JSON.

from servanda.report import json, text
from servanda.report.base import FORMATS

__all__ = ["FORMATS", "json", "text"]
