# The history of a slice's states as a swim lane: one band per state, told apart by its shape and
# its words as well as by its colour.

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
    """One state: from x, so wide, in per cent.

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
    """The states of one slice, oldest first; says: the same in words."""

    name: str
    bands: tuple[Band, ...]
    says: str


def lane(slice_: SliceStatus, status: ControllerStatus, axis: Span) -> Lane:
    """The states of a slice within the axis, as far as they are known."""
    states = list(_states(slice_, status))
    ends = [*(begin for begin, *_ in states[1:]), axis.end]
    pairs = zip(states, ends, strict=True)
    kept = [(at, end, *state) for (at, *state), end in pairs if end > axis.begin]
    bands = tuple(_band(axis, *one) for one in kept)
    listed = kept[-_SAID:]
    parts = [
        f"{word} since {'before ' * (begin < axis.begin)}{clock(max(begin, axis.begin), axis.end)}"
        for begin, _, _, _, word in listed
    ]
    more = ["…"] if len(kept) > len(listed) else []
    return Lane(place(slice_.name, 60), bands, " → ".join([*more, *parts]) or "not known")


def _states(
    slice_: SliceStatus, status: ControllerStatus
) -> Iterator[tuple[float, str, bool, str]]:
    """Begin, kind, whether it was only decided, and words of each state."""
    changes = [t for t in status.transitions if t.slice == slice_.name]
    if not changes:
        text = slice_.status
        if slice_.pin is not None:
            text = f"{text}, pinned to {slice_.pin.to}"
        yield slice_.since, *_named(text, would=slice_.status in AWAY and not slice_.acts)
        return
    # of transitions that are no longer listed nothing is known
    known = status.transitions[0].at if status.moves > len(status.transitions) else float("-inf")
    would = _leaves(changes[0].before) and not slice_.acts
    last = _named(changes[0].before, would=would)
    yield known, *last
    for change in changes:
        away = change.before.partition(",")[0] in AWAY
        would = _leaves(change.after) and not change.acted and (would or not away)
        new = _named(change.after, would=would)
        if new != last:
            yield change.at, *new
        last = new


def _leaves(text: str) -> bool:
    return text.partition(",")[0] not in ("active", "suspect")


def _named(text: str, *, would: bool) -> tuple[str, bool, str]:
    status, _, pin = text.partition(", ")
    if pin.endswith(("to stable", "to infer")):
        return "pinned", False, line(pin, 40)
    kind = status if status in STATUSES else "other"
    return kind, would, f"{'would be ' * would}{line(status, 40)}"


def _band(axis: Span, begin: float, end: float, kind: str, would: bool, word: str) -> Band:
    x, width = 100 * axis.at(begin), 100 * (axis.at(end) - axis.at(begin))
    label, wide = "", False
    for text in (word, GLYPH.get(kind, "●")):
        px = _CHARACTER * len(text) + 8
        if width / 100 * _WIDE >= px:
            label, wide = text, width / 100 * _NARROW < px
            break
    return Band(round(x, 2), round(width, 2), kind, would, label, wide)
