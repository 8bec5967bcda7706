# Detects whether a path is a dump or a monitor's state, once it has content.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from servanda.errors import ContractError
from servanda.rl.dumps.formats import FORMATS
from servanda.rl.dumps.storage import answering
from servanda.rl.watch.dump import DumpSource, WatchOptions
from servanda.rl.watch.monitor_state import MonitorSource, nothing, states_in
from servanda.rl.watch.step import Source, WatchedStep


class DetectedSource:
    """A dump or a monitor's state, detected.

    Raises:
        ContractError: it is both, or does not match the options.
    """

    def __init__(self, options: WatchOptions) -> None:
        self.path, self._reference = options.path, options.reference
        with answering(self.path):
            self.kind, self.missing, self.left = "", nothing(self.path), ""
        # validates the options before there is any file
        self._dump = DumpSource(options)
        of_a_dump = (options.format, options.preset, options.contract)
        self._source: Source | None = None
        remote = not isinstance(self.path, Path)  # a monitor writes its state to a folder
        if remote or options.unsafe_pickles or any(option is not None for option in of_a_dump):
            self._follow(self._dump)

    def _follow(self, source: Source) -> None:
        self._source, self.kind = source, source.kind

    def poll(self, *, final: bool) -> Iterator[WatchedStep]:
        source = self._source or self._detected()
        if source is None:
            return
        for step in source.poll(final=final):
            self._follow(source)  # the source that yields a step is the right one
            self.missing, self.left = source.missing, source.left
            yield step
        self.missing, self.left = source.missing, source.left

    def _detected(self) -> Source | None:
        path = self.path
        states = states_in(path) if path.exists() else []
        if not states:
            if path.exists():  # the files may become a dump
                return self._dump
            self.missing = nothing(path)
            return None
        if path.is_dir():
            sniffed = {name: FORMATS[name].sniff(path) for name in FORMATS.names()}
            dumps = [name for name, found in sniffed.items() if found is not None and found.sure]
            if dumps:
                raise ContractError(
                    f"{str(path)!r} holds a monitor's state, {states[0].name}, and a dump of "
                    f"{FORMATS[dumps[0]].framework}",
                    hint=f"name one: the file {states[0].name}, or --as {dumps[0]}",
                )
        return MonitorSource(path, self._reference)

    def head(self) -> tuple[str, ...]:
        return self._source.head() if self._source else ()

    def to_plain(self) -> dict[str, Any]:
        return self._source.to_plain() if self._source else {}

    def resume(self, state: Mapping[str, Any]) -> None:
        source = self._source or self._detected() or self._dump
        self._follow(source)
        source.resume(state)
