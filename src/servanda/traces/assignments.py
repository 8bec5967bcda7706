# Assignments: which pool served a user first on a step, in the traffic log.
#
# A log of requests to the infer kernel does not show whom stable served, so the proxy also writes a
# line for the first request of each user on a step, by either pool.  It stands between the lines
# of requests, and differs from them by its key "pool".  docs/how-to/traffic.md has the fields.

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from servanda.errors import EvidenceError, Where
from servanda.registry import did_you_mean
from servanda.traces.json_fields import (
    LineError,
    check_keys,
    json_text,
    labels_of,
    name_of,
    parse_line,
    read_lines,
    text_of,
    time_of,
    whole_of,
)

MARK = "pool"  # key of an assignment that a request does not have
FAILOVER, BREAKER = "failover", "breaker"
_POOLS, _CAUSES = ("infer", "stable"), (FAILOVER, BREAKER)
_KNOWN = ("run", "leg", "at", "key", MARK, "labels", "prompt_tokens", "because", "apart")
_A_LINE = (
    'an assignment is {"run", "leg", "at", "key", "pool"}, with "pool" infer or stable; see '
    "docs/how-to/traffic.md"
)


@dataclass(frozen=True)
class Assignment:
    """The pool of one user's first request on a step.

    Args:
        at: time of the decision, unix seconds.
        key: keyed hash of the user, or of whatever the split is keyed by.
        pool: the pool that served it, infer or stable.
        prompt_tokens: length of its prompt; None if unknown.
        because: why stable served a request that the split gave to infer: "failover", "breaker";
            "" otherwise.
        apart: why the share of the step does not apply to it, such as a pinned slice; "" if it
            does.
    """

    run: str
    leg: str
    at: float
    key: str
    pool: str
    labels: Mapping[str, str] = field(default_factory=dict)
    prompt_tokens: int | None = None
    because: str = ""
    apart: str = ""

    @property
    def hit(self) -> bool:
        return self.pool == "infer"


def is_assignment(data: Mapping[str, Any]) -> bool:
    """Whether a line is an assignment, and not a request."""
    return MARK in data and "index" not in data


def read_assignments(text: str, file: str) -> tuple[Assignment, ...]:
    """The assignments of one file, in its order; other lines are skipped.

    Raises:
        EvidenceError: invalid lines, each with its place.
    """

    def read(line: str, _: Where) -> Assignment | None:
        if f'"{MARK}"' not in line:  # most lines are requests, which are parsed elsewhere
            return None
        data = parse_line(line, "line")
        return assignment_of(data) if is_assignment(data) else None

    found = read_lines(text, file, read, _A_LINE, EvidenceError, growing=True)
    return tuple(one for one in found if one is not None)


def assignment_of(data: Mapping[str, Any]) -> Assignment:
    """The assignment of one parsed line.

    Raises:
        LineError: not a valid assignment.
    """
    check_keys(data, "an assignment", _KNOWN, ("run", "leg", "at", "key", MARK))
    pool, because = data[MARK], text_of(data.get("because"), "'because'")
    if pool not in _POOLS:
        raise LineError(f"'pool' is {json_text(pool)}, and a user is served by infer or stable")
    if because and because not in _CAUSES:
        raise LineError(f"'because' is {json_text(because)}", did_you_mean(because, _CAUSES))
    if because and pool == "infer":
        raise LineError(
            f"'because' is {because!r}, and infer served the request",
            "write it only where stable served a request that the split gave to infer",
        )
    tokens = data.get("prompt_tokens")
    return Assignment(
        run=name_of(data["run"], "'run'"),
        leg=name_of(data["leg"], "'leg'"),
        at=time_of(data["at"]),
        key=name_of(data["key"], "'key'"),
        pool=pool,
        labels=labels_of(data.get("labels")),
        prompt_tokens=None if tokens is None else whole_of(tokens, "'prompt_tokens'"),
        because=because,
        apart=text_of(data.get("apart"), "'apart'"),
    )


def first_of_each_user(
    assignments: Iterable[Assignment], run: str, leg: str
) -> tuple[Assignment, ...]:
    """The first assignment of each user on a step, in the order of the log.

    Later requests of a user follow the same place in the split, so they add no evidence.  A line
    that repeats the first one, of the same time, with the cause "failover" corrects it.
    """
    first: dict[str, Assignment] = {}
    for one in assignments:
        if (one.run, one.leg) != (run, leg):
            continue
        known = first.setdefault(one.key, one)
        if one.because == FAILOVER and one.at == known.at:
            first[one.key] = one
    return tuple(first.values())
