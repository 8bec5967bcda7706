# Each finding: a repro of about ten lines (repro/NAME.py), where it comes from in the source of the
# library, and what public threads say about it.  The texts are in findings.yaml.  A repro prints
# `label: value`, twice or more; the values should be equal, and are not.

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

HERE = Path(__file__).parent
FINDING = "finding"


@dataclass(frozen=True)
class Finding:
    """One entry of the page; `at` is the environment, and the packages that matter in it."""

    name: str
    set: str  # "before", of earlier work on the engines of Servanda, or "new"
    title: str
    at: tuple[str, ...]
    cause: str
    upstream: str
    verdict: str = FINDING
    command: str = ""
    refusal: bool = False  # one side ends with an error: loud, and not a wrong number

    @property
    def repro(self) -> Path:
        return HERE / "repro" / f"{self.name}.py"


@cache
def known() -> tuple[Finding, ...]:
    """The findings, in the order of the page.

    Raises:
        TypeError: an entry of findings.yaml lacks a key, or has one too many.
    """
    entries = yaml.safe_load((HERE / "findings.yaml").read_text(encoding="utf-8"))
    return tuple(Finding(**{**entry, "at": tuple(entry["at"])}) for entry in entries)
