# A registry: name -> thing, with a did-you-mean for names that are not there, and with the plug-ins
# of installed packages; and how messages show what was found.

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from servanda.errors import MeasurementError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
_SHOWN = 60  # characters of a value that a message repeats


def did_you_mean(name: object, known: Collection[str]) -> str:
    """A hint for a name that is not known, which may be no text: the nearest one, or all of them.

    >>> did_you_mean("k33", ["k3_nats", "tv"])
    "did you mean 'k3_nats'?"
    >>> did_you_mean("zebra", ["tv", "osc"])
    'known: osc, tv'
    """
    import difflib  # only an error needs it

    name = str(name)[:_SHOWN]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    near = near or [k for k in sorted(known) if len(name) > 1 and k.startswith(name[:2])][:1]
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(known))}"


def quoted(value: object) -> str:
    """A value as a message shows it: in quotes if it is text, and not for pages."""
    return repr(cut(value, _SHOWN)) if isinstance(value, str) else cut(repr(value), _SHOWN)


def cut(text: str, longest: int) -> str:
    """A text of at most `longest` characters; what is cut off is an ellipsis."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


class Registry(Mapping[str, T]):
    """Things of one kind under their names; filled by decorators, read as a mapping.

    A lookup of a name that is not registered asks the installed packages for a plug-in of that
    name, and imports it. Iterating has what is registered now; `names` has the plug-ins too.

    Args:
        home: the package whose import fills it; imported when names are looked up.
        plugins: group of the entry points by which installed packages offer more, such as
            "servanda.metrics"; "" if they cannot. The name of an entry point is that of the thing,
            its value is a module, whose import registers the thing.
        aside: another registry whose plug-ins cannot have the names of this one.
    """

    def __init__(
        self, noun: str, home: str = "", *, plugins: str = "", aside: Registry[Any] | None = None
    ) -> None:
        self.noun, self._home, self.group, self._aside = noun, home, plugins, aside
        self._things: dict[str, T] = {}
        self._reserved: set[str] = set()
        self._offers: dict[str, list[EntryPoint]] | None = None

    def add(self, name: str, thing: T) -> T:
        if name in self._things:
            raise ValueError(f"a {self.noun} named {name!r} is registered already")
        if self._aside is not None:
            self._aside.reserve(name)
        self._things[name] = thing
        return thing

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator form of `add`."""
        return lambda thing: self.add(name, thing)

    def reserve(self, *names: str) -> None:
        """Names that no plug-in has, because they mean something else where this one is asked."""
        self._reserved |= {*names}

    def hint(self, name: str) -> str:
        return did_you_mean(name, self.names())

    def names(self) -> tuple[str, ...]:
        """Every name: those that are registered, then those of plug-ins, which are not imported."""
        return (*self._filled(), *(name for name in self._offered() if name not in self._things))

    @property
    def registered(self) -> Mapping[str, T]:
        """What is registered now; no plug-in is looked for."""
        return self._filled()

    def package_of(self, name: str) -> str | None:
        """The installed package that offers a name; None of Servanda's own, or if none does.

        The package is not imported.
        """
        # the plug-in of a thing that is registered was looked for before
        registered = name in self._reserved or name in self._filled()
        offers = ((self._offers or {}) if registered else self._offered()).get(name)
        return _package(offers[0]) if offers else None

    def load(self, name: str) -> bool:
        """Import the plug-in of a name that is not registered; whether the name is registered now.

        Raises:
            MeasurementError: the plug-in cannot be imported, does not register the name, or two
                packages offer it.
        """
        if name in self._filled():
            return True
        offers = self._offered().get(name, [])
        if not offers:
            return False
        package, module = _package(offers[0]), offers[0].module
        what = f"{self.noun} {name!r} of the package {package!r}"
        if len({_package(offer) for offer in offers}) > 1:
            both = " and ".join(sorted(repr(_package(offer)) for offer in offers))
            raise MeasurementError(
                f"two installed packages offer the {self.noun} {name!r}: {both}",
                hint="uninstall one of them",
            )
        try:
            import_module(module)
        except Exception as error:
            raise MeasurementError(
                f"{what} cannot be imported: {type(error).__name__}: {error}",
                hint=f"pip install what {module!r} needs, or pip uninstall {package}",
            ) from error
        if name not in self._things:
            raise MeasurementError(
                f"{what} is not there: its module {module!r} registers no {self.noun} {name!r}",
                hint=f"its entry point in the group {self.group!r} names a module that does",
            )
        return True

    def _filled(self) -> dict[str, T]:
        if self._home:
            import_module(self._home)
        return self._things

    def _offered(self) -> dict[str, list[EntryPoint]]:
        """The plug-ins by name, without those whose names are Servanda's own."""
        if not self.group:
            return {}
        if self._offers is None:
            from importlib.metadata import entry_points  # reads the metadata of every package

            own = {*self._filled(), *self._reserved}
            self._offers = {}
            for entry in entry_points(group=self.group):
                if entry.name not in own:
                    self._offers.setdefault(entry.name, []).append(entry)
        return self._offers

    def __getitem__(self, name: str) -> T:
        things = self._filled()
        if name not in things and name not in self._reserved:
            self.load(name)
        return things[name]

    def __contains__(self, name: object) -> bool:
        return name in self._filled() or (
            bool(self.group) and name not in self._reserved and name in self._offered()
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._filled())

    def __len__(self) -> int:
        return len(self._filled())


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.module.partition(".")[0]
