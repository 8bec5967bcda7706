# Recordings: what one engine answered, question by question, in one file.
#
#   head.json        format, description, vocabulary, encoded and decoded texts; every call:
#                    its question, its rows, its member and the digest of that
#   000012.parquet   the trace of a call; 000013.npy   the logits of one
#
# The key of a call is its question (verb, sampling, seed, path, width, together) and its
# rows in order: sequence, prompt, continuation.  So the batch is part of the record (law 7):
# a kernel's numbers depend on what ran beside a sequence, and none is handed out of another
# batch.

from __future__ import annotations

import json
import threading
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from servanda.contract.identity import Description, digest_of, digest_of_bytes
from servanda.engines.sealed_file import FileKind, sealed, write_member
from servanda.errors import MeasurementError
from servanda.traces.trace import Batch

HEAD = "head.json"
LOGITS_BYTES = 1 << 28  # of all logits of a recording, before they are compressed
_KIND = FileKind(
    "recording",
    HEAD,
    ("format", "calls"),
    "servanda check CONTRACT --record FILE",
    "copy the file again, or record it anew with `servanda check CONTRACT --record FILE`",
)

Row = tuple[int, str]  # launch index, digest of prompt and continuation


@dataclass(frozen=True)
class Question:
    """A request to an engine, without the rows of the batch."""

    verb: str
    width: int
    together: int | None
    sampling: Mapping[str, Any] | None = None
    seed: str | None = None  # longer than what some readers of JSON keep
    path: str | None = None

    def key(self, rows: Iterable[Row]) -> str:
        return digest_of([asdict(self), [list(row) for row in rows]])


def rows_of(batch: Batch) -> tuple[Row, ...]:
    """The rows of a batch, as a question is keyed by them."""
    given = batch.continuations or (None,) * len(batch)
    pairs = zip(batch.sequence_S, batch.prompts, given, strict=True)
    return tuple((int(s), digest_of([list(p), g and list(g)])[:16]) for s, p, g in pairs)


@dataclass(frozen=True)
class Call:
    """One answered question; `pieces` are the rows of each piece of logits."""

    question: Question
    rows: tuple[Row, ...]
    member: str
    pieces: tuple[int, ...] = ()


class Recording:
    """A recording being written; it is there once `finish` was called, and not before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.description: Description | None = None
        self.vocabulary: list[str] | None = None
        self.encoded: dict[str, list[int]] = {}
        self.decoded: dict[str, str] = {}
        self._calls: list[Call] = []
        self._digests: dict[str, str] = {}
        self._members: dict[str, str] = {}  # digest -> name
        self._logits = 0
        self._lock = threading.Lock()
        self._partial = path.with_name(path.name + ".partial")
        with self._written():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._zip: zipfile.ZipFile | None = zipfile.ZipFile(self._partial, "w")

    def add(
        self, question: Question, rows: tuple[Row, ...], data: bytes, pieces: Sequence[int] = ()
    ) -> None:
        """Keep an answer; bits that were kept before are not kept twice.

        Raises:
            MeasurementError: the disk is full, or logits are larger than LOGITS_BYTES in all.
        """
        digest = digest_of_bytes(data)
        with self._lock:
            if digest not in self._members:
                self._members[digest] = self._new(question.verb, digest, data)
            member = self._members[digest]
            self._calls.append(Call(question, rows, member, tuple(pieces)))

    def _new(self, verb: str, digest: str, data: bytes) -> str:
        if verb == "logits":
            self._logits += len(data)
            if self._logits > LOGITS_BYTES:
                raise MeasurementError(
                    f"the logits of this recording exceed {LOGITS_BYTES >> 20} MiB",
                    hint="record without `golden:`, or keep the best 64 of each golden position "
                    "in a pack: `servanda tools measure CONTRACT --side infer -o x.pack`",
                )
        suffix = "npy" if verb == "logits" else "parquet"
        member = f"{len(self._digests):06d}.{suffix}"
        self._write(member, data)
        self._digests[member] = digest
        return member

    def finish(self) -> str:
        """Write the head, and put the file in its place; returns its digest.

        Raises:
            MeasurementError: the engine had no request, or the file cannot be written.
        """
        if self.description is None:
            raise MeasurementError(
                f"nothing was recorded in {self.path}: the engine was not even described",
                hint="ask the engine while it is recorded",
            )
        head = sealed(
            {
                "description": asdict(self.description),
                "vocabulary": self.vocabulary,
                "encoded": self.encoded,
                "decoded": self.decoded,
                "calls": [asdict(call) for call in self._calls],
                "members": self._digests,
            }
        )
        self._write(HEAD, json.dumps(head).encode())
        assert self._zip is not None
        with self._written():
            self._zip.close()
            self._partial.replace(self.path)
        self._zip = None
        return str(head["digest"])

    def discard(self) -> None:
        """Leave nothing behind of a recording that was not finished."""
        if self._zip is not None:
            self._zip.close()
            self._partial.unlink(missing_ok=True)
            self._zip = None

    def _write(self, member: str, data: bytes) -> None:
        assert self._zip is not None, "the recording is finished"
        # Parquet compresses by itself
        stored = member.endswith(".parquet")
        compress = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
        with self._written():
            write_member(self._zip, member, data, compress)

    def _written(self) -> AbstractContextManager[None]:
        hint = "choose another place, or make room there"
        return MeasurementError.of_system(f"{self.path} cannot be written", hint=hint)


@dataclass(frozen=True)
class Recorded:
    """An opened recording; its members were compared with their digests."""

    file: str
    head: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Of everything in it."""
        return str(self.head["digest"])

    @cached_property
    def description(self) -> Description:
        """Of the engine that answered."""
        return Description.of(self.head["description"])

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        return tuple(
            Call(
                Question(**call["question"]),
                tuple((int(s), str(d)) for s, d in call["rows"]),
                call["member"],
                tuple(call["pieces"]),
            )
            for call in self.head["calls"]
        )

    @cached_property
    def by_key(self) -> Mapping[str, tuple[Call, ...]]:
        """The answers to each question, in the order they were given."""
        calls: dict[str, tuple[Call, ...]] = {}
        for call in self.calls:
            key = call.question.key(call.rows)
            calls[key] = (*calls.get(key, ()), call)
        return calls

    def data(self, call: Call) -> bytes:
        with zipfile.ZipFile(self.file) as file:
            return file.read(call.member)


def read_recording(name: str) -> Recorded:
    """Open a recording and hold its members against their digests.

    Raises:
        MeasurementError: no such file, no recording, of another format, or damaged.
    """
    head, _ = _KIND.read(name, keep=False)
    recorded = Recorded(name, head)
    try:
        _ = recorded.description, recorded.by_key
    except (ValueError, KeyError, TypeError) as error:
        raise _KIND.unreadable(name, error) from None
    return recorded
