# Files that are reloaded while in use: keys and certificates.

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from servanda.engines.tls import Certificate
from servanda.errors import ContractError
from servanda.gateway.http.api_keys import Keys, Role

_LOOK_S = 0.5  # between two checks of a file
Stamps = tuple[tuple[int, int, int] | None, ...]


class ReloadedFiles:
    """Files that are reloaded after a change, or on demand.

    Args:
        files: files that are read together.
        stamps: stamps of the files at their first reading.
        read: reads them and returns a log line, "" for none; on a ContractError the previous data
            stays in use.
        say: prints a log line, from any thread.
    """

    def __init__(
        self,
        files: Sequence[Path],
        stamps: Stamps,
        read: Callable[[], str],
        say: Callable[[str], None],
    ) -> None:
        self._files, self._read, self._say = files, read, say
        self._read_stamps = self._latest_stamps = stamps
        self._demanded = threading.Event()

    def demand(self) -> None:
        """Request a reload at the next check; from any thread or signal handler."""
        self._demanded.set()

    def read_changed(self) -> None:
        """Read them if they changed and are stable since the last check, because a partial file may
        be valid.
        """
        now, before = stamps_of(self._files), self._latest_stamps
        self._latest_stamps = now
        written = now != self._read_stamps and now == before and None not in now
        if not (written or self._demanded.is_set()):
            return
        self._demanded.clear()
        self._read_stamps = now
        try:
            if text := self._read():
                self._say(text)
        except ContractError as error:
            names = " and ".join(map(str, self._files))
            self._say(f"! {names} cannot be used, and what was read before stays in use:\n{error}")


def stamps_of(files: Sequence[Path]) -> Stamps:
    """A stamp of each file that changes when it is written; None if missing."""
    return tuple(map(_stamp, files))


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


class ListenerFiles:
    """The keys and the certificate of a listener, reloaded from their files.

    Args:
        keys: file of keys; None: no keys.
        tls: the certificate's chain, and its private key, as `Certificate` takes them; None: the
            listener speaks plain HTTP.
        say: prints a log line, from any thread.
        held: (name, role, key) of holders outside the file.

    Raises:
        ContractError: a file is wrong.
    """

    def __init__(
        self,
        keys: str | None,
        tls: tuple[str, str | None] | None,
        say: Callable[[str], None],
        held: Sequence[tuple[str, Role, str]] = (),
    ) -> None:
        self._rereads: list[ReloadedFiles] = []
        self._say = say
        self.keys = self._keys(Path(keys), say, held) if keys else Keys(*held)
        self.certificate = self._certificate(*tls, say) if tls else None
        self.scheme = "https" if tls else "http"

    def follow(self, files: Sequence[Path], again: Callable[[], str]) -> None:
        """Read more files again, as `ReloadedFiles` does; they were just read."""
        self._rereads.append(ReloadedFiles(files, stamps_of(files), again, self._say))

    def demand(self) -> None:
        """Request a reload of all files; from any thread or signal handler."""
        for files in self._rereads:
            files.demand()

    def read_changed(self) -> None:
        for files in self._rereads:
            files.read_changed()

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Check the files periodically in a thread, during the block."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_LOOK_S):
                self.read_changed()

        thread = threading.Thread(target=watch, name="files", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _keys(
        self, file: Path, say: Callable[[str], None], held: Sequence[tuple[str, Role, str]]
    ) -> Keys:
        def read() -> Keys:
            return Keys.read(file).plus(*held)

        def again() -> str:
            keys.take(read())
            known = len(keys.holders) - len(held)
            text = f"{file} was read again: it has {known} keys"
            return f"{text}\n! {keys.warning}" if keys.warning else text

        stamps = stamps_of((file,))  # before the reading, so that later writes are detected
        keys = read()
        self._rereads.append(ReloadedFiles((file,), stamps, again, say))
        return keys

    def _certificate(self, chain: str, key: str | None, say: Callable[[str], None]) -> Certificate:
        def again() -> str:
            certificate.read()
            return f"{chain} was read again: new connections are shown its certificate"

        files = tuple(map(Path, dict.fromkeys((chain, key or chain))))
        stamps = stamps_of(files)
        certificate = Certificate(Path(chain), Path(key) if key else None)
        self._rereads.append(ReloadedFiles(files, stamps, again, say))
        return certificate
