# Jobs to engine verbs: what runs together, and what comes of each token.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from servanda.contract.model import Path
from servanda.engines.base import streams
from servanda.engines.server.detokenizer import Detokenizer, StreamDetokenizer
from servanda.engines.server.jobs import Ended, Failed, Job, Token
from servanda.errors import MeasurementError
from servanda.theory.sampling import Sampling, likeliest, processed_logprobs
from servanda.traces.trace import Batch, Trace

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
