# The process of a leader: what it is told at its start, and what it says while it leads.

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from servanda.engines.server.sockets import address
from servanda.errors import ServandaError
from servanda.gateway.controller.console import story, transition
from servanda.gateway.controller.controller import Leader
from servanda.gateway.controller.status import Standing
from servanda.gateway.controller.web.app import app
from servanda.gateway.http.api_keys import Role
from servanda.gateway.http.listener import Listening, bound
from servanda.gateway.http.reload import ListenerFiles, stamps_of
from servanda.promotion.notify.sinks import sinks_of
from servanda.traces.serialization import from_plain

_LOOK_S = 0.5  # between two looks at what became of it
_GRACE_S = 5  # what requests under way have, once it is told to end
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What a leader is told at its start.

    Args:
        host, port: of its listener.
        held: (name, role, key) of holders beside those of the file `keys`.
        tls: the listener's certificate, and its private key, as `ListenerFiles` takes them.
        webhook, slack, command: who is told of pages.
        urls: (kernel, url) of the pools as gateways were told of them.
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
    urls: tuple[tuple[str, str], ...] = ()

    def text(self) -> str:
        return json.dumps(asdict(self))


class Leading:
    """A leader behind its listener, in this process.

    Args:
        say: takes a line for people; bound: the listener's URL, before anything is opened;
            ready: called once gateways are heard.
        say_files: takes a line about keys and certificate that were read again; None: as `say`.
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
        self._listening: Listening | None = None
        self._moves, self._problems, self._bug = 0, tuple[str, ...](), ""
        self._contract = (Path(settings.contract),)
        self._seen = stamps_of(self._contract)

    def reload(self, *_: object) -> None:
        """Read contract, keys and certificate again, soon; from any thread, and by a signal."""
        self._reload.set()
        if self._files is not None:
            self._files.demand()

    def end(self) -> None:
        """From any thread."""
        self._ended.set()
        if self._listening is not None:
            self._listening.end()

    def run(self) -> None:
        """Lead until SIGTERM, Ctrl-C or `end`.

        Raises:
            ContractError: the contract, the keys or the certificate are wrong.
            MeasurementError: the address is taken, or the state cannot be opened.
        """
        told = self._settings
        files = self._files = ListenerFiles(told.keys, told.tls, self._say_files, told.held)
        if files.keys.warning:
            self._say(f"! {files.keys.warning}")
        with bound(told.host, told.port, "--admin") as taken:
            self._bound_at(f"{files.scheme}://{address(told.host, taken.getsockname()[1])}")
            leader = Leader(
                Path(told.contract),
                state=Path(told.state),
                ledger=told.ledger,
                sinks=sinks_of(told.webhook, told.slack, told.command),
            )
            watching = threading.Thread(target=self._watch, args=(leader,), daemon=True)
            try:
                standing = leader.standing()
                self._moves = standing.moves
                for line in story(standing, leader.contract):
                    self._say(line)
                self._listening = Listening(
                    app(leader, files.keys),
                    taken,
                    certificate=files.certificate,
                    grace_s=_GRACE_S,
                    ready=self._ready,
                )
                watching.start()
                if not self._ended.is_set():
                    with files.followed():
                        self._listening.run()
            finally:
                self._ended.set()
                if watching.is_alive():
                    watching.join()
                leader.close()

    def _watch(self, leader: Leader) -> None:
        """Say what changes, and take over a contract that was written anew."""
        self._seen = stamps_of(self._contract)
        while not self._ended.wait(_LOOK_S):
            try:
                self._look(leader)
            except Exception as error:  # a bug of ours, after which nothing would be taken over
                bug = f"a bug of servanda: {type(error).__name__}: {error}"
                if bug != self._bug:
                    self._say(f"! {bug}")
                self._bug = bug

    def _look(self, leader: Leader) -> None:
        self._tell(leader.standing())
        now = stamps_of(self._contract)
        # a file that is not there is just being written anew
        if now not in (self._seen, (None,)) or self._reload.is_set():
            self._seen = now
            self._reload.clear()
            self._take_over(leader)

    def _tell(self, standing: Standing) -> None:
        new = [one for one in standing.transitions if one.number > self._moves]
        unseen = standing.moves - self._moves - len(new)
        if unseen > 0:
            self._say(f"{unseen} changes came too fast to be told here: the ledger has them")
        for one in new:
            self._say(transition(one))
        self._moves = max(self._moves, standing.moves)
        for problem in standing.problems:
            if problem not in self._problems:
                self._say(f"! {problem}")
        self._problems = standing.problems

    def _take_over(self, leader: Leader) -> None:
        before = leader.standing().contract
        refused = leader.reload(actor="serve")
        if refused:
            self._say(f"the contract is not taken over, and the one before stays:\n{refused}")
            self._problems = (*self._problems, refused)  # it is said
            return
        contract = leader.contract  # and not the file, which may be another one by now
        name, version = contract.metadata.name, contract.metadata.version
        now = leader.standing()
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
                self._say(
                    f"  {pool} is another server there: gateways ask it once they are started anew"
                )


def main() -> None:
    """A leader as the child of whoever started it.

    Its settings are the first line on standard input; `reload` may follow, and the end of the
    input, which is also the end of the parent however that came, is its own.  Standard output
    is JSON lines: {"at": URL}, {"ready": true}, {"say": text}, {"failed": text, "code": n}.
    """
    out, lock = sys.stdout, threading.Lock()

    def tell(**event: Any) -> None:
        with lock, contextlib.suppress(OSError):  # nobody listens any more
            print(json.dumps(event), file=out, flush=True)

    settings = from_plain(Settings, json.loads(sys.stdin.readline()))
    leading = Leading(
        settings,
        say=lambda line: tell(say=line),
        bound_at=lambda url: tell(at=url),
        ready=lambda: tell(ready=True),
        say_files=lambda _: None,  # the parent reads the same files, and says so
    )

    def obey() -> None:
        for line in sys.stdin:
            if line.strip() == "reload":
                leading.reload()
        leading.end()

    threading.Thread(target=obey, daemon=True).start()
    try:
        leading.run()
    except ServandaError as error:
        tell(failed=str(error), code=error.exit_code)
        sys.exit(error.exit_code)
