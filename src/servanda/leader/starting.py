# A leader as a child process of a gateway: started, heard, and started again where it died.

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from dataclasses import replace
from urllib.parse import urlsplit

from servanda.errors import ContractError, MeasurementError, ServandaError
from servanda.leader.leads import Say, Settings

# not `-m`, which would put the current folder first among the places to import from
_CHILD = "import sys; sys.path.pop(0); from servanda.leader.leads import main; main()"
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # before it is started again
_END_S = 20.0  # until it has ended by itself


class Supervised:
    """The leader of one gateway, in a process of its own.

    It ends with its parent, however that ends: its standard input ends then.

    Args:
        say: takes a line for people, from any thread.
    """

    def __init__(self, settings: Settings, say: Say) -> None:
        self._settings, self._say = settings, say
        self._process: subprocess.Popen[str] | None = None
        self._known, self._closing = threading.Event(), threading.Event()
        self._ready = threading.Event()  # or never: see `failed`
        self._failed: ServandaError | None = None
        self._lock = threading.RLock()  # of a signal, that comes in between
        self._thread = threading.Thread(target=self._supervise, name="leader", daemon=True)
        self.url = ""
        self.restarts = 0

    def start(self) -> str:
        """The URL of its listener, once it has one.

        Raises:
            ContractError: the contract or the keys are wrong.
            MeasurementError: it could not start.
        """
        self._thread.start()
        self._known.wait()
        self._raise()
        return self.url

    def wait(self, seconds: float) -> bool:
        """Whether it hears gateways by then.

        Raises:
            ServandaError: as `start`.
        """
        found = self._ready.wait(seconds)
        self._raise()
        return found

    def reload(self) -> None:
        """Let it read the contract again; one that is just being started reads it anyway."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.write("reload\n")
                self._process.stdin.flush()

    def close(self) -> None:
        """Let it end; made to, where it does not."""
        self._closing.set()
        with self._lock, contextlib.suppress(OSError):
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()
        if not self._thread.is_alive():
            return
        self._thread.join(_END_S)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join()

    def _raise(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _supervise(self) -> None:
        died = 0  # times in a row, without having been ready in between
        while not self._closing.is_set():
            ready, code = self._once()
            if self._closing.is_set():
                return
            if not self._ready.is_set():
                self._failed = self._failed or MeasurementError(
                    f"the leader ended with {_how(code)} before it was ready"
                )
                self._known.set()
                self._ready.set()
                return
            died = 0 if ready else died + 1
            pause = _PAUSES_S[min(died, len(_PAUSES_S) - 1)]
            why = f": {self._failed}" if self._failed else ""
            self._failed = None
            self._say(
                f"the leader ended with {_how(code)}{why}; it is started again in {pause:g} s, "
                "and the gateway follows the last routes until they expire"
            )
            self._closing.wait(pause)
            self.restarts += 1

    def _once(self) -> tuple[bool, int]:
        """Run a leader to its end; whether it was ready, and its exit status."""
        with self._lock:
            if self._closing.is_set():
                return False, 0
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
                why = error.strerror or error
                self._failed = MeasurementError(f"no process can be begun: {why}")
                return False, 1
            assert process.stdin and process.stdout
            with contextlib.suppress(OSError):
                process.stdin.write(self._settings.text() + "\n")
                process.stdin.flush()
        ready = False
        for line in process.stdout:
            ready = self._heard(line) or ready
        code = process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        return ready, code

    def _heard(self, line: str) -> bool:
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
            self._known.set()
        elif "say" in event:
            self._say(event["say"])
        elif "failed" in event:
            kind = ContractError if event["code"] == ContractError.exit_code else MeasurementError
            self._failed = kind(event["failed"])
        elif event.get("ready"):
            if self._ready.is_set():
                self._say(f"the leader is there again, at {self.url}")
            self._ready.set()
            return True
        return False


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
