# Sound: whether what was read can be evidence at all.

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from servanda.importers import Refused
from servanda.rollouts import Rollouts

_SHARE = 0.001  # of the sequences may be refused; more is no sample of the run
_ZERO = "all zero"


@dataclass(frozen=True)
class Told:
    """One line about the data; an error keeps any verdict from being given."""

    level: Literal["error", "warning", "fine"]
    text: str


class Sound:
    """Findings about a dump, block by block."""

    def add(self, block: Rollouts) -> None:
        pass

    def told(self, refused: Refused, sequences: int) -> tuple[Told, ...]:
        """Everything that was found, worst first."""
        return of_refused(refused, sequences)


def of_refused(refused: Refused, taken: int) -> tuple[Told, ...]:
    """Sequences that could not be read: few are left out, more are no sample of the run."""
    if not refused.rows:
        return (Told("fine", "no sequence was left out"),)
    told = []
    for found in refused.values():
        share = found.count / (taken + refused.rows)
        bad = share > _SHARE or _ZERO in found.reason
        text = f"{found.count:,} sequences left out: {found.reason} (first: {found.first})"
        told.append(Told("error" if bad else "warning", text))
    return tuple(sorted(told, key=lambda t: t.level))
