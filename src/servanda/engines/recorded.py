# Engines `recorded` and `pack`: what another engine answered, elsewhere; and the Recorder that
# writes it.
#
# A contract is measured where the kernel runs, and checked again where it does not, to the
# same verdict.  What is not in the file is refused by name and never made up; so is time,
# which belongs to the machine it was measured on.
#
# A recording is what one engine answered, question by question, in one file:
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

import io
import json
import threading
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path as FilePath
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from servanda.contract.fields import Value
from servanda.contract.identity import Description, digest_of
from servanda.contract.model import Kernel, Path
from servanda.contract.workload import Path as Scoring
from servanda.contract.workload import Workload
from servanda.engines.arrow import from_parquet, from_table, to_parquet, to_table
from servanda.engines.base import ENGINES, Engine, verb_of
from servanda.engines.folder import reading
from servanda.errors import MeasurementError
from servanda.theory.sampling import Sampling
from servanda.traces.json_fields import words
from servanda.traces.trace import Batch, Timing, Trace, some

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

    def __init__(self, path: FilePath, schedule: PackSchedule | None = None) -> None:
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
            with reading(FilePath(file), anew):
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


_NOUNS = {"generate": "draw", "score": "score", "logits": "logits", "top": "best tokens"}
_OF_GOLDEN = ("logits", "top")  # verbs that golden texts alone are asked with


def _question(
    verb: str,
    batch: Batch,
    sampling: Sampling | None = None,
    seed: int | None = None,
    path: Path | None = None,
) -> Question:
    return Question(
        verb,
        batch.width,
        batch.together,
        None if sampling is None else sampling.model_dump(mode="json"),
        None if seed is None else str(seed),
        path,
    )


class Recorder:
    """An engine that answers as the one it wraps, and keeps every answer in a recording.

    Closing it closes that engine; the recording is its owner's to finish.
    """

    def __init__(self, engine: Engine, recording: Recording) -> None:
        self._engine, self._recording = engine, recording

    def describe(self) -> Description:
        description = self._engine.describe()
        if self._recording.description is None:
            # anyone who replays may ask which tokens these are
            self._recording.vocabulary = self._engine.vocabulary()
        self._recording.description = description
        return description

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        ids = self._engine.encode(texts)
        self._recording.encoded.update(zip(texts, ids, strict=True))
        return ids

    def vocabulary(self) -> list[str]:
        return self._engine.vocabulary()

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        texts = verb_of(self._engine, "decode")(ids)
        self._recording.decoded.update(zip(map(_ids_key, ids), texts, strict=True))
        return texts

    def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Trace:
        trace = verb_of(self._engine, "generate")(batch, sampling, seed)
        return self._record(_question("generate", batch, sampling, seed), batch, trace)

    def score(self, batch: Batch, sampling: Sampling, path: Path) -> Trace:
        trace = self._engine.score(batch, sampling, path)
        return self._record(_question("score", batch, sampling, path=path), batch, trace)

    def logits(self, batch: Batch, path: Path) -> Iterator[NDArray[np.floating]]:
        pieces = []
        for piece in self._engine.logits(batch, path):
            pieces.append(np.array(piece))
            yield piece
        if pieces:
            sink = io.BytesIO()
            np.save(sink, np.concatenate(pieces), allow_pickle=False)
            question = _question("logits", batch, path=path)
            rows = [len(piece) for piece in pieces]
            self._recording.add(question, rows_of(batch), sink.getvalue(), rows)

    def top(self, batch: Batch, path: Path) -> Trace:
        return self.keep_top(batch, path, self._engine.top(batch, path))

    def keep_top(self, batch: Batch, path: Path, trace: Trace) -> Trace:
        """Keep the best tokens of a batch, which need not be the engine's own choice."""
        return self._record(_question("top", batch, path=path), batch, trace)

    def time(self, batch: Batch, sampling: Sampling, seed: int, record: bool) -> Timing:
        return self._engine.time(batch, sampling, seed, record)

    def close(self) -> None:
        self._engine.close()

    def _record(self, question: Question, batch: Batch, trace: Trace) -> Trace:
        self._recording.add(question, rows_of(batch), to_parquet(to_table(trace)))
        return trace


@contextmanager
def record(
    engine: Engine, path: str | FilePath, schedule: PackSchedule | None = None
) -> Iterator[Recorder]:
    """Answers of an engine, kept in a file that is whole at the end of the block.

    A block that ends in an error leaves no file; the engine is closed in either case.

    Args:
        schedule: makes the file a reference pack.

    Raises:
        MeasurementError: the file cannot be written, or logits are too large to be kept.
    """
    with closing(engine):
        recording = Recording(FilePath(path), schedule)
        recorder = Recorder(engine, recording)
        try:
            yield recorder
            recorder.describe()
            recording.finish()
        finally:
            recording.discard()


class RecordedEngine:
    """Answers from a file, and only what is in it."""

    kind: type[Recorded] = Recorded

    def __init__(self, kernel: Kernel) -> None:
        if not kernel.model:
            raise MeasurementError(
                f"engine {kernel.engine!r} needs a model",
                hint=f"write `model: x.{kernel.engine}` beside the engine",
            )
        self.kernel = kernel
        self.recorded = self.kind.read(kernel.model)
        self._anew = f"write another one with `{self.recorded.command}`"
        self._turn: Counter[str] = Counter()

    def describe(self) -> Description:
        own, verbs = self.recorded.description, {c.question.verb for c in self.recorded.calls}
        return replace(
            own,
            fingerprint={**own.fingerprint, self.kernel.engine: self.recorded.digest},
            full_logits="logits" in verbs,
            top=own.top if "top" in verbs else 0,
            timed=False,
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self.recorded.head["encoded"]
        for text in texts:
            if text not in encoded:
                raise self._lacks(
                    f"token ids of {words(repr(text[:40]))}", "give the prompts of the file"
                )
        return [list(encoded[text]) for text in texts]

    def vocabulary(self) -> list[str]:
        return list(self.recorded.head["vocabulary"] or ())

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        decoded = self.recorded.head["decoded"]
        keys = [_ids_key(tokens) for tokens in ids]
        for tokens, key in zip(ids, keys, strict=True):
            if key not in decoded:
                raise self._lacks(f"text of the ids {list(tokens)[:8]}")
        return [decoded[key] for key in keys]

    def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Trace:
        return self._trace(_question("generate", batch, sampling, seed), batch)

    def score(self, batch: Batch, sampling: Sampling, path: Path) -> Trace:
        return self._trace(_question("score", batch, sampling, path=path), batch)

    def logits(self, batch: Batch, path: Path) -> Iterator[NDArray[np.floating]]:
        call = self._call_of(_question("logits", batch, path=path), rows_of(batch))
        logits_NV = np.load(io.BytesIO(self.recorded.data(call)), allow_pickle=False)
        yield from np.split(logits_NV, np.cumsum(call.pieces)[:-1])

    def top(self, batch: Batch, path: Path) -> Trace:
        return self._trace(_question("top", batch, path=path), batch)

    def time(self, batch: Batch, sampling: Sampling, seed: int, record: bool) -> Timing:
        raise MeasurementError(
            f"{self._name} cannot be timed: seconds belong to the machine that spent them",
            hint="leave out the clauses on time for this kernel, or check them where it runs",
        )

    def close(self) -> None:
        pass

    @property
    def _name(self) -> str:
        return f"the {self.recorded.noun} {self.recorded.file}"

    def _trace(self, question: Question, batch: Batch) -> Trace:
        return self.recorded.trace(self._call_of(question, rows_of(batch)))

    def _call_of(self, question: Question, rows: Sequence[Row]) -> Call:
        key = question.key(rows)
        answers = self.recorded.by_key.get(key)
        if answers is None:
            raise self._refusal(question, rows)
        # a kernel that answers otherwise each time is replayed in the order it did
        self._turn[key] += 1
        return answers[(self._turn[key] - 1) % len(answers)]

    def _lacks(self, what: str, *moves: str) -> MeasurementError:
        hint = ", or ".join([*moves, self._anew])
        return MeasurementError(f"{self._name} has no {what}", hint=hint)

    def _refusal(self, question: Question, rows: Sequence[Row]) -> MeasurementError:
        """Why a question has no answer here: sequence, option, prompt, or company."""
        noun, golden = _NOUNS[question.verb], question.verb in _OF_GOLDEN
        first = rows[0][0] if rows else "none"
        calls = [c for c in self.recorded.calls if c.question.verb == question.verb]
        if not calls:
            without = "leave out `golden:` and the numerical section for this kernel"
            return self._lacks(f"{noun} of any sequence", *[without] * golden)
        same = {row for c in calls if c.question == question for row in c.rows}
        if not same:
            wanted = asdict(question)
            recorded = [asdict(call.question) for call in calls]
            there = max(recorded, key=lambda other: sum(wanted[n] == other[n] for n in wanted))
            what = next(name for name in wanted if wanted[name] != there[name])
            again = " and without --fresh" if what == "seed" else ""
            return self._lacks(
                f"{noun} of sequence {first} with {what} {_plain(wanted[what])}: it has {what} "
                f"{_plain(there[what])}",
                f"ask as the recorded run did{again}",
            )
        sequences = {sequence for sequence, _ in same}
        texts = "golden texts" if golden else "prompts, samples and round"
        fewer = "" if golden else ", lower the second number of promotion.offline.prompt_groups"
        for sequence, digest in rows:
            if sequence not in sequences:
                seed = f" with seed {question.seed}" if question.seed is not None else ""
                return self._lacks(
                    f"{noun} of sequence {sequence}{seed}: it ends at sequence {max(sequences)}",
                    f"give the {texts} of the recorded run{fewer}",
                )
            if (sequence, digest) not in same:
                return MeasurementError(
                    f"{self._name} has sequence {sequence} with another prompt or continuation",
                    hint=f"give the {texts} of the recorded run, or {self._anew}",
                )
        return MeasurementError(
            f"{self._name} has sequence {first} in another batch than the {len(rows)} "
            "sequences that are asked for",
            hint="what ran beside a sequence is part of its record: ask with the round, samples "
            f"and batch_size of the recorded run, or {self._anew}",
        )


ENGINES.register("recorded")(RecordedEngine)


@ENGINES.register("pack")
class PackEngine(RecordedEngine):
    """Answers from a reference pack: its draws, noise floor and golden texts, in any batch."""

    kind = Pack
    recorded: Pack

    def describe(self) -> Description:
        best = self.recorded.answers["top"].best if "top" in self.recorded.answers else None
        top = 0 if best is None else best[0].shape[1]
        return replace(super().describe(), top=top, decodes=False)

    def _trace(self, question: Question, batch: Batch) -> Trace:
        question, rows = question.alone, rows_of(batch)
        answers = self.recorded.answers.get(question.verb)
        keys = (question.key([row]) for row in rows)
        if answers is None or not self.recorded.by_row.issuperset(keys):
            raise self._refusal(question, rows)
        return some(answers, list(batch.sequence_S))

    def _refusal(self, question: Question, rows: Sequence[Row]) -> MeasurementError:
        scored = [c.question for c in self.recorded.calls if c.question.verb == "score"]
        if question.verb != "score" or any(other != question for other in scored):
            return super()._refusal(question, rows)
        return MeasurementError(
            f"{self._name} cannot score tokens that it did not draw",
            hint="make it the infer kernel, the side that draws; the other kernel re-scores",
        )


def _ids_key(tokens: Sequence[int]) -> str:
    return digest_of([int(token) for token in tokens])


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {v}" for name, v in value.items() if v is not None)
    return str(value)
