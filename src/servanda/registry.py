# A registry: name -> thing, with a did-you-mean for names that are not there; and how messages
# show what was found.

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from typing import TypeVar

T = TypeVar("T")
_SHOWN = 60  # characters of a value that a message repeats


def did_you_mean(name: str, known: Collection[str]) -> str:
    """A hint for a name that is not known: the nearest one, or all of them.

    >>> did_you_mean("k33", ["k3_nats", "tv"])
    "did you mean 'k3_nats'?"
    >>> did_you_mean("zebra", ["tv", "osc"])
    'known: osc, tv'
    """
    import difflib  # only an error needs it

    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    near = near or [k for k in sorted(known) if len(name) > 1 and k.startswith(name[:2])][:1]
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(known))}"


def nearest(name: object, known: Collection[str]) -> str:
    """did_you_mean of what may be no text, or a very long one."""
    return did_you_mean(str(name)[:_SHOWN], known)


def quoted(value: object) -> str:
    """A value as a message shows it: in quotes if it is text, and not for pages."""
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN else f"{value[:_SHOWN]}…")
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


class Registry(Mapping[str, T]):
    """Things of one kind under their names; filled by decorators, read as a mapping.

    Args:
        home: the package whose import fills it; imported when names are looked up.
    """

    def __init__(self, noun: str, home: str = "") -> None:
        self.noun, self._home = noun, home
        self._things: dict[str, T] = {}

    def add(self, name: str, thing: T) -> T:
        if name in self._things:
            raise ValueError(f"a {self.noun} named {name!r} is registered already")
        self._things[name] = thing
        return thing

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator form of `add`."""
        return lambda thing: self.add(name, thing)

    def hint(self, name: str) -> str:
        return did_you_mean(name, self._filled())

    def _filled(self) -> dict[str, T]:
        if self._home:
            import_module(self._home)
        return self._things

    def __getitem__(self, name: str) -> T:
        return self._filled()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._filled())

    def __len__(self) -> int:
        return len(self._filled())
