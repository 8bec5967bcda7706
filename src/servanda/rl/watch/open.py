# Opening: whether a path is a dump or a monitor's state, found out once something is there.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from servanda.errors import ContractError
from servanda.rl.dumps.formats import FORMATS
from servanda.rl.watch.contract import Asked
from servanda.rl.watch.dump import DumpSource
from servanda.rl.watch.monitor_state import MonitorSource, nothing, states_in
from servanda.rl.watch.step import Seen, Source


class Found:
    """Whichever of the two a path turns out to be.

    Raises:
        ContractError: it is both, or what was asked for fits neither.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self._missing, self._left = nothing(asked.path), ""
        # checks the options before anything is there
        self._dump = DumpSource(asked)
        of_a_dump = (asked.format, asked.preset, asked.contract, asked.unsafe_pickles or None)
        self._source: Source | None = (
            None if all(option is None for option in of_a_dump) else self._dump
        )

    @property
    def kind(self) -> str:
        return self._source.kind if self._source else ""

    @property
    def missing(self) -> str:
        return self._source.missing if self._source else self._missing

    @property
    def left(self) -> str:
        return self._source.left if self._source else self._left

    def look(self, *, final: bool) -> Iterator[Seen]:
        source = self._source or self._decided()
        if source is None:
            return
        for seen in source.look(final=final):
            self._source = source  # what gave a step is what it is
            yield seen
        self._missing, self._left = source.missing, source.left

    def _decided(self) -> Source | None:
        path = self.asked.path
        states = states_in(path) if path.exists() else []
        if not states:
            if path.exists():  # what is there may become a dump
                return self._dump
            self._missing = nothing(path)
            return None
        if path.is_dir():
            dumps = [n for n, f in FORMATS.items() if (s := f.sniff(path)) is not None and s.sure]
            if dumps:
                raise ContractError(
                    f"{str(path)!r} holds a monitor's state, {states[0].name}, and a dump of "
                    f"{FORMATS[dumps[0]].framework}",
                    hint=f"name one: the file {states[0].name}, or --as {dumps[0]}",
                )
        return MonitorSource(path)

    def head(self) -> tuple[str, ...]:
        return self._source.head() if self._source else ()

    def kept(self) -> dict[str, Any]:
        return self._source.kept() if self._source else {}

    def resume(self, kept: Mapping[str, Any]) -> None:
        if self._source is None:
            self._source = self._decided() or self._dump
        self._source.resume(kept)
