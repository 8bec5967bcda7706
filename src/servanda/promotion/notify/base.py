# The interface of notifiers.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, get_args

from servanda.promotion.state import Effect
from servanda.registry import Registry
from servanda.traces.serialization import to_plain

Kind = Literal["route", "notify", "page"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Sink(Protocol):
    """A notifier; it may receive a notification more than once, with the same key."""

    @property
    def name(self) -> str:
        """Its name in the ledger: stable, unique per receiver, and no secret."""
        ...

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of notifications that it receives."""
        ...

    def deliver(self, effect: Effect) -> None:
        """Deliver in one attempt; on return it was accepted.

        Raises:
            Busy: it was not accepted now; a retry may succeed.
            MeasurementError: it was not accepted.  Neither text contains a secret.
        """
        ...


# of installed packages; a notifier takes the value of its --notify NAME=VALUE
NOTIFIERS: Registry[Callable[[str], Sink]] = Registry("notifier", plugins="servanda.notifiers")
OWN = ("webhook", "slack", "command")  # which have options of their own
NOTIFIERS.reserve(*OWN)


def message(effect: Effect) -> dict[str, Any]:
    """The JSON form of a notification: kind and key, then the body."""
    head = {"kind": effect.kind, "key": effect.key}
    return {**head, **to_plain(effect.body), **head}
