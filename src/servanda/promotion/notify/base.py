# What takes effects, and what it is given.

from __future__ import annotations

from typing import Any, Literal, Protocol, get_args

from servanda.promotion.state import Effect
from servanda.traces.serialization import to_plain

Kind = Literal["route", "notify", "page"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Sink(Protocol):
    """A receiver of effects, which may be given one more than once, with the same key."""

    @property
    def name(self) -> str:
        """In the ledger: the same at every call, another for another receiver, and no secret."""
        ...

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """That it is given; the others are not for it."""
        ...

    def deliver(self, effect: Effect) -> None:
        """Give it away in one try; when this returns, it was taken.

        Raises:
            Busy: it was not taken now, and the same again may be.
            MeasurementError: it was not taken.  No text of either holds a secret.
        """
        ...


def message(effect: Effect) -> dict[str, Any]:
    """An effect as a program gets it: kind and key, then the body."""
    head = {"kind": effect.kind, "key": effect.key}
    return {**head, **to_plain(effect.body), **head}
