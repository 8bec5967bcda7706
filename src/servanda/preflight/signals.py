# Signals during a drill: the first one unwinds it, later ones wait until the weights are back.

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Terminated(BaseException):
    """SIGTERM came."""


class Signals:
    """Ctrl-C and SIGTERM, turned into exceptions; handlers are put back as they were.

    After one of them was raised, or after `shield`, further ones wait for `expose`.  A SIGTERM
    is sent once more at the end, to whoever it was meant for.  Outside the main thread Python
    has no say in signals, and this does nothing.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._came: list[int] = []
        self._waiting: list[int] = []
        self._shielded = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if signal.SIGTERM in self._came:
            signal.raise_signal(signal.SIGTERM)

    def shield(self) -> None:
        """From now on they wait."""
        self._shielded = True

    def expose(self) -> None:
        """What waited is raised now."""
        self._shielded = False
        if self._waiting:
            self._raise(self._waiting.pop(0))

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._came.append(number)
        if self._shielded:
            self._waiting.append(number)
        else:
            self._raise(number)

    def _raise(self, number: int) -> None:
        self._shielded = True
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated
