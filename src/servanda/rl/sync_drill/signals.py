# Signals during a preflight test: the first unwinds it, later ones wait until the weights are
# restored.  SIGALRM ends a call that takes too long.

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from servanda.errors import MeasurementError

_LONGEST_S = 1e8  # longest time of a timer
TIMEOUT_S = 600.0  # default for a call of the trainee

# arms a timer that sends SIGALRM after some seconds, 0 disarms it; returns the rest of the previous
# timer, as signal.setitimer does
Alarm = Callable[[float], tuple[float, float]]


class Terminated(BaseException):
    """SIGTERM was received."""


class Signals:
    """Ctrl-C and SIGTERM as exceptions; the handlers are restored afterwards.

    After one of them was raised, or after `shield`, further ones wait for `expose`.  A SIGTERM is
    sent again at the end, to the original handler.  Outside the main thread Python cannot handle
    signals, and this does nothing.
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
        """Defer signals from now on."""
        self._shielded = True

    def expose(self) -> None:
        """Raise deferred signals."""
        self._shielded = False
        if self._waiting:
            self._raise(self._waiting.pop(0))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Defer signals within the block, and raise them after it, unless they were deferred."""
        before, self._shielded = self._shielded, True
        try:
            yield
        finally:
            if not before:
                self.expose()

    def taken(self) -> tuple[int, ...]:
        """The deferred signals, which are then not raised here."""
        waiting, self._waiting = self._waiting, []
        return tuple(waiting)

    def receive(self, number: int) -> None:
        """Raise or defer a signal, also one of another process."""
        if self._shielded:
            self._waiting.append(number)
        else:
            self._raise(number)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._came.append(number)
        self.receive(number)

    def _raise(self, number: int) -> None:
        self._shielded = True
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated


class TimedOut(BaseException):
    """A call exceeded its time limit; not caught by an engine's `except Exception`."""


class TimeLimit:
    """The time limit of a call.

    The call stays in its thread, which has the devices, contexts and event loops of the trainer, so
    a signal ends it: between two Python instructions, and in waits that signals interrupt.  A
    wait in a library that does not return to Python is not ended, and outside the main thread
    there is no limit.

    Args:
        seconds: above 0; None for no limit.
        alarm: the timer; the process's own by default.
    """

    def __init__(self, seconds: float | None, alarm: Alarm | None = None) -> None:
        if seconds is not None and not 0 < seconds <= _LONGEST_S:
            raise MeasurementError(
                f"the time limit of a call is {seconds:g} s",
                hint=f"write seconds above 0, at most {_LONGEST_S:g}, or 0 for no limit",
            )
        self.seconds = seconds
        self._alarm = alarm or partial(signal.setitimer, signal.ITIMER_REAL)
        self._armed = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Raise TimedOut in a call that takes longer."""
        main = threading.current_thread() is threading.main_thread()
        if self.seconds is None or not main or not hasattr(signal, "setitimer"):
            yield
            return
        began = time.monotonic()
        handler = signal.signal(signal.SIGALRM, self._handle)
        self._armed, left, every = True, 0.0, 0.0
        try:
            left, every = self._alarm(self.seconds)
            yield
        finally:
            self._armed = False
            try:
                self._alarm(0.0)
            finally:
                signal.signal(signal.SIGALRM, handler if handler is not None else signal.SIG_DFL)
            if left:  # another timer, such as a test runner's
                signal.setitimer(
                    signal.ITIMER_REAL, max(1e-3, left - time.monotonic() + began), every
                )

    def _handle(self, *_: object) -> None:
        if self._armed:
            self._armed = False
            raise TimedOut
