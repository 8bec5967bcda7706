# The head checkpoint (witness): the last entry acknowledged on this machine, in a small file.
#
# A truncated chain is still a valid chain; the checkpoint shows that its tail is missing.
# It is written after each commit, so a crash in between leaves it behind the ledger, never ahead.

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from servanda.promotion.ledger.entry import LedgerError, Row
from servanda.promotion.ledger.store import Store


@dataclass(frozen=True)
class Head:
    """An entry by its position and hash."""

    seq: int
    hash: str


class Witness:
    """The head checkpoint: a file with the last entry that was acknowledged, or none.

    Args:
        path: None: no checkpoint.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def head(self) -> Head | None:
        """The stored checkpoint; None without one.

        Raises:
            LedgerError: the file cannot be read.
        """
        if self.path is None:
            return None
        try:
            data = json.loads(self.path.read_bytes())
            if type(data["seq"]) is not int or type(data["hash"]) is not str:
                raise ValueError
            return Head(data["seq"], data["hash"])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            problem = f"cannot be read: {error.strerror or error}"
        except (ValueError, KeyError, TypeError):
            problem = "does not name the last entry"
        raise LedgerError(
            f"{self.path} {problem}",
            hint="`servanda promotion ledger verify` the ledger against a copy of it, then remove "
            "this file",
        )

    def keep(self, row: Row) -> None:
        """Store an entry, unless a later one is stored.

        Raises:
            LedgerError: the file cannot be written; the entry is in the ledger nevertheless.
        """
        if self.path is None:
            return
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path):
                head = self.head()
                if head and head.seq >= row.seq:
                    return  # another process was quicker
                with part.open("w", encoding="ascii") as file:
                    file.write(f"{json.dumps({'seq': row.seq, 'hash': row.hash})}\n")
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(self.path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise LedgerError(
                f"entry {row.seq} is kept, and {self.path} cannot be written: "
                f"{error.strerror or error}",
                hint="free disk space, or give another location for the head checkpoint",
            ) from None


def missing(head: Head, store: Store) -> str:
    """The message for a ledger that ends before the checkpoint, or has another entry there."""
    row = store.at(head.seq)
    if row is None:
        last = store.last()
        end = f"ends at {last.seq}" if last else "is empty"
        return f"truncated: the ledger {end}, and entry {head.seq} was acknowledged here"
    if row.hash != head.hash:
        return f"entry {head.seq} was acknowledged here with hash {head.hash}, and has {row.hash}"
    return ""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file for one process; the lock ends with the process."""
    with path.with_name(f".{path.name}.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
