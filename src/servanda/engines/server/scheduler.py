# The queue before the engine, and the one thread that owns it.
#
# Jobs of one kind that come within `wait_s` of the oldest run together, up to `max_batch`.
# While a batch runs, others queue; between two of its steps short calls (encode, ...) are
# answered, so that a request does not wait for another's batch before it can queue.

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from servanda.contract.identity import Description
from servanda.contract.model import Path
from servanda.engines.base import streams
from servanda.errors import MeasurementError, ServandaError
from servanda.theory.sampling import Sampling, likeliest, processed_logprobs, seed_of
from servanda.traces.trace import Batch, Trace

# A job is one sequence, to be drawn or to be scored; events are what comes of it.
#
# Its sequence number is the request's seed, and the engine's seed is constant: so what it draws
# does not depend on its company.


Ids = tuple[int, ...]


@dataclass(frozen=True)
class Token:
    """One token of a reply.

    Args:
        logp: its processed logprob; NaN where the engine gave none.
        rank: how many tokens are likelier; None where no one counted.
        cached: tokens of the prompt that were read from a cache; None where no one counted.
        word: its text; "" unless logprobs are asked for.
        best: (id, logprob, text) of the top-k tokens, best first.
        text: what a stream says with it.
        end: why it is the last one; None where it is not.
    """

    id: int
    logp: float
    rank: int | None = None
    word: str = ""
    best: tuple[tuple[int, float, str], ...] = ()
    text: str = ""
    end: str | None = None
    cached: int | None = None


@dataclass(frozen=True)
class Ended:
    """A sequence is over: its whole text, without the token that ended it."""

    text: str = ""
    why: str = "length"


@dataclass(frozen=True)
class Failed:
    error: Exception


Event = Token | Ended | Failed


@dataclass(eq=False)
class Job:
    """One sequence.

    Args:
        width: new tokens at most.
        given: what is scored, where nothing is drawn, by `path`.
        best: top-k tokens to report of each position; None where no logprob is asked for.
        salt: of its request; a prompt that is scored reads no cache.
        speaks: whether tokens carry the text that they add.
        aside: whether the engine that stands aside runs it, where there is one, in test mode.
        tell: takes the events, in the engine's thread.
    """

    prompt: Ids
    width: int
    sampling: Sampling
    sequence: int
    emit: Callable[[Event], None]
    given: Ids | None = None
    path: Path = "decode"
    best: int | None = None
    salt: str = ""
    speaks: bool = False
    aside: bool = False
    dropped: bool = False
    drawn: list[int] = field(default_factory=list)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Jobs of one kind may run together."""
        return self.given is None, self.path, self.aside, self.sampling, self.width


def sequence_of(seed: int, place: int) -> int:
    """The sequence number of a request's n-th choice: the seed itself for the first."""
    return seed_of(seed, "choice", place) if place else seed


# Texts of tokens: of single ones, of whole answers, and of answers as they grow.


_UNFINISHED = "�"  # a token may end within a character: its other bytes are to come


class Detokenizer:
    """What token ids read as; an engine that cannot decode has no texts."""

    def __init__(self, engine: Any, description: Description) -> None:
        self._engine, self._decodes = engine, description.decodes
        self._known: dict[int, str] = {}

    def text(self, tokens: Sequence[int]) -> str:
        return self._engine.decode([list(tokens)])[0] if self._decodes and tokens else ""

    def of(self, ids: Sequence[int]) -> list[str]:
        """The text of each token on its own; "" where the engine cannot decode."""
        new = [i for i in dict.fromkeys(ids) if i not in self._known and i >= 0]
        if new and self._decodes:
            texts = self._engine.decode([[i] for i in new])
            self._known.update(zip(new, texts, strict=True))
        return [self._known.get(i, "") for i in ids]


class StreamDetokenizer:
    """An answer as it grows: what each token adds to the text.

    Few tokens are decoded at a time: those of the last piece and the new ones, for what a token
    reads as hangs on what is before it.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._tokens: list[int] = []
        self._from, self._emitted = 0, 0  # the last piece is tokens[from:emitted]

    def after(self, tokens: Sequence[int]) -> str:
        """What more is said with these tokens; "" while a character is unfinished."""
        self._tokens += tokens
        text = self._detokenizer.text(self._tokens[self._from :])
        return "" if text.endswith(_UNFINISHED) else self._emit(text)

    def rest(self) -> str:
        """What is left at the end, finished or not."""
        return self._emit(self._detokenizer.text(self._tokens[self._from :]))

    def _emit(self, text: str) -> str:
        before = self._detokenizer.text(self._tokens[self._from : self._emitted])
        if self._emitted < len(self._tokens):
            self._from, self._emitted = self._emitted, len(self._tokens)
        return text[len(before) :]


# Jobs to engine verbs: what runs together, and what comes of each token.


SEED = 0  # of the engine; a request's own is the number of its sequence


class Executor:
    """An engine with what replies need beside its numbers: texts and top-k tokens.

    `engine` runs the jobs, and `aside` those that are set aside, where there is one.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.aside: Any = None
        self.description = engine.describe()
        self.detokenizer = Detokenizer(engine, self.description)

    def run(self, jobs: Sequence[Job]) -> Iterator[None]:
        """Jobs of one kind, with unlike sequence numbers; a step for each `next`.

        Raises:
            Exception: whatever the engine raises.
        """
        first, jobs = jobs[0], sorted(jobs, key=lambda job: job.sequence)
        engine = self.aside if first.aside and self.aside is not None else self.engine
        sequences, prompts = tuple(j.sequence for j in jobs), tuple(j.prompt for j in jobs)
        batch = Batch(sequences, prompts, first.width, tuple(j.given or () for j in jobs))
        best = max(j.best or 0 for j in jobs)
        if first.given is None:
            salts = tuple(job.salt for job in jobs)
            batch = Batch(sequences, prompts, first.width, salts=salts, warm=True)
            traces = self._drawn(engine, batch, first.sampling, best)
        else:
            trace = engine.score(batch, first.sampling, first.path)
            traces = [_with_best(engine, trace, batch, first.sampling, first.path, best)]
        stream_detokenizers = {job.sequence: StreamDetokenizer(self.detokenizer) for job in jobs}
        for trace in traces:
            for job, tokens in self._tokens(trace, jobs):
                for token in self._spoken(job, tokens, stream_detokenizers[job.sequence]):
                    job.emit(token)
            yield
        for job in jobs:
            if not job.drawn or len(job.drawn) < len(job.given or ()):
                job.emit(Failed(MeasurementError("the engine lost the sequence: nothing came")))
                continue
            job.emit(Ended(self.detokenizer.text(self._open(job.drawn)), self._why(job)))

    def _drawn(self, engine: Any, batch: Batch, sampling: Sampling, best: int) -> Iterable[Trace]:
        if streams(engine):
            return engine.steps(batch, sampling, SEED, best)
        trace = engine.generate(batch, sampling, SEED)
        given = Batch(batch.sequence_S, batch.prompts, batch.width, trace.continuations)
        return [_with_best(engine, trace, given, sampling, "decode", best)]

    def _tokens(self, trace: Trace, jobs: Sequence[Job]) -> Iterator[tuple[Job, list[Token]]]:
        """The tokens of each job in a trace, which may be of some of them only."""
        job_of = {job.sequence: job for job in jobs}
        logp_N = trace.columns["logp"]
        rank_N = trace.columns.get("rank", np.full(len(logp_N), np.nan))
        cached_N = trace.columns.get("cached")
        ids_NK, logp_NK = trace.best or (np.zeros((len(logp_N), 0)),) * 2
        ends = trace.length_S.cumsum()
        for sequence, start, end in zip(
            trace.sequence_S.tolist(), (ends - trace.length_S).tolist(), ends.tolist(), strict=True
        ):
            job, tokens = job_of[sequence], []
            for n in range(start, end):
                best = (ids_NK[n, : job.best].tolist(), logp_NK[n, : job.best].tolist())
                rank = None if np.isnan(rank_N[n]) else int(rank_N[n])
                token = self._token(job, int(trace.token_N[n]), float(logp_N[n]), rank, best)
                cached = None if cached_N is None else int(cached_N[n])
                tokens.append(replace(token, cached=cached))
            yield job, tokens

    def _token(
        self, job: Job, token: int, logp: float, rank: int | None, best: tuple[list, list]
    ) -> Token:
        if job.best is None:
            return Token(token, logp, rank)
        word, *words = self.detokenizer.of([token, *best[0]])
        return Token(token, logp, rank, word, tuple(zip(*best, words, strict=True)))

    def _spoken(
        self, job: Job, tokens: Sequence[Token], stream: StreamDetokenizer
    ) -> Iterator[Token]:
        """Tokens with what a stream says at each, and why the last one is."""
        for token in tokens:
            job.drawn.append(token.id)
            last = job.given is not None and len(job.drawn) == len(job.given)
            ended = job.given is None and token.id in self.description.eos
            full = len(job.drawn) == job.width
            why = self._why(job) if last or ended or full else None
            text = ""
            if job.speaks:
                text = stream.after(self._open([token.id]) if why else [token.id])
                text += stream.rest() if why else ""
            yield replace(token, text=text, end=why)

    def _why(self, job: Job) -> str:
        ended = job.drawn[-1] in self.description.eos
        early = job.given is None and not self.description.eos and len(job.drawn) < job.width
        return "stop" if ended or early else "length"

    def _open(self, tokens: list[int]) -> list[int]:
        """The tokens before the one that ends them."""
        return tokens[:-1] if tokens and tokens[-1] in self.description.eos else tokens


def _with_best(
    engine: Any, trace: Trace, given: Batch, sampling: Sampling, path: Path, best: int
) -> Trace:
    """The trace with the top-k tokens, from the logits of the same path."""
    if not best:
        return trace
    pieces = [
        likeliest(processed_logprobs(logits_RV, sampling), best)
        for logits_RV in engine.logits(given, path)
    ]
    columns = {name: np.concatenate([p[name] for p in pieces]) for name in pieces[0]}
    return replace(trace, columns={**trace.columns, **columns})


T = TypeVar("T")
_ENDING = "the server is ending"


class QueueFullError(ServandaError):
    """More sequences wait than the queue takes."""


class Scheduler:
    """Runs jobs on an engine, in a thread of its own.

    Args:
        max_batch: sequences that run together at most.
        wait_s: how long the oldest job of a batch waits for company.
        places: sequences that may wait.
    """

    def __init__(self, engine: Any, *, max_batch: int, wait_s: float, places: int = 1024) -> None:
        self.executor = Executor(engine)
        self.max_batch, self.wait_s, self.places = max_batch, wait_s, places
        self._jobs: deque[tuple[float, Job]] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._next: tuple[Any, Any, Future[None]] | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def put(self, jobs: Sequence[Job]) -> None:
        """Queue all of them.

        Raises:
            QueueFullError: there is no place for them, and none was queued.
        """
        with self._changed:
            self._refuse_closing()
            if len(self._jobs) + len(jobs) > self.places:
                raise QueueFullError(
                    f"{len(self._jobs)} sequences wait already, and the queue takes {self.places}",
                    hint="ask again later",
                )
            now = time.monotonic()
            self._jobs.extend((now, job) for job in jobs)
            self._changed.notify()

    def drop(self, jobs: Sequence[Job]) -> None:
        """No one waits for them any more: their places are free, and a batch of none ends."""
        with self._changed:
            for job in jobs:
                job.dropped = True
            gone = set(map(id, jobs))
            self._jobs = deque(entry for entry in self._jobs if id(entry[1]) not in gone)

    def call(self, verb: Callable[..., T], *arguments: Any) -> Future[T]:
        """A short call of the engine, in its thread."""
        future: Future[T] = Future()

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(verb(*arguments))
            except BaseException as error:
                future.set_exception(error)

        with self._changed:
            self._refuse_closing()
            self._calls.append(answer)
            self._changed.notify()
        return future

    async def run_by(self, engine: Any, aside: Any = None) -> None:
        """Let another engine run what begins from now on; done once no batch of before runs.

        Args:
            aside: runs the jobs that are set aside; None: they run as all the others.
        """
        done: Future[None] = Future()
        with self._changed:
            self._refuse_closing()
            self._next = (engine, aside, done)
            self._changed.notify()
        await asyncio.wrap_future(done)

    @property
    def waiting(self) -> int:
        return len(self._jobs)

    def end(self) -> None:
        """End between two steps; running and waiting requests get an error."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends, and waits for the engine's thread."""
        self.end()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (jobs := self._together()) is not None:
            self._run(jobs)
        with self._changed:
            left = [job for _, job in self._jobs]
            self._jobs.clear()
            if self._next is not None:
                self._next[2].set_exception(MeasurementError(_ENDING))
        for job in left:
            job.emit(Failed(MeasurementError(_ENDING)))
        self._answer_calls()

    def _refuse_closing(self) -> None:
        if self._closing:
            raise MeasurementError(_ENDING)

    def _run(self, jobs: Sequence[Job]) -> None:
        try:
            steps: Iterator[None] = self.executor.run(jobs)
            for _ in steps:
                self._answer_calls()
                if self._closing:
                    raise MeasurementError(_ENDING)
                if all(job.dropped for job in jobs):
                    return
        except Exception as error:
            for job in jobs:
                job.emit(Failed(error))

    def _together(self) -> list[Job] | None:
        """The next batch, once it is full or has waited long enough; None at the end."""
        while True:
            self._answer_calls()
            with self._changed:
                if self._closing:
                    return None
                if self._next is not None:
                    self.executor.engine, self.executor.aside, done = self._next
                    self._next = None
                    done.set_result(None)
                found = self._alike()
                left_s = None
                if found:
                    left_s = self._jobs[0][0] + self.wait_s - time.monotonic()
                    if left_s <= 0 or len(found) == self.max_batch:
                        taken = set(map(id, found))
                        self._jobs = deque(e for e in self._jobs if id(e[1]) not in taken)
                        return found
                if not self._calls:
                    self._changed.wait(left_s)

    def _alike(self) -> list[Job]:
        """The oldest job and those that may run with it; no sequence number is twice in a batch."""
        found: dict[int, Job] = {}
        for _, job in self._jobs:
            if len(found) == self.max_batch:
                break
            if job.kind == self._jobs[0][1].kind and job.sequence not in found:
                found[job.sequence] = job
        return [*found.values()]

    def _answer_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()
