# A controller as a child process of a gateway: started, heard, and started again where it died.

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
_END_S = 20.0  # until it has ended by itself


class Supervisor:
    """The controller of one gateway, in a process of its own.

    It ends with its parent, however that ends: its standard input ends then.  One that dies is
    started again.  Only if the first one says why it cannot lead, it is not: what it was told is
    wrong, and the next one would say the same.

    Args:
        say: takes a line for people, from any thread.
    """

    def __init__(self, settings: Settings, say: Say) -> None:
        self._settings, self._say = settings, say
        self._process: subprocess.Popen[str] | None = None
        self._closing = threading.Event()
        self._was_ready = False
        self._failed: ServandaError | None = None  # what the last one said
        self._refusal: ServandaError | None = None
        self._lock = threading.RLock()  # of a signal, that comes in between
        self._thread = threading.Thread(target=self._supervise, name="leader", daemon=True)
        self._on_ready: Say = lambda _: None
        self._on_refused: Callable[[], None] = lambda: None
        self.url = ""
        self.restarts = 0

    def start(self, ready: Say, refused: Callable[[], None]) -> None:
        """Start it, and return at once.

        Args:
            ready: called with its URL once the first one hears gateways; what it raises is a
                refusal.
            refused: called once there will be none, for a reason that `check` raises.  Both are
                called from a thread.
        """
        self._on_ready, self._on_refused = ready, refused
        self._thread.start()

    def where(self) -> str:
        """The URL of its listener.

        Raises:
            MeasurementError: it has none yet.
        """
        if not self.url:
            raise MeasurementError("the leader is being started, and has no address yet")
        return self.url

    def check(self) -> None:
        """Raise why there is no controller, where there will be none.

        Raises:
            ContractError: the contract or the keys are wrong.
            MeasurementError: it could not start.
        """
        if self._refusal is not None:
            raise self._refusal

    def reload(self) -> None:
        """Let it read the contract again; one that is just being started reads it anyway."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.write("reload\n")
                self._process.stdin.flush()

    def close(self) -> None:
        """Let it end; made to, where it does not."""
        self._closing.set()
        self._end()
        if not self._thread.is_alive():
            return
        self._thread.join(_END_S)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join()

    def _supervise(self) -> None:
        died = 0  # times in a row, without having been ready in between
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
        """Run a controller to its end.

        Returns:
            Whether it was ready, its exit status, and why there was no process.
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
                    errors="replace",  # of a library that prints
                    start_new_session=True,  # Ctrl-C is the parent's to handle
                )
            except OSError as error:  # there may be memory again later
                return False, 1, f"no process can be begun: {error.strerror or error}"
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
        """Take what it said; whether it is ready now."""
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):  # a library that prints
            self._say(line.rstrip("\n"))
            return False
        if "at" in event:
            self.url = event["at"]
            # the next one has to be where gateways look for it
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
        """It hears gateways; whether it may go on."""
        if self._was_ready:
            self._say(f"the leader is there again, at {self.url}")
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
