# Engines `recorded` and `pack`: what another engine answered, elsewhere; and the Recorder that
# writes it.
#
# A contract is measured where the kernel runs, and checked again where it does not, to the
# same verdict.  What is not in the file is refused by name and never made up; so is time,
# which belongs to the machine it was measured on.

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.identity import Description, digest_of
from servanda.contract.model import Kernel, Path
from servanda.engines.arrow import to_parquet, to_table
from servanda.engines.base import ENGINES, Engine, verb_of
from servanda.engines.recorded_file import (
    Call,
    Pack,
    PackSchedule,
    Question,
    Recorded,
    Recording,
    Row,
    rows_of,
)
from servanda.errors import MeasurementError
from servanda.theory.sampling import Sampling
from servanda.traces.json_fields import words
from servanda.traces.latency import Timing
from servanda.traces.trace import Batch, Trace, some

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
