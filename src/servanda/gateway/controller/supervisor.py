# A controller as a child process of a gateway: started, monitored, and restarted if it dies.

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from urllib.parse import urlsplit

from servanda.errors import ContractError, MeasurementError, ServandaError
from servanda.gateway.controller.process import Say, Settings

# not `-m`, which would put the current folder first among the places to import from
_CHILD = "import sys; sys.path.pop(0); from servanda.gateway.controller.process import main; main()"
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # before it is started again
_END_S = 20.0  # for a normal exit


class Supervisor:
    """The controller of one gateway, in a separate process.

    It ends with its parent, because its standard input is closed then.  If it dies, it is
    restarted, except when the first process reports that its settings are invalid: a restart
    would fail the same way.

    Args:
        say: prints a log line, from any thread.
    """

    def __init__(self, settings: Settings, say: Say) -> None:
        self._settings, self._say = settings, say
        self._process: subprocess.Popen[str] | None = None
        self._closing = threading.Event()
        self._was_ready = False
        self._failed: ServandaError | None = None  # last error of the process
        self._refusal: ServandaError | None = None
        self._lock = threading.RLock()  # requested by a signal in between
        self._thread = threading.Thread(target=self._supervise, name="leader", daemon=True)
        self._on_ready: Say = lambda _: None
        self._on_refused: Callable[[], None] = lambda: None
        self.url = ""
        self.restarts = 0

    def start(self, ready: Say, refused: Callable[[], None]) -> None:
        """Start it, and return at once.

        Args:
            ready: called with its URL once the first process accepts gateways; an exception is a
                refusal.
            refused: called if there will be no controller; `check` raises the reason.  Both are
                called from a thread.
        """
        self._on_ready, self._on_refused = ready, refused
        self._thread.start()

    def where(self) -> str:
        """The URL of its listener.

        Raises:
            MeasurementError: it has no address yet.
        """
        if not self.url:
            raise MeasurementError("the leader is being started, and has no address yet")
        return self.url

    def check(self) -> None:
        """Raise the reason if there will be no controller.

        Raises:
            ContractError: the contract or the keys are wrong.
            MeasurementError: it could not start.
        """
        if self._refusal is not None:
            raise self._refusal

    def reload(self) -> None:
        """Make it reload the contract; a process that is starting reads it anyway."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.write("reload\n")
                self._process.stdin.flush()

    def close(self) -> None:
        """End the process, by force if it does not end."""
        self._closing.set()
        self._end()
        if not self._thread.is_alive():
            return
        self._thread.join(_END_S)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join()

    def _supervise(self) -> None:
        died = 0  # failures in a row without being ready in between
        while not self._closing.is_set():
            ready, code, why = self._once()
            if self._closing.is_set():
                return
            if self._failed is not None and not self._was_ready and not self.restarts:
                self._refusal = self._failed
                self._on_refused()
                return
            died = 0 if ready else died + 1
            pause = _PAUSES_S[min(died, len(_PAUSES_S) - 1)]
            if self._failed or why:
                why = f": {self._failed or why}"
            self._failed = None
            if self._was_ready:
                meanwhile = "the gateway follows the last routes until they expire"
            else:
                why = why or " before it was ready"
                meanwhile = "routing.without_snapshot decides which pool serves until it is ready"
            how = f"exit code {code}" if code >= 0 else f"signal {-code}"
            self._say(
                f"the leader ended with {how}{why}; it is started again in {pause:g} s, "
                f"and {meanwhile}"
            )
            self._closing.wait(pause)
            self.restarts += 1

    def _once(self) -> tuple[bool, int, str]:
        """Run one controller process to its end.

        Returns:
            Whether it was ready, its exit status, and the reason if no process could start.
        """
        with self._lock:
            if self._closing.is_set():
                return False, 0, ""
            try:
                process = self._process = subprocess.Popen(
                    [sys.executable, "-c", _CHILD],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    errors="replace",  # output of a library
                    start_new_session=True,  # the parent handles Ctrl-C
                )
            except OSError as error:  # memory may be available later
                return False, 1, f"no process can be started: {error.strerror or error}"
            assert process.stdin and process.stdout
            with contextlib.suppress(OSError):
                process.stdin.write(json.dumps(asdict(self._settings)) + "\n")
                process.stdin.flush()
        ready = False
        for line in process.stdout:
            ready = self._handle_event(line) or ready
        code = process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        return ready, code, ""

    def _handle_event(self, line: str) -> bool:
        """Handle one event; returns whether it is ready now."""
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):  # output of a library
            self._say(line.rstrip("\n"))
            return False
        if "at" in event:
            self.url = event["at"]
            # a restarted process must use the same address
            self._settings = replace(self._settings, port=urlsplit(self.url).port or 0)
        elif "say" in event:
            self._say(event["say"])
        elif "failed" in event:
            kind = ContractError if event["code"] == ContractError.exit_code else MeasurementError
            self._failed = kind(event["failed"])
        elif event.get("ready"):
            return self._on_ready_event()
        return False

    def _on_ready_event(self) -> bool:
        """Handle its first readiness; returns whether it may go on."""
        if self._was_ready:
            self._say(f"the leader is running again at {self.url}")
            return True
        try:
            self._on_ready(self.url)
        except ServandaError as error:
            self._failed = error
            self._end()
            return False
        self._was_ready = True
        return True

    def _end(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()
