# The story of a run: the entries of a ledger, told again by the very functions that made them.
#
# Nothing that was decided is read back as a flag: an entry keeps what was found, or who did
# what, and where the run stands follows.  What an entry says of that itself is for people, and
# is held against what follows: a ledger in which the two differ was not written by Servanda.

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from servanda._version import __version__
from servanda.contract.identity import EvidenceKey
from servanda.contract.stages import Leg
from servanda.errors import EvidenceError, Problem
from servanda.promotion.advance import Moved, advance, begin
from servanda.promotion.api import beginning_of
from servanda.promotion.ledger.entry import Entry, Ledger, LedgerError
from servanda.promotion.operator import approve, override, roll_back
from servanda.promotion.state import Finding, Override, State, leg_of
from servanda.traces.serialization import from_plain, to_plain

TOLD = "told"  # an effect that was delivered: it changes nothing
GATEWAY = "gateway-opened"  # the first entry of a run that no promotion wrote
_WORDS = {"why", "asked"}  # parts of a state that are texts for people
_ROUTED = ("share", "mirror", "sample", "status", "leg", "to")  # what programs read of an effect


@dataclass(frozen=True)
class Look:
    """One look at a leg, and where the run stood after it."""

    at: float
    leg: Leg
    finding: Finding
    state: State


@dataclass(frozen=True)
class Story:
    """A run as its entries tell it.

    Args:
        opened: the body of the first entry: contract, kernels, fingerprints.
        last: number of the latest entry; what is appended comes after it.
        seq: of the latest entry in the whole ledger.
    """

    run: str
    opened: Mapping[str, Any]
    course: tuple[Leg, ...]
    state: State
    looks: tuple[Look, ...] = ()
    last: int = 0
    seq: int = 0

    @property
    def leg(self) -> Leg:
        return leg_of(self.course, self.state)

    def reached(self, stage: str) -> bool:
        """Whether the run is at a stage, or was and went on; nothing is where it halts or ended."""
        if self.state.ended or self.state.status == "halted":
            return False
        return stage in [leg.stage for leg in self.course[: self.state.leg + 1]]


def story_of(ledger: Ledger, run: str) -> Story | None:
    """A run's story; None where the ledger has no such run of a promotion.

    Raises:
        LedgerError: an entry does not follow from those before it, or cannot be read.
    """
    entries = ledger.entries(run)
    first = next(entries, None)
    if first is None or first.kind == GATEWAY:
        return None
    return retold(itertools.chain([first], entries))


def refreshed(ledger: Ledger, story: Story) -> Story:
    """The story with what was written since."""
    return retold(ledger.entries(story.run, since=story.seq), story)


def stories(ledger: Ledger, *, beginning: str = "") -> Iterator[Story]:
    """The runs whose names begin with a text, in the order in which they were opened."""
    for run in ledger.runs():
        found = story_of(ledger, run) if run.startswith(beginning) else None
        if found is not None:
            yield found


def stories_of(ledger: Ledger, contract: str) -> tuple[Story, ...]:
    """The runs of every version of a contract, by its name; no other run is read."""
    found = stories(ledger, beginning=beginning_of(contract))
    return tuple(story for story in found if story.opened["contract"]["name"] == contract)


def disagreements(ledger: Ledger) -> tuple[Problem, ...]:
    """Runs of which an entry does not follow from those before it."""
    found: list[Problem] = []
    for run in ledger.runs():
        try:
            story_of(ledger, run)
        except LedgerError as error:
            found += error.problems
    return tuple(found)


def retold(entries: Iterable[Entry], story: Story | None = None) -> Story:
    """The story of one run's entries, in order.

    Args:
        story: as it was before them; None: they are all.

    Raises:
        LedgerError: an entry does not follow from those before it, or cannot be read.
    """
    looks = [*story.looks] if story is not None else []
    for entry in entries:
        try:
            story = _next(story, entry, looks)
        except (EvidenceError, KeyError, TypeError, ValueError, AttributeError) as error:
            said = str(error).split("\n", 1)[0]
            raise _refused(entry, f"cannot be told again: {said or type(error).__name__}") from None
    if story is None:
        raise LedgerError("a run without entries has no story")
    return replace(story, looks=tuple(looks))


def kept(moved: Moved) -> dict[str, Any]:
    """What an entry says of where the run stands, and of what follows."""
    state, effects = moved
    said = to_plain(state)
    del said["key"]
    told = to_plain(effects)
    return {"why": state.why, "state": said, "effects": told, "servanda": __version__}


def _next(story: Story | None, entry: Entry, looks: list[Look]) -> Story:
    """The story after an entry, but for its looks: those are appended to."""
    body = entry.body
    if story is None:
        if entry.kind != "opened":
            raise _refused(entry, f"is the first of its run and of kind {entry.kind!r}")
        course = tuple(from_plain(Leg, leg) for leg in body["course"])
        key = from_plain(EvidenceKey, body["key"])
        moved = begin(entry.run, key, course, now=entry.at)
        _compare(entry, moved)
        return Story(entry.run, body, course, moved[0], last=entry.n, seq=entry.seq)
    if entry.kind == TOLD:
        return replace(story, last=entry.n, seq=entry.seq)
    finding = from_plain(Finding, body["finding"]) if entry.kind == "looked" else None
    moved = _again(story, entry, finding)
    _compare(entry, moved)
    if finding is not None:
        looks.append(Look(entry.at, story.leg, finding, moved[0]))
    return replace(story, state=moved[0], last=entry.n, seq=entry.seq)


def _again(story: Story, entry: Entry, finding: Finding | None) -> Moved:
    body, course, state = entry.body, story.course, story.state
    if finding is not None:
        return advance(course, state, finding, now=entry.at)
    signed = {"actor": entry.actor, "now": entry.at}
    if entry.kind == "approved":
        return approve(course, state, reason=body["reason"], **signed)
    if entry.kind == "rolled_back":
        return roll_back(course, state, reason=body["reason"], **signed)
    if entry.kind == "overrode":
        return override(course, state, from_plain(Override, body["override"]), now=entry.at)
    raise _refused(entry, f"is of a kind that nobody knows, {entry.kind!r}")


def _compare(entry: Entry, moved: Moved) -> None:
    """Hold what an entry says of where the run stands against what follows.

    Of what another version wrote only what was decided counts: its words may be others.
    """
    said, follows = entry.body, kept(moved)
    if said.get("servanda") != __version__:
        said, follows = _decided(said, follows), _decided(follows, said)
    names = [name for name in follows if said.get(name) != follows[name]]
    if names:
        raise _refused(
            entry, f"says another {' and '.join(names)} than follow from the entries before it"
        )


def _decided(body: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """What an entry says without its words, as far as the other one says it too."""
    known = {*other["state"]} - _WORDS
    state = {name: value for name, value in body["state"].items() if name in known}
    effects = [
        (one["kind"], one["key"], *(one["body"].get(name) for name in _ROUTED))
        for one in body["effects"]
    ]
    return {"state": state, "effects": effects}


def _refused(entry: Entry, what: str) -> LedgerError:
    wrote = entry.body.get("servanda", "of no version")
    return LedgerError(
        f"entry {entry.seq} (number {entry.n} of run {entry.run}) {what}",
        hint="the ledger was edited, or another version decides otherwise: it was written by "
        f"servanda {wrote}, and this is {__version__}",
    )
