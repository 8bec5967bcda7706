# Coverage: how much of what infer served was scored again, so that somebody would have seen.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from servanda.contract.fields import duration_text
from servanda.judgement.clauses.base import GUARDS, Cell, CellVerdict, Kind, Look, blank, limit_of


@dataclass(frozen=True)
class Coverage:
    """Requests that infer was sent in a window, and those of them that train scored again."""

    scored: int = 0
    served: int = 0


Windows = Mapping[float | None, Coverage]  # seconds of traffic, None: all of the leg -> counts


@GUARDS.register("rescored_ratio")
@dataclass(frozen=True)
class RescoredRatio(Kind):
    """Share of the requests served on a leg that train scored again.

    Too few of them is no evidence against the kernel, and none for it: it is inconclusive,
    and so what was found in those that were scored stands.  It is counted, so it costs none
    of alpha.
    """

    source = "coverage"

    def weigh(self, cell: Cell, windows: Windows) -> Coverage:
        return windows[cell.clause.over]

    def judge(self, cell: Cell, rounds: list[Coverage], floor: object, look: Look) -> CellVerdict:
        found = rounds[0] if rounds else Coverage()
        limit, over = limit_of(cell.clause), cell.clause.over
        window = "" if over is None else f" in the last {duration_text(over)}"
        verdict = blank(
            cell,
            "inconclusive",
            f"infer served no request{window}",
            kind="fact",
            limit=limit,
            n=found.served,
            units="requests",
            open=True,
        )
        if not found.served:
            return verdict
        value = found.scored / found.served
        verdict = verdict.but(value=value)
        if value >= limit:
            return verdict.but(outcome="holds", open=False, note="")
        return verdict.but(
            note=f"{found.scored:,} of {found.served:,} requests that infer served{window} were "
            "scored again: log a larger sample of them"
        )
