# What a rule of lint says: which value, what was found, the next move.

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from servanda.marks import Path
from servanda.registry import did_you_mean

_SHOWN = 60  # characters of a value that a message repeats


class Finding(NamedTuple):
    """A problem before it has a place.

    Args:
        key: the place is that of the key; bare: its line is not shown, for it may hold a secret.
    """

    path: Path
    message: str
    hint: str = ""
    key: bool = False
    bare: bool = False


def quoted(value: object) -> str:
    """A value as a message shows it: in quotes if it is text, and not for pages."""
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN else f"{value[:_SHOWN]}…")
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def nearest(name: object, known: Collection[str]) -> str:
    """did_you_mean of what may be no text, or a very long one."""
    return did_you_mean(str(name)[:_SHOWN], known)
