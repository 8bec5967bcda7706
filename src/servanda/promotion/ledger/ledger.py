# A ledger: an append-only sequence of entries, from which the current state is derived.
#
# It is a store, its hash chain, and the head checkpoint (witness); opened at a location, once its
# content can be trusted.

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from servanda.promotion.ledger.entry import (
    FIRST,
    UNLIKE,
    Chain,
    Damaged,
    Entry,
    LedgerError,
    Outrun,
    Record,
    Row,
    content,
    digest,
    opened,
    sealed,
)
from servanda.promotion.ledger.export import SUFFIX, ExportedStore
from servanda.promotion.ledger.store import (
    ABSENT,
    META,
    PATIENCE_S,
    SCHEMA,
    TABLE,
    Foreign,
    Queries,
)
from servanda.promotion.sql.sqlite import FAILURES, SqliteFile

Store = Queries | ExportedStore

# The head checkpoint (witness): the last entry acknowledged on this machine, in a small file.
#
# A truncated chain is still a valid chain; the checkpoint shows that its tail is missing.
# It is written after each commit, so a crash in between leaves it behind the ledger, never ahead.


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


# A ledger in an SQLite file: for one machine, on a local disk (not over a network).

_PROBLEMS = 20  # most SQLite findings shown
# SQLite's messages for a damaged file or catalogue
_BROKEN = ("malformed", "no such", "unsupported file format", "corrupt")
_ELSEWHERE = "give another location for the ledger"
_RUN = f"{TABLE}_run"
# name -> its DDL; the catalogue stores these texts, and `faults` compares them
_LAYOUT = {
    META: f"CREATE TABLE {META} (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    TABLE: f"CREATE TABLE {TABLE} (seq INTEGER PRIMARY KEY, run TEXT NOT NULL, "
    "n INTEGER NOT NULL, at REAL NOT NULL, actor TEXT NOT NULL, kind TEXT NOT NULL, "
    "body TEXT NOT NULL, prev TEXT NOT NULL, hash TEXT NOT NULL, UNIQUE (run, n))",
    **{
        f"{table}_{verb.lower()}": f"CREATE TRIGGER {table}_{verb.lower()} BEFORE {verb} ON "
        f"{table} BEGIN SELECT RAISE(ABORT, 'a ledger is append-only'); END"
        for table in (META, TABLE)
        for verb in ("UPDATE", "DELETE")
    },
    # INSERT OR REPLACE does not fire a DELETE trigger
    f"{TABLE}_insert": f"CREATE TRIGGER {TABLE}_insert BEFORE INSERT ON {TABLE} "
    f"WHEN NEW.seq <> (SELECT coalesce(max(seq), 0) + 1 FROM {TABLE}) OR NEW.n <> "
    f"(SELECT coalesce(max(n), 0) + 1 FROM {TABLE} WHERE run = NEW.run) "
    "BEGIN SELECT RAISE(ABORT, 'a ledger is append-only'); END",
    # ordered by seq, which SQLite has in every index: otherwise each page sorts the whole run
    _RUN: f"CREATE INDEX {_RUN} ON {TABLE} (run)",
}


class SqliteStore(SqliteFile, Queries):
    """A ledger in an SQLite file: for one machine.

    Args:
        path: path of the file.
        mark: mark of the key, stored when a ledger is created.
        create: whether to create a missing ledger.
        reading: open read-only; the file is not modified.

    Raises:
        Foreign: there is no ledger, or another kind of file.
        Damaged: the file is damaged.
        LedgerError: it cannot be opened or created.
    """

    tables = tuple(_LAYOUT.values())

    def __init__(self, path: Path, mark: str, *, create: bool, reading: bool = False) -> None:
        self.name, self.path = str(path), path
        self._find(create)
        self._db = self._opened("mode=ro" if reading else "mode=rwc")
        try:
            if reading:
                self._make_readable()
            begun = self.recognised(create)
            if not reading:
                with LedgerError.of_system(f"{path} cannot be written", _ELSEWHERE), locked(path):
                    self._log_ahead()
                if not begun:
                    self.create(mark)
        except BaseException:
            self._db.close()
            raise

    def _find(self, create: bool) -> None:
        """Create the folder of a new ledger; an existing file needs none."""
        path = self.path
        with LedgerError.of_system(f"{path} cannot be read"):
            # not read here: closing any file of a database releases SQLite's locks on it
            if path.exists() and path.stat().st_size > 0:
                return
        if not create:
            raise Foreign(f"no ledger at {path}", hint=ABSENT)
        with LedgerError.of_system(f"{path} cannot be created", _ELSEWHERE):
            path.parent.mkdir(parents=True, exist_ok=True)

    def _opened(self, how: str) -> sqlite3.Connection:
        db = self._connect(PATIENCE_S, how)
        # invalid text is shown as it is, and has another hash
        db.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
        return db

    def _make_readable(self) -> None:
        """Connect in another way to a file in a folder without write permission."""
        try:
            self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            log = self.path.with_name(f"{self.path.name}-wal")
            if log.exists() and log.stat().st_size:
                return  # entries may be only in the write-ahead log
            self._db.close()
            self._db = self._opened("immutable=1")
        except FAILURES:
            pass  # the next access reports it

    def begun(self) -> bool:
        names = {name for (name,) in self._all("SELECT name FROM sqlite_master")}
        if names and not {TABLE, META} & names:
            raise Foreign(f"{self.path} is an SQLite file without a ledger", hint=_ELSEWHERE)
        return bool(names)

    def faults(self) -> Iterator[str]:
        try:
            made = dict(self._all("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))
            if made != _LAYOUT:
                odd = sorted(n for n in {*made, *_LAYOUT} if made.get(n) != _LAYOUT.get(n))
                yield f"the file is not laid out as servanda does: {', '.join(odd)}"
            for (text,) in self._all(f"PRAGMA integrity_check({_PROBLEMS})"):
                if text != "ok":
                    yield f"SQLite finds: {' '.join(text.split())}"
        except Damaged as error:
            yield error.problems[0].message

    def _failure(self, error: Exception, *, committing: bool = False) -> LedgerError:
        text = str(error)
        if committing:
            return LedgerError(
                f"{self.path}: {text}; it is not known whether the entries were kept",
                hint="check that the disk works and has free space, then read the run again",
            )
        if "not a database" in text:
            return Foreign(
                f"{self.path} is not an SQLite file",
                hint="give another location for the ledger; an exported one ends in .jsonl",
            )
        # the base class means corruption; before Python 3.11 its text may be empty
        corrupt = type(error) in (sqlite3.DatabaseError, UnicodeDecodeError, MemoryError)
        if corrupt or any(word in text for word in _BROKEN):
            return Damaged(
                f"{self.path} is damaged: {text or 'SQLite cannot read it'}",
                hint="`servanda promotion ledger verify` lists the readable entries; restore "
                "a copy",
            )
        if "locked" in text:
            return LedgerError(
                f"{self.path}: another process has been writing for {PATIENCE_S} s",
                hint="wait for it, or stop it; nothing was written",
            )
        if "closed" in text:
            return LedgerError(f"{self.path} was closed", hint="open the ledger again")
        return LedgerError(
            f"{self.path}: {text}",
            hint="check that the disk is local and writable, and has free space",
        )


_SERVERS = ("postgresql", "postgres")
_LOOK = "`servanda promotion ledger verify` lists every altered entry; restore a copy"
_NAMED = 3  # later entries that an Outrun lists
_STEP = 500  # entries that are tried one by one after a damaged page


class Ledger:
    """A ledger that is open.  Made by `open_ledger`.

    Args:
        key: key of the hashes; b"": unkeyed.
    """

    def __init__(self, store: Store, witness: Witness, key: bytes = b"") -> None:
        self.store, self.witness, self.key = store, witness, key

    def append(self, run: str, records: Sequence[Record], *, after: int) -> tuple[Entry, ...]:
        """Append records after a run's last entry: all or none, durable on return.

        Args:
            after: n of the run's last entry that the caller has seen; 0 for a new run.

        Raises:
            Outrun: the run has later entries.
            LedgerError: it cannot be written; if the connection was lost meanwhile, only reading
                the run shows whether it was.
        """
        with self.store.writing():
            self.refuse_missing()
            last, latest = self.store.last(), self.store.last(run)
            n = latest.n if latest else 0
            if n != after:
                raise self._outrun(run, after, n)
            for row in (last, latest):
                if row:  # nothing is appended to an altered entry
                    self._refuse(row, content(row, self.key))
            rows = sealed(last, run, n, records, self.key)
            self.store.insert(rows)
        if rows:
            self.witness.keep(rows[-1])
        return tuple(map(opened, rows))

    def entries(self, run: str | None = None, *, since: int = 0) -> Iterator[Entry]:
        """The entries with seq > `since`, of one run or of all, in order.

        Raises:
            Damaged: an entry was altered.
        """
        last = self.store.last()
        until, n = last.seq if last else 0, None if since else 0
        chain = Chain(self.key, since)
        while page := self.store.page(run, since, until):
            for row in page:
                self._refuse(row, chain.faults(row) if run is None else content(row, self.key))
                if run is not None and n is not None and row.n != n + 1:
                    self._refuse(row, [f"it is number {row.n} of its run, and follows {n}"])
                since, n = row.seq, row.n
                yield opened(row)

    def runs(self) -> tuple[str, ...]:
        """The names of the runs, oldest first."""
        return self.store.runs()

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def refuse_missing(self) -> None:
        """Refuse a ledger that lost an entry acknowledged on this machine.

        Raises:
            Damaged: it has.
        """
        head = self.witness.head()  # before the ledger is read, because it may grow meanwhile
        if head and (fault := missing(head, self.store)):
            raise Damaged(
                f"{self.store.name} was {fault}"
                if fault.startswith("truncated")
                else f"{self.store.name}: {fault}",
                hint=f"restore a copy; if you started a new ledger on purpose, remove "
                f"{self.witness.path}",
            )

    def _refuse(self, row: Row, faults: Sequence[str]) -> None:
        if faults:
            raise Damaged(
                f"{self.store.name}: entry {row.seq} of run {row.run!r}: {faults[0]}", hint=_LOOK
            )

    def _outrun(self, run: str, after: int, n: int) -> LedgerError | Outrun:
        if n < after:
            return LedgerError(
                f"{self.store.name}: run {run!r} ends at {n}, and its entry {after} was read "
                "before",
                hint="is it the same ledger? Read the run again",
            )
        later = [e for e in self.entries(run) if e.n > after]
        named = ", ".join(f"{e.n} {e.kind!r} by {e.actor}" for e in later[:_NAMED])
        more = f" and {len(later) - _NAMED} more" if len(later) > _NAMED else ""
        return Outrun(
            f"run {run!r} went on meanwhile: {named}{more}; {after} was the last one seen",
            hint="read the run again, and decide again",
        )


def mark_of(key: bytes) -> str:
    """A mark of the key that a ledger stores, to detect a wrong key before any entry."""
    return digest("a ledger of servanda", key)


def open_ledger(
    where: str, *, witness: Path | None = None, key: bytes = b"", reading: bool = False
) -> Ledger:
    """Open the ledger at a location; created there unless it is opened for reading.

    Args:
        where: a path, or sqlite:///PATH, for SQLite; postgresql://... for PostgreSQL; a path
            that ends in .jsonl is an exported, read-only one.
        witness: the head checkpoint, a file with the last entry acknowledged on this machine; None:
            FILE.head beside an SQLite file, none for others.
        key: key of the hashes; the same at every opening.

    Raises:
        Damaged: it is damaged, or lacks an entry that was acknowledged here.
        LedgerError: it cannot be reached or created, or the key is wrong.
    """
    ledger = _open(where, witness, key, reading=reading)
    try:
        if isinstance(ledger.store, ExportedStore):
            for fault in ledger.store.faults():
                raise Damaged(fault, hint="export the ledger again")
        for fault in _altered(ledger, proven=False):
            if _other_key(ledger, ledger.store.marks().get("mark")):
                raise LedgerError(fault, hint="open it with the key that it was created with")
            raise Damaged(f"{ledger.store.name}: {fault}", hint=_LOOK)
        ledger.refuse_missing()
    except BaseException:
        ledger.close()
        raise
    return ledger


def _open(where: str, witness: Path | None, key: bytes, *, reading: bool) -> Ledger:
    """Open the ledger at a location, whatever became of its entries.

    Args, Raises: see `open_ledger`.
    """
    scheme, separator, rest = where.partition("://")
    if separator and scheme not in (*_SERVERS, "sqlite"):
        raise LedgerError(
            f"no ledger is kept at {scheme}://",
            hint="a path keeps it in SQLite, postgresql://... in PostgreSQL",
        )
    if separator and scheme in _SERVERS:
        beside, path = Witness(witness), None
    else:
        path = Path(rest.removeprefix("/") if separator else where)
        if not path.name or path.is_dir():
            raise LedgerError(
                f"{path} is a folder, and a ledger is a file",
                hint=f"name a file in it, such as {path / 'ledger.db'}",
            )
        default = None if path.suffix == SUFFIX else path.with_name(f"{path.name}.head")
        beside = Witness(witness or default)
    head = beside.head()
    mark = mark_of(key)
    create = not reading and head is None
    try:
        if path is None:
            from servanda.promotion.ledger.postgres import PostgresStore

            store: Store = PostgresStore(where, mark, create=create)
        elif path.suffix == SUFFIX:
            store = ExportedStore(path)
        else:
            store = SqliteStore(path, mark, create=create, reading=reading)
    except ImportError as error:
        raise LedgerError(
            f"a ledger in PostgreSQL needs psycopg: {str(error).strip().splitlines()[0]}",
            hint="pip install 'servanda[postgres]'",
        ) from None
    except Foreign as error:
        if head is None:
            raise
        message = f"{error.problems[0].message}, and entry {head.seq} was acknowledged here"
        hint = f"restore a copy; to start a new ledger on purpose, remove {beside.path}"
        raise Damaged(message, hint=hint) from None
    return Ledger(store, beside, key)


def _altered(ledger: Ledger, *, proven: bool) -> Iterator[str]:
    """The faults of the rows that the creation of a ledger wrote (`marks`).

    Schema and key determine them: each is compared with the only value that it can have.

    Args:
        proven: whether there are entries and all have their hashes, so that schema and key are
            those of the ledger.

    Raises:
        LedgerError: the ledger has another schema, and nothing proves the opposite.
    """
    if isinstance(ledger.store, ExportedStore):
        return
    marks = ledger.store.marks()
    made = {"schema": str(SCHEMA), "mark": mark_of(ledger.key)}
    if not proven:
        stored = marks.get("schema")
        found = int(stored) if isinstance(stored, str) and stored.isdecimal() else stored
        anew = "start a new ledger: give another location for it"
        LedgerError.refuse_form(ledger.store.name, found, SCHEMA, anew)
        if refusal := _other_key(ledger, marks.get("mark")):
            yield refusal
            return
    for name in sorted({*made, *marks}, key=str):  # an edited store may contain any
        if marks.get(name) != made.get(name):
            what = "gone" if name not in marks else "changed" if name in made else "not of servanda"
            yield f"the row {name!r} of {META} is {what}"


def _other_key(ledger: Ledger, mark: str | None) -> str:
    """The message for a key that the ledger was not created with; "" if it was."""
    if mark in (None, mark_of(ledger.key)):
        return ""
    if mark == mark_of(b""):
        return f"{ledger.store.name} was created without a key, and one is given"
    given = "another one is given" if ledger.key else "none is given"
    return f"{ledger.store.name} was created with a key, and {given}"


# Verification: all problems of a ledger, each with its place.


@dataclass(frozen=True)
class Problem:
    """One problem.

    Args:
        seq: number of the entry; None for the whole ledger.
        run: run of the entry as stored; "" if unknown.
    """

    seq: int | None
    run: str
    what: str

    def __str__(self) -> str:
        place = "" if self.seq is None else f"entry {self.seq}"
        place += f" of run {self.run!r}" if self.run else ""
        return f"{place}: {self.what}" if place else self.what


@dataclass(frozen=True)
class Verified:
    """The result of a verification.

    Args:
        entries: number of readable entries.
        head: hash of the last of them; zeros if there is none.
    """

    entries: int
    head: str
    problems: tuple[Problem, ...]

    @property
    def sound(self) -> bool:
        return not self.problems


def verify(ledger: Ledger) -> Verified:
    """Read all entries and check hashes, order and the head checkpoint.

    Without a key, only the head checkpoint detects a chain that was recomputed from some entry on;
    see docs/how-to/ledger.md.

    Raises:
        LedgerError: the store cannot be reached, or has another schema; or the head checkpoint
            cannot be read.
    """
    head = ledger.witness.head()  # before the ledger is read: it may grow meanwhile
    end = max(head.seq if head else 0, _end(ledger.store))
    chain = Chain(ledger.key)
    problems: list[Problem] = []
    entries, last, unlike = 0, FIRST, 0
    for seq, row in _rows(ledger.store, end):
        if isinstance(row, str):
            problems.append(Problem(seq, "", f"it cannot be read: {row}"))
            chain.lost(seq)
            continue
        faults = chain.faults(row)
        unlike += len(faults) == 1 and faults[0].startswith(UNLIKE)
        problems += [Problem(row.seq, row.run, fault) for fault in faults]
        entries, last = entries + 1, row.hash
    proven = bool(entries) and not problems
    if unlike == entries == len(problems) > 1:
        what = f"none of the {entries} entries has its hash under this key: the key is wrong"
        problems = [Problem(None, "", what)]
    problems += [Problem(None, "", fault) for fault in ledger.store.faults()]
    try:
        fault = missing(head, ledger.store) if head else ""
    except Damaged:
        fault = ""  # reported above as an unreadable entry
    if fault:
        problems.append(Problem(None, "", fault))
    try:
        altered = [*_altered(ledger, proven=proven)]
    except Damaged as error:
        altered = [error.problems[0].message]
    found = (*(Problem(None, "", fault) for fault in altered), *problems)
    return Verified(entries, str(last), found)


def verify_at(where: str, *, witness: Path | None = None, key: bytes = b"") -> Verified:
    """Verify the ledger at a location, even one that is too damaged to be opened.

    Args: see `open_ledger`.

    Raises:
        LedgerError: there is no ledger, or it cannot be reached.
    """
    try:
        ledger = _open(where, witness, key, reading=True)
    except Damaged as error:
        return Verified(0, FIRST, (Problem(None, "", error.problems[0].message),))
    with ledger:
        return verify(ledger)


def _end(store: Store) -> int:
    """seq of the last entry, if the store can find it."""
    try:
        last = store.last()
    except Damaged:
        return 0
    return last.seq if last and type(last.seq) is int else 0


def _rows(store: Store, end: int) -> Iterator[tuple[int, Row | str]]:
    """Every readable row, and the error of each other; near a damaged page one by one."""
    at = 0
    while True:
        try:
            page = store.page(None, at, max(end, at + _STEP))
        except Damaged as error:
            rows = _singly(store, at + 1, at + _STEP, end)
            if not rows and at < max(end, 1):
                rows = [(at + 1, error.problems[0].message)]
            yield from rows
            at += _STEP
            if at >= end and not any(isinstance(row, Row) for _, row in rows):
                return
            continue
        if not page:
            return
        yield from ((row.seq, row) for row in page)
        at = max(at + 1, *(row.seq for row in page))


def _singly(store: Store, first: int, last: int, end: int) -> list[tuple[int, Row | str]]:
    """Rows by their seq, and the error of each missing one up to `end`."""
    rows: list[tuple[int, Row | str]] = []
    for seq in range(first, last + 1):
        try:
            row = store.at(seq) or "it is not found, and its neighbours are damaged"
        except Damaged as error:
            row = error.problems[0].message
        if isinstance(row, Row) or seq <= end:
            rows.append((seq, row))
    return rows
