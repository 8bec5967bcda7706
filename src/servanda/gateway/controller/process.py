# The process of a controller: its settings, the lines that it prints, and its supervision
# as a child process of a gateway: started, monitored, and restarted if it dies.

from __future__ import annotations

import contextlib
import json
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp

from servanda.contract.model import Clause, Contract
from servanda.engines.server.sockets import address
from servanda.errors import ContractError, MeasurementError, ServandaError
from servanda.gateway.controller.controller import Controller
from servanda.gateway.controller.status import CellStatus, ControllerStatus
from servanda.gateway.controller.store import LEASE_S, StandbyError, Store, open_store
from servanda.gateway.controller.web.app import app, standby
from servanda.gateway.controller.web.summary import who_serves
from servanda.gateway.http.api_keys import Role
from servanda.gateway.http.listener import Listener, bind
from servanda.gateway.http.reload import ListenerFiles, stamps_of
from servanda.gateway.routing.model import AWAY
from servanda.gateway.routing.state import Transition
from servanda.promotion.notify.sinks import sinks_of
from servanda.report.cell_text import each_of
from servanda.report.format import count
from servanda.runner.load import load
from servanda.traces.serialization import from_plain

_LOOK_S = 0.5  # between two checks of its state
_GRACE_S = 5  # grace period for requests in flight at shutdown
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """The settings of a controller.

    Args:
        host, port: of its listener.
        held: (name, role, key) of holders in addition to the file `keys`.
        tls: the listener's certificate, and its private key, as `ListenerFiles` takes them.
        webhook, slack, command, notify: notifiers of pages.
        urls: (kernel, url) of the pools in the gateways.
        lease_s: how long this leader keeps the lead when it is gone, see `open_store`.
    """

    contract: str
    state: str
    ledger: str
    host: str
    port: int
    keys: str | None = None
    tls: tuple[str, str | None] | None = None
    held: tuple[tuple[str, Role, str], ...] = field(default=(), repr=False)
    webhook: tuple[str, ...] = field(default=(), repr=False)
    slack: tuple[str, ...] = field(default=(), repr=False)
    command: tuple[str, ...] = field(default=(), repr=False)
    notify: tuple[str, ...] = field(default=(), repr=False)
    urls: tuple[tuple[str, str], ...] = ()
    lease_s: float = LEASE_S


class ControllerProcess:
    """A controller behind its listener, in this process.

    Where another leader leads, it waits until that one is gone; and again if it loses the lead.

    Args:
        say: prints a log line.
        bound_at: called with the listener's URL, before anything is opened.
        ready: called once gateways can connect.
        say_files: prints a log line about reloaded keys and certificates; None: same as `say`.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        say: Say,
        bound_at: Say = lambda _: None,
        ready: Callable[[], None] = lambda: None,
        say_files: Say | None = None,
    ) -> None:
        self._settings, self._say, self._say_files = settings, say, say_files or say
        self._files: ListenerFiles | None = None
        self._bound_at, self._ready = bound_at, ready
        self._reload, self._ended = threading.Event(), threading.Event()
        self._listener: Listener | None = None
        self._moves, self._problems, self._bug = 0, tuple[str, ...](), ""
        self._contract = (Path(settings.contract),)
        self._stamps = stamps_of(self._contract)

    def reload(self, *_: object) -> None:
        """Request a reload of contract, keys and certificate; from any thread or signal handler."""
        self._reload.set()
        if self._files is not None:
            self._files.demand()

    def end(self) -> None:
        """Request the end; from any thread."""
        self._ended.set()
        if self._listener is not None:
            self._listener.end()

    def run(self) -> None:
        """Run until SIGTERM, Ctrl-C or `end`.

        Raises:
            ContractError: the contract, the keys or the certificate are wrong.
            MeasurementError: the address is taken, or the state cannot be opened.
        """
        settings = self._settings
        files = self._files = ListenerFiles(
            settings.keys, settings.tls, self._say_files, settings.held
        )
        if files.keys.warning:
            self._say(f"! {files.keys.warning}")
        with bind(settings.host, settings.port, "--admin") as listening:
            port = listening.getsockname()[1]
            self._url = f"{files.scheme}://{address(settings.host, port)}"
            self._bound_at(self._url)
            with files.followed():
                opened, led = self._open, False
                while not self._ended.is_set():
                    try:
                        controller = self._controller(opened)
                    except MeasurementError as error:
                        # the database of a leader that led will be available again
                        if not led and not isinstance(error, StandbyError):
                            raise
                        opened = self._stand_by(error, listening, files)
                    else:
                        led = True
                        self._lead(controller, listening, files)
                        opened = self._open

    def _open(self) -> Store:
        settings, contract = self._settings, load(Path(self._settings.contract))
        name = contract.metadata.name
        return open_store(settings.state, name, leader=self._url, lease_s=settings.lease_s)

    def _controller(self, store: Callable[[], Store]) -> Controller:
        settings = self._settings
        return Controller(
            Path(settings.contract),
            store=store,
            ledger=settings.ledger,
            sinks=sinks_of(settings.webhook, settings.slack, settings.command, settings.notify),
        )

    def _lead(self, controller: Controller, listening: socket.socket, files: ListenerFiles) -> None:
        """Lead until the end, or until the lead is lost."""
        self._stamps = stamps_of(self._contract)
        try:
            status = controller.status()
            self._moves = status.moves
            for line in describe(status, controller.contract):
                self._say(line)
            self._serve(
                app(controller, files.keys),
                listening,
                files,
                lambda: self._look(controller),
                self._ready,
            )
        finally:
            controller.close()
        if not self._ended.is_set():
            self._say("! this leader lost the lead, and waits for it")

    def _look(self, controller: Controller) -> bool:
        """Print changes, and reload a rewritten contract file; whether the lead is lost."""
        try:
            self._check(controller)
        except Exception as error:  # a bug must not stop later reloads
            bug = f"a bug of servanda: {type(error).__name__}: {error}"
            if bug != self._bug:
                self._say(f"! {bug}")
            self._bug = bug
        return controller.lost

    def _stand_by(
        self, error: MeasurementError, listening: socket.socket, files: ListenerFiles
    ) -> Callable[[], Store]:
        """Wait until the other leader is gone; what returns the store that was opened then."""
        self._say(f"standby: {error.problems[0].message}")
        last: ServandaError = error
        opened: list[Store] = []

        def leads() -> bool:
            nonlocal last
            try:
                opened.append(self._open())
            except ServandaError as again:  # another leads, or the database is not available
                last = again
            return bool(opened)

        name = load(Path(self._settings.contract)).metadata.name
        waiting = standby(name, files.keys, lambda: last)
        self._serve(waiting, listening, files, leads, lambda: None)
        if not opened:
            return self._open
        if self._ended.is_set():
            opened[0].close()
        return lambda: opened[0]

    def _serve(
        self,
        served: ASGIApp,
        listening: socket.socket,
        files: ListenerFiles,
        until: Callable[[], bool],
        ready: Callable[[], None],
    ) -> None:
        """Serve until a condition is true, or the end is requested."""
        over, met = threading.Event(), threading.Event()
        listener = self._listener = Listener(
            served,
            listening.dup(),  # a listener closes its socket
            certificate=files.certificate,
            grace_s=_GRACE_S,
            ready=ready,
        )

        def watch() -> None:
            while not over.wait(_LOOK_S):
                if until():
                    met.set()
                    listener.end()
                    return

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            if not self._ended.is_set():
                listener.run()
        finally:
            over.set()
            watcher.join()
        if not met.is_set():
            self._ended.set()

    def _check(self, controller: Controller) -> None:
        self._print(controller.status())
        now = stamps_of(self._contract)
        # a missing file is being rewritten
        if now not in (self._stamps, (None,)) or self._reload.is_set():
            self._stamps = now
            self._reload.clear()
            self._take_over(controller)

    def _print(self, status: ControllerStatus) -> None:
        new = [t for t in status.transitions if t.number > self._moves]
        unseen = status.moves - self._moves - len(new)
        if unseen > 0:
            self._say(f"{count(unseen, 'change')} came too fast to be printed; the ledger has them")
        for transition in new:
            self._say(transition_line(transition))
        self._moves = max(self._moves, status.moves)
        for problem in status.problems:
            if problem not in self._problems:
                self._say(f"! {problem}")
        self._problems = status.problems

    def _take_over(self, controller: Controller) -> None:
        before = controller.status().contract
        problem = controller.reload()
        if problem:
            self._say(f"the contract is not taken over, and the one before stays:\n{problem}")
            self._problems = (*self._problems, problem)  # already printed
            return
        contract = controller.contract  # not the file, which may have changed since
        name, version = contract.metadata.name, contract.metadata.version
        now = controller.status()
        evidence = "its evidence stays" if now.contract == before else "evidence begins anew"
        self._say(
            f"{name} {version} is followed from now on ({now.contract[:8]}), mode {now.mode}; "
            f"{evidence}"
        )
        urls = {
            "infer": contract.kernels.infer.url,
            "stable": getattr(contract.stable, "url", None),
        }
        for pool, url in self._settings.urls:
            if urls[pool] not in (url, None):
                self._say(f"  {pool} has another URL there: restart the gateways to use it")


def main() -> None:
    """Run a controller as a child process.

    Its settings are the first line on standard input; `reload` lines may follow.  It ends when its
    input ends, which happens however the parent ends.  Standard output is JSON lines: {"at": URL},
    {"ready": true}, {"say": text}, {"failed": text, "code": n}.
    """
    out, lock = sys.stdout, threading.Lock()

    def send(**event: Any) -> None:
        with lock, contextlib.suppress(OSError):  # the parent has ended
            print(json.dumps(event), file=out, flush=True)

    settings = from_plain(Settings, json.loads(sys.stdin.readline()))
    process = ControllerProcess(
        settings,
        say=lambda line: send(say=line),
        bound_at=lambda url: send(at=url),
        ready=lambda: send(ready=True),
        say_files=lambda _: None,  # the parent reloads the same files and prints it
    )

    def read_commands() -> None:
        for line in sys.stdin:
            if line.strip() == "reload":
                process.reload()
        process.end()

    threading.Thread(target=read_commands, daemon=True).start()
    try:
        process.run()
    except ServandaError as error:
        send(failed=str(error), code=error.exit_code)
        sys.exit(error.exit_code)


# The lines of `servanda serve`: the watched cells with their thresholds, and every transition.


def describe(status: ControllerStatus, contract: Contract) -> Iterator[str]:
    """The cells of a contract that are watched, with their thresholds, and those that are not."""
    clauses = {clause.id: clause for clause in contract.statistical}
    cells = [(slice_, cell) for slice_ in status.slices for cell in slice_.cells]
    yield f"{status.name} ({status.contract[:8]}), mode {status.mode}: {who_serves(status)}"
    watched = count(len(cells), "cell")
    yield f"watches K = {watched} (a clause on a slice); alarm thresholds are multiplied by K"
    for slice_, cell in cells:
        promise = _promise(cell, clauses.get(cell.clause))
        alarm, back = _evidence(cell.log_price), _evidence(cell.log_leave_price)
        thresholds = f"alarm threshold {alarm}, return threshold {back}"
        does = {"": "nothing", "slice": "the slice", "all": "all traffic"}[cell.diverts]
        yield f"  {cell.clause} on {slice_.name}: {promise}; {thresholds}; diverts {does}"
    if status.left_out:
        yield "does not watch"
    for left in status.left_out:
        yield f"  {left.clause} on {left.slice}: {left.why}"


def _promise(cell: CellStatus, clause: Clause | None) -> str:
    """The limit in the clause's own words; one of a percentile is a share."""
    if cell.refutes:
        return "tokens sampled from the distribution that infer reports"
    if clause is None or clause.percentile is None or not isinstance(clause.at_most, float):
        return f"a mean of at most {cell.limit:g} {cell.unit}".rstrip()
    unit = " nat" if clause.metric.endswith("_nats") else ""  # a metric's name ends in its unit
    return f"at most {100 * cell.limit:g} % of {each_of(clause)} beyond {clause.at_most:g}{unit}"


def _evidence(log: float) -> str:
    return f"{math.exp(log):,.0f}" if log < 700 else f"exp({log:.0f})"


def transition_line(transition: Transition) -> str:
    """A change of a slice as one line."""
    at = time.strftime("%H:%M:%S", time.localtime(transition.at))
    before, after = (place.split()[0] for place in (transition.before, transition.after))
    moves = (before in AWAY) != (after in AWAY) or "recovering" in (before, after)
    done = " (recorded only, route unchanged)" if moves and not transition.acted else ""
    who = "" if transition.actor == "servanda" else f", by {transition.actor}"
    pages = f"; pages {', '.join(transition.pages)}" if transition.pages else ""
    change = f"{transition.slice}: {transition.before} -> {transition.after}"
    return f"{at} {change}{done}: {transition.reason}{who}{pages}"


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
