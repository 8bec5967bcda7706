# What a report is: a function from a verdict to a text.

from __future__ import annotations

from collections.abc import Callable

from servanda.registry import Registry
from servanda.verdict import Verdict

FORMATS: Registry[Callable[[Verdict], str]] = Registry("format")
