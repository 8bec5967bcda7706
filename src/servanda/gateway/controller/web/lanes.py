# The history of a slice's states as a swim lane: one band per state, distinguished by shape and
# words as well as by colour.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from servanda.gateway.controller.status import ControllerStatus, SliceStatus
from servanda.gateway.controller.web.charts import Span
from servanda.gateway.controller.web.format import clock
from servanda.gateway.controller.web.phrases import GLYPH, place
from servanda.gateway.routing.model import AWAY, STATUSES
from servanda.report.format import line

_CHARACTER = 7.5  # width of a character of a band's label, px
_NARROW, _WIDE = 330, 900  # px that a lane has at least, on a phone and beside its name
_SAID = 5  # states that are listed below a lane


@dataclass(frozen=True)
class Band:
    """One state: its start and width, in per cent.

    Args:
        kind: a status, "pinned" or "other"; would: the state was decided and not acted on.
        label: the words that fit; wide: whether they fit beside the slice's name alone.
    """

    x: float
    width: float
    kind: str
    would: bool
    label: str
    wide: bool


@dataclass(frozen=True)
class Lane:
    """The states of one slice, oldest first; says: the same as a text."""

    name: str
    bands: tuple[Band, ...]
    says: str


@dataclass(frozen=True)
class _State:
    begin: float
    kind: str
    would: bool
    word: str


def lane(slice_: SliceStatus, status: ControllerStatus, axis: Span) -> Lane:
    """The states of a slice within the axis, as far as they are known."""
    states = list(_states(slice_, status))
    ends = [*(state.begin for state in states[1:]), axis.end]
    kept = [(one, end) for one, end in zip(states, ends, strict=True) if end > axis.begin]
    bands = tuple(_band(axis, state, end) for state, end in kept)
    parts = [
        f"{one.word} since {'before ' * (one.begin < axis.begin)}"
        f"{clock(max(one.begin, axis.begin), axis.end)}"
        for one, _ in kept[-_SAID:]
    ]
    more = ["…"] if len(kept) > _SAID else []
    return Lane(place(slice_.name, 60), bands, " → ".join([*more, *parts]) or "not known")


def _states(slice_: SliceStatus, status: ControllerStatus) -> Iterator[_State]:
    changes = [t for t in status.transitions if t.slice == slice_.name]
    if not changes:
        text = slice_.status
        if slice_.pin is not None:
            text = f"{text}, pinned to {slice_.pin.to}"
        would = slice_.status in (*AWAY, "recovering") and not slice_.acts
        yield _state(slice_.since, text, would)
        return
    # nothing is known from before the first transition that is still listed
    known = status.transitions[0].at if status.moves > len(status.transitions) else float("-inf")
    last = _state(known, changes[0].before, _leaves(changes[0].before) and not slice_.acts)
    would = last.would
    yield last
    for change in changes:
        away = change.before.partition(",")[0] in AWAY
        would = _leaves(change.after) and not change.acted and (would or not away)
        new = _state(change.at, change.after, would)
        if (new.word, new.would) != (last.word, last.would):
            yield new
        last = new


def _leaves(text: str) -> bool:
    return text.partition(",")[0] not in ("active", "suspect")


def _state(begin: float, text: str, would: bool) -> _State:
    status, _, pin = text.partition(", ")
    if pin.endswith(("to stable", "to infer")):
        return _State(begin, "pinned", False, line(pin, 40))
    kind = status if status in STATUSES else "other"
    return _State(begin, kind, would, f"{'would be ' * would}{line(status, 40)}")


def _band(axis: Span, state: _State, end: float) -> Band:
    x = 100 * axis.at(state.begin)
    width = 100 * axis.at(end) - x
    label, wide = "", False
    for text in (state.word, GLYPH.get(state.kind, "●")):
        px = _CHARACTER * len(text) + 8
        if width / 100 * _WIDE >= px:
            label, wide = text, width / 100 * _NARROW < px
            break
    return Band(round(x, 2), round(width, 2), state.kind, state.would, label, wide)
