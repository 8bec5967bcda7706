# The result of one sync: whether each engine follows, in numbers and in a sentence.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from servanda.judgement.verdict import EXIT_CODES
from servanda.report.cell_text import GLYPH
from servanda.report.format import count
from servanda.rl.follow.replica import (
    DROPPED,
    LATE,
    NEVER,
    PARTS,
    SCALED,
    STOPPED,
    UNDECIDED,
    UNEXPLAINED,
    Outcome,
    ReplicaFollow,
    worst_of,
)
from servanda.traces.serialization import to_plain

STALE_REPLICAS = "stale_replicas"
PREFIX = "servanda/follow/"


@dataclass(frozen=True)
class FollowStep:
    """Whether the engines follow the trainer, after one sync.

    Args:
        version: number of updates of the trainer.
        replicas: engine -> the conclusion about it.
        tokens: probe tokens.
        notes: remarks, such as scores that were discarded.
    """

    version: int
    replicas: Mapping[str, ReplicaFollow]
    tokens: int
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> ReplicaFollow:
        """The conclusion that decides: by outcome, then by the distance of the slope from 1."""
        return self.replicas[worst_of(self.replicas)]

    @property
    def outcome(self) -> Outcome:
        return self.worst.outcome

    @property
    def exit_code(self) -> int:
        """0 holds, 1 violated, 3 inconclusive, 4 error."""
        return EXIT_CODES[self.outcome]

    @property
    def slope(self) -> float:
        """The slope of the engine that decides; NaN if it is not known."""
        return self.worst.slope.value

    @property
    def interval(self) -> tuple[float, float]:
        """Its interval, valid at all syncs of the run at once; infinite if nothing is known."""
        return self.worst.slope.low, self.worst.slope.high

    @property
    def cause(self) -> str:
        """The cause, which all violated engines share; "" if none is violated.

        never_synced, stopped, late, dropped, scaled, part, undecided, unexplained; stale_replicas
        if only some of several engines are violated.
        """
        causes = {found.cause for found in self._violated.values()}
        if not causes:
            return ""
        if len(self._violated) < len(self.replicas):
            return STALE_REPLICAS
        return causes.pop() if len(causes) == 1 else UNEXPLAINED

    @property
    def _violated(self) -> dict[str, ReplicaFollow]:
        return {n: found for n, found in self.replicas.items() if found.outcome == "violated"}

    @property
    def sentence(self) -> str:
        """The conclusion in words."""
        if self._violated:
            found = next(iter(self._violated.values()))
            if self.cause != STALE_REPLICAS:
                return _sentence(found)
            these = ", ".join(self._violated)
            return (
                f"{len(self._violated)} of {count(len(self.replicas), 'replica')} ({these}): "
                + (
                    _sentence(found)
                    if len({f.cause for f in self._violated.values()}) == 1
                    else "they do not follow"
                )
            )
        return _sentence(self.worst)

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers to log; those that were not measured are absent."""
        found = self.worst
        numbers = {
            "exit_code": float(self.exit_code),
            "slope": found.slope.value,
            "low": found.slope.low,
            "high": found.slope.high,
            "moved_nats": found.slope.moved_nats,
            "missing_tokens": float(sum(f.missing for f in self.replicas.values())),
        }
        if len(self.replicas) > 1:
            numbers["replicas_violated"] = float(len(self._violated))
        return {PREFIX + name: n for name, n in numbers.items() if math.isfinite(n)}

    def to_plain(self) -> dict[str, Any]:
        """Plain data for a state file."""
        return to_plain(
            {
                "version": self.version,
                "outcome": self.outcome,
                "slope": self.slope,
                "low": self.interval[0],
                "high": self.interval[1],
                "since": self.worst.since,
                "cause": self.cause,
                "sentence": self.sentence,
                "replicas": {n: f.outcome for n, f in self.replicas.items()},
            }
        )

    @property
    def numbers(self) -> str:
        """The slope with its interval, and the versions that it covers; "" if not known."""
        found = self.worst
        if not math.isfinite(found.slope.high):
            return ""
        return (
            f"slope {found.slope.value:.2f} [{found.slope.low:.2f}, {found.slope.high:.2f}] "
            f"since version {found.since}"
        )

    def __str__(self) -> str:
        lines = [f"{GLYPH[self.outcome]} version {self.version}: {self.sentence}"]
        found = self.worst
        if self.numbers:
            lines.append(
                f"  {self.numbers}; moved {found.slope.moved_nats:.2g} nats, unexplained "
                f"{found.slope.rest_nats:.2g} nats, {self.tokens:,} tokens"
            )
        missing = sum(f.missing for f in self.replicas.values())
        if missing:
            lines.append(f"  {count(missing, 'score')} missing")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def _sentence(found: ReplicaFollow) -> str:
    if found.outcome == "error":
        return "no probe token has scores of both sides"
    if found.outcome == "holds":
        return "the engine follows the trainer"
    if found.outcome == "inconclusive":
        if not found.slope.moved_nats:
            return "the trainer's scores have not changed yet"
        needs = "" if found.needs is None else f": about {count(found.needs, 'more sync')}"
        return f"not enough movement yet{needs}"
    return {
        NEVER: "no sync has reached the engine, while the trainer has changed",
        STOPPED: f"the engine holds the weights of version {found.detail}: no later sync arrived",
        LATE: f"the engine is late by {found.detail}: it holds the weights of an earlier sync",
        DROPPED: "every other sync does not reach the engine",
        SCALED: f"the engine changes by {found.slope.value:.2f} times the trainer's change",
        PARTS: f"part of the weights does not reach the engine: {found.detail}",
        UNDECIDED: f"the engine does not follow; further syncs decide between: {found.detail}",
    }.get(found.cause, "the engine does not follow, and no known cause explains its scores")
