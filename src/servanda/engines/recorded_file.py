# Recordings: what one engine answered, question by question, in one file.
#
#   head.json        format, description, vocabulary, encoded and decoded texts; every call:
#                    its question, its rows, its member and the digest of that; its own digest
#   000012.parquet   the trace of a call; 000013.npy   the logits of one
#
# The key of a call is its question (verb, sampling, seed, path, width, together) and its
# rows in order: sequence, prompt, continuation.  So the batch is part of the record (law 7):
# a kernel's numbers depend on what ran beside a sequence, and none is handed out of another
# batch.
#
# A reference pack is a recording with a schedule: what one kernel drew, for others to
# re-score.  It is one sample, so each of its rows answers by itself.
#
# Any zip tool can look inside; nothing in such a file is ever executed.

from __future__ import annotations

import json
import threading
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from servanda.contract.fields import Value
from servanda.contract.identity import Description, digest_of
from servanda.contract.model import Kernel
from servanda.contract.workload import Path as Scoring
from servanda.contract.workload import Workload
from servanda.engines.arrow import from_parquet, from_table
from servanda.engines.folder import reading
from servanda.errors import MeasurementError
from servanda.traces.json_fields import words
from servanda.traces.trace import Batch, Trace, some

FORMAT = 2
HEAD = "head.json"
LOGITS_BYTES = 1 << 28  # of all logits of a recording, before they are compressed
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same content is the same file, whenever it was written

_Kind = TypeVar("_Kind", bound="Recorded")
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

    @property
    def alone(self) -> Question:
        """The question of a row by itself, whatever runs beside it.

        The widest continuation of a batch limits a draw alone, and a row is scored on one path.
        """
        width = self.width if self.verb == "generate" else 0
        path = None if self.verb == "score" else self.path
        return replace(self, width=width, together=None, path=path)

    def key(self, rows: Iterable[Row]) -> str:
        return digest_of([asdict(self), [list(row) for row in rows]])


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


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


class PackSchedule(Value):
    """What a reference pack is a sample of.

    Args:
        kernel: the one that drew; its model lies where the pack was made.
        workload: sampling, samples and rounds; `prompts` names the file they came from.
        groups: prompt groups that were drawn.
        prompts, golden: the texts, as they were; golden is None without golden texts.
        golden_path: how the golden texts were scored.
    """

    kernel: Kernel
    workload: Workload
    groups: int
    prompts: str
    golden: str | None
    golden_path: Scoring


class Recording:
    """A recording being written; it is there once `finish` was called, and not before.

    Args:
        schedule: makes it a reference pack.
    """

    def __init__(self, path: Path, schedule: PackSchedule | None = None) -> None:
        self.path, self._schedule = path, schedule
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
        digest = _digest(data)
        with self._lock:
            if digest not in self._members:
                self._members[digest] = self._new(question.verb, digest, data)
            member = self._members[digest]
            question = question if self._schedule is None else question.alone
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
        schedule = self._schedule
        content = {
            "format": FORMAT,
            "description": asdict(self.description),
            "vocabulary": self.vocabulary,
            "encoded": self.encoded,
            "decoded": self.decoded,
            "schedule": None if schedule is None else schedule.model_dump(mode="json"),
            "calls": [asdict(call) for call in self._calls],
            "members": self._digests,
        }
        head = json.loads(json.dumps(content))  # as anyone who reads it will see it
        head["digest"] = digest_of(head)
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
        info = zipfile.ZipInfo(member, _EPOCH)
        stored = member.endswith(".parquet")  # it compresses by itself
        info.compress_type = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
        with self._written():
            self._zip.writestr(info, data)

    def _written(self) -> AbstractContextManager[None]:
        hint = "choose another place, or make room there"
        return MeasurementError.of_system(f"{self.path} cannot be written", hint=hint)


@dataclass(frozen=True)
class Recorded:
    """An opened recording; its members were compared with their digests."""

    file: str
    head: Mapping[str, Any]

    noun: ClassVar[str] = "recording"
    command: ClassVar[str] = "servanda check CONTRACT --record FILE"  # writes one
    parsed: ClassVar[tuple[str, ...]] = ("description", "by_key")  # as the file is opened

    @classmethod
    def read(cls: type[_Kind], file: str) -> _Kind:
        """Open a file and hold its members against their digests.

        Raises:
            MeasurementError: no such file, another kind, of another format, or damaged.
        """
        anew = f"copy the file again, or write it anew with `{cls.command}`"
        try:
            with zipfile.ZipFile(file) as archive:
                if HEAD not in archive.namelist():
                    raise MeasurementError(
                        f"{file} is a zip file, but no {cls.noun}: it has no {HEAD}",
                        hint=f"{cls.noun}s are written by `{cls.command}`",
                    )
                head = json.loads(archive.read(HEAD))
                stated = isinstance(head, dict) and {"format", "calls"} <= head.keys()
                if not stated or not isinstance(head["format"], int):
                    raise MeasurementError(
                        f"{file} is no {cls.noun}: its {HEAD} states neither format nor calls",
                        hint=anew,
                    )
                MeasurementError.refuse_form(file, head["format"], FORMAT, anew, "format")
                members = head["members"].items()
                odd = [m for m, digest in members if _digest(archive.read(m)) != digest]
            claimed = {key: value for key, value in head.items() if key != "digest"}
            if digest_of(claimed) != head.get("digest"):
                odd.append(HEAD)
            if odd:
                raise MeasurementError(
                    f"{file} is damaged: {words(odd[0])} is not what its digest says", hint=anew
                )
            kind = Recorded if head["schedule"] is None else Pack
            if kind is not cls:
                raise MeasurementError(
                    f"{file} is a {kind.noun}, and no {cls.noun}",
                    hint=f"{cls.noun}s are written by `{cls.command}`",
                )
            found = cls(file, head)
            for part in cls.parsed:
                getattr(found, part)
        except FileNotFoundError:
            raise MeasurementError(
                f"there is no {cls.noun} {file}", hint=f"write one with `{cls.command}`"
            ) from None
        except zipfile.BadZipFile as error:
            raise MeasurementError(
                f"{file} is no {cls.noun}, or only a part of one: {words(str(error))}", hint=anew
            ) from None
        except MeasurementError:
            raise
        except Exception:  # zlib speaks of damage in an error of its own
            with reading(Path(file), anew):
                raise
        return found

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

    def trace(self, call: Call) -> Trace:
        return from_table(from_parquet(self.data(call)))


class Pack(Recorded):
    """An opened reference pack; each row of it is an answer by itself."""

    noun = "reference pack"
    command = "servanda tools measure KERNEL -o x.pack"
    parsed = ("description", "by_row", "schedule")

    @cached_property
    def schedule(self) -> PackSchedule:
        return PackSchedule.model_validate(self.head["schedule"])

    @cached_property
    def by_row(self) -> frozenset[str]:
        """The keys of all questions of one row."""
        return frozenset(c.question.key([row]) for c in self.calls for row in c.rows)

    @cached_property
    def answers(self) -> Mapping[str, Trace]:
        """All answers to each verb, in dispatch order."""
        traces: dict[str, list[Trace]] = {}
        for call in self.calls:
            traces.setdefault(call.question.verb, []).append(self.trace(call))
        joined = {verb: Trace.join(parts) for verb, parts in traces.items()}
        return {verb: some(t, sorted(t.sequence_S.tolist())) for verb, t in joined.items()}
