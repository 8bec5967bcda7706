# A scenario, and what it found: one row of the table.

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gateway.deployment import Deployment
from benchmarks.gateway.settled import Settled
from benchmarks.gateway.traffic import PATIENCE_S, Outcome, request, traffic

RATE = 40.0
HEAD = (
    "what was done",
    "sent",
    "answered",
    "refused / cut off / no listener",
    "longest",
    "misrouted",
    "acknowledged and lost",
    "memory, after / peak",
    "",
    "and",
)


@dataclass
class Finding:
    """One row: what was done, and what became of it.

    Args:
        settled: who had to answer which slices.
        misrouted: replies to another request, and those of a pool that was not to answer.
        lost: rows and decisions that were acknowledged and are not there at the end.
        size_mib: from which growth counts; grown_mib: at the end; peak_mib: most of it, ever.
    """

    done: str
    settled: Settled
    outcome: Outcome = field(default_factory=Outcome)
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    misrouted: int = 0
    lost: int = 0
    size_mib: float = 0.0
    grown_mib: float = 0.0
    peak_mib: float = 0.0

    def check(self, true: bool, otherwise: str) -> None:
        if not true:
            self.wrong.append(otherwise)

    def probe(self, own: Outcome) -> None:
        """Count what became of some requests; two things may become of none, whatever broke."""
        self.outcome = self.outcome + own
        self.check(not own.hung, f"{own.hung} requests outlived {PATIENCE_S:.0f} s")
        self.check(not own.short, f"{own.short} answers ended early, and nothing showed it")
        astray = sum(map(self.settled.astray, own.spells))
        self.misrouted += own.crossed + astray
        self.check(not own.crossed, f"{own.crossed} had another's reply, or of another pool")
        self.check(not astray, f"{astray} were answered by the wrong pool")

    def all_answered(self, own: Outcome) -> None:
        told = own.texts[0] if own.texts else ""
        missing = own.sent - own.answered
        self.check(not missing, f"{missing} of {own.sent} were not answered {told}")

    @property
    def row(self) -> tuple[str, ...]:
        o = self.outcome
        said = "; ".join([*self.wrong, *self.notes])
        return (
            self.done,
            str(o.sent),
            str(o.answered),
            f"{o.refused} / {o.broken} / {o.nobody}",
            f"{o.longest_s:.1f} s",
            str(self.misrouted),
            str(self.lost),
            f"{self.grown_mib:+.0f} / {self.peak_mib:+.0f} MiB",
            "✗" if self.wrong else "✓",
            said.replace("|", "/").replace("\n", " "),
        )


Scenario = Callable[[Deployment, Finding], Awaitable[None]]
SCENARIOS: dict[str, tuple[str, Scenario]] = {}


def scenario(done: str) -> Callable[[Scenario], Scenario]:
    def named(function: Scenario) -> Scenario:
        SCENARIOS[function.__name__] = (done, function)
        return function

    return named


async def during(
    found: Finding,
    d: Deployment,
    seconds: float,
    *acts: tuple[float, Callable[[], Any]],
    make: Callable[[int], dict[str, Any]] = request,
    url: str = "",
) -> Outcome:
    """Traffic, with acts in the middle of it: (at what second, what)."""

    async def act(at: float, what: Callable[[], Any]) -> None:
        await asyncio.sleep(at)
        await asyncio.to_thread(what)

    users = asyncio.create_task(traffic(url or d.url, seconds, RATE, make))
    await asyncio.gather(users, *(act(*one) for one in acts))
    own = users.result()
    found.probe(own)
    return own


async def well(found: Finding, d: Deployment, seconds: float = 1.0) -> None:
    """Everybody is answered again."""
    after = await traffic(d.url, seconds, RATE)
    found.check(after.answered == after.sent, "afterwards:")
    found.all_answered(after)
    found.probe(after)
