# Sound: whether what was read can be evidence at all.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from servanda.importers import Refused
from servanda.soundness import Finding

_SHARE = 0.001  # of the sequences may be refused; more is no sample of the run
_ZERO = "all zero"
_ORDER = ("error", "warning", "fine")
_LEVELS = {"unsound": "error", "warning": "warning", "ok": "fine"}


@dataclass(frozen=True)
class Told:
    """One line about the data; an error keeps any verdict from being given."""

    level: Literal["error", "warning", "fine"]
    text: str


def told(findings: Sequence[Finding], refused: Refused, taken: int) -> tuple[Told, ...]:
    """Everything that was found about the data, worst first.

    Args:
        taken: sequences that were read and not refused.
    """
    lines = [*of_refused(refused, taken), *map(_of, findings)]
    return tuple(sorted(lines, key=lambda line: _ORDER.index(line.level)))


def of_refused(refused: Refused, taken: int) -> list[Told]:
    """Sequences that could not be read: few are left out, more are no sample of the run."""
    if not refused.rows:
        return [Told("fine", "no sequence was left out")]
    lines = []
    for found in refused.values():
        share = found.count / (taken + refused.rows)
        bad = share > _SHARE or _ZERO in found.reason
        text = f"{found.count:,} sequences left out: {found.reason} (first: {found.first})"
        lines.append(Told("error" if bad else "warning", text))
    return lines


def _of(finding: Finding) -> Told:
    place = f" (first: {finding.first})" if finding.first and finding.state != "ok" else ""
    return Told(_LEVELS[finding.state], finding.text + place)  # type: ignore[arg-type]
