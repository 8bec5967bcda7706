# Engine `openai_http`: a kernel that a server runs.
#
# One request a sequence, batch_size of them in flight: which of them a server computes
# together is its own affair.  Token ids go out and token ids come back.
# What is never asked of a server is full logits, for they do not fit into a reply.
# After every batch it is examined again: one that was started anew may hold other weights.
# Axes: S sequences, N tokens of all sequences, K top-k tokens.

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from servanda.contract.identity import Description
from servanda.contract.model import Kernel, Path, base_of
from servanda.engines.base import ENGINES, about_of, padded_best, refuse_misfits
from servanda.engines.foreign_code import refuse_code_of_kernel
from servanda.engines.http import routed_experts
from servanda.engines.http.dialects import detect
from servanda.engines.http.dialects.base import (
    BEST,
    NEUTRAL,
    Answer,
    Meaning,
    SequenceRequest,
    Server,
    best_of,
    neutral,
    without_sampling,
)
from servanda.engines.http.draft_meter import drafts_since, meter_of
from servanda.engines.http.key import key_of
from servanda.engines.http.transport import LIMITS, Limits, Transport
from servanda.engines.http_policy import server_url
from servanda.errors import MeasurementError
from servanda.theory.sampling import Sampling, seed_of
from servanda.traces.trace import Batch, Timing, Trace

# The answers of a server as one trace.


def trace_of(
    batch: Batch,
    answers: Sequence[Answer],
    k: int,
    about: Mapping[str, str],
) -> Trace:
    """What came back as one trace, with the k top-k tokens; NaN where there are fewer."""
    logp_N = np.array([v for a in answers for v in a.logp], dtype=np.float64)
    columns = {"logp": logp_N, **padded_best([step for a in answers for step in a.best], k)}
    lengths, tokens = [len(a.tokens) for a in answers], [t for a in answers for t in a.tokens]
    if batch.salts:
        cached_S = [math.nan if a.cached is None else float(a.cached) for a in answers]
        columns["cached"] = np.repeat(cached_S, lengths)
    columns |= routed_experts.columns([a.routes for a in answers], lengths)
    return Trace.of(batch, lengths, tokens, columns, about)


T = TypeVar("T")
R = TypeVar("R")


class HTTPEngine:
    """Draws and scores by asking a server; see `dialects` for how each kind is asked."""

    def __init__(
        self, kernel: Kernel, limits: Limits = LIMITS, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self.kernel = kernel
        self.unnamed = False  # whether requests leave the sampling to the server's defaults
        self.best = BEST  # likeliest tokens of a drawn step that are asked for
        if kernel.timeout_s is not None:
            limits = replace(limits, read_s=kernel.timeout_s, token_s=0.0)
        at, key = _address(kernel), key_of(kernel)
        self.transport = Transport(at, kernel.batch_size, limits, pause, key)
        try:
            self._meet()
        except BaseException:
            self.transport.close()
            raise
        self.clock: Callable[[], float] = time.perf_counter

    def _meet(self) -> None:
        """Ask the server what it is, and for one token: one that cannot give it says so now."""
        kernel = self.kernel
        self.dialect, self.server = detect(self.transport, kernel.dialect, kernel.served)
        self.meaning: Meaning = kernel.logprobs or self.server.meaning or self.dialect.meaning
        probe = SequenceRequest((0,), 1, NEUTRAL, 0, best=best_of(NEUTRAL, self.server))
        first = self.transport.ask(*self.dialect.draw(probe, self.server, self.meaning))
        self.dialect.drawn(first, probe, self.server)
        # a server's own digest of its version and settings, where it gives one
        system = first.get("system_fingerprint")
        self._drafts = meter_of(self.transport)
        self._fingerprint = {} if system is None else {"system_fingerprint": system.text()}

    def accept_changes(self) -> None:
        """Take over the server's description after a sync, which may have changed its name.

        Raises:
            MeasurementError: another kind of server answers there.
        """
        now = self.dialect.meet(self.transport, self.kernel.served, self.server)
        if now is None:
            raise MeasurementError(
                f"{self.transport.url} is no longer a server of dialect {self.dialect.name!r}",
                hint="look at its log: was it replaced or started anew during the sync?",
            )
        self.server = now

    def describe(self) -> Description:
        server = self.server
        return Description(
            fingerprint={
                "engine": "openai_http",
                "dialect": self.dialect.name,
                "version": server.version,
                "served": server.served,
                "logprobs": self.meaning,
                "batch_size": str(self.kernel.batch_size),
                **self._fingerprint,
                **server.facts,
            },
            tensors={},
            tokens=server.tokens,
            vocab_size=server.vocab_size,
            eos=server.eos,
            context=server.context,
            full_logits=False,
            top=server.top,
            timed=True,
            capture="float32",
            weights_from=self.kernel.weights_from or server.weights,
            scores=server.scores,
            encodes=self.dialect.encodes,
            decodes=self.dialect.decodes,
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        def encoded(text: str) -> list[int]:
            request = self.dialect.encode(text, self.server)
            return self.dialect.encoded(self.transport.ask(*request))

        return self._at_once(encoded, texts, self.kernel.batch_size)

    def vocabulary(self) -> list[str]:
        return []

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        def decoded(tokens: Sequence[int]) -> str:
            if not tokens:
                return ""
            request = self.dialect.decode(tuple(tokens), self.server)
            return self.dialect.decoded(self.transport.ask(*request))

        return self._at_once(decoded, ids, self.kernel.batch_size)

    def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Trace:
        self._refuse_sampling(sampling)
        best = best_of(sampling, self.server, self.best)
        sequences = self._sequences(batch, sampling, seed, best)
        if batch.salts and not batch.warm and self.dialect.flush is not None:
            self.transport.text(self.dialect.flush)

        def answer(sequence: SequenceRequest) -> Answer:
            endpoint, body = self.dialect.draw(sequence, self.server, self.meaning)
            body = without_sampling(body) if self.unnamed else body
            reply = self.transport.ask(endpoint, body, tokens=sequence.width)
            return self.dialect.drawn(reply, sequence, self.server)

        answers = self._all(answer, sequences, batch)
        about = about_of(batch, self.kernel, "decode", sampling) | drafts_since(self._drafts)
        return trace_of(batch, answers, best, about)

    def score(self, batch: Batch, sampling: Sampling, path: Path) -> Trace:
        # where what was served ranks among the likeliest tells how it was drawn
        best = best_of(sampling, self.server) if self.server.top else 0
        return self._scored(batch, sampling, path, best)

    def logits(self, batch: Batch, path: Path) -> Iterator[NDArray[np.float32]]:
        raise MeasurementError(
            f"{self.transport.url} gives no full logits: they do not fit into a reply",
            hint="let it be infer, whose likeliest tokens are enough for `golden:`, or leave out "
            "`golden:` and the numerical section",
        )

    def top(self, batch: Batch, path: Path) -> Trace:
        if not self.server.top:
            raise MeasurementError(
                f"{self.transport.url} gives no likeliest tokens of given positions "
                f"(dialect {self.dialect.name})",
                hint="leave out `golden:` and the numerical section for this kernel",
            )
        return self._scored(batch, NEUTRAL, path, best=self.server.top)

    def time(self, batch: Batch, sampling: Sampling, seed: int, record: bool) -> Timing:
        """By this process's clock, from the launch of the batch on.

        Tokens that come in one event came at once.
        """
        if record:
            self._refuse_sampling(sampling)
        best = best_of(sampling, self.server) if record else 0
        sequences = self._sequences(batch, sampling, seed, best, record)
        begun = self.clock()
        return Timing.of_requests(begun, self._all(self._streamed, sequences, batch))

    def close(self) -> None:
        self.transport.close()

    def _streamed(self, sequence: SequenceRequest) -> list[float]:
        """When each token of an answer came, by the clock."""
        step_T: list[float] = []
        done = False
        endpoint, body = self.dialect.stream(sequence, self.server, self.meaning)
        with closing(self.transport.events(endpoint, body, sequence.width)) as events:
            for event in events:
                now = self.clock()
                there, last = self.dialect.event(event, len(step_T))
                step_T += [now] * (there - len(step_T))
                done |= last
        if not done or not 1 <= len(step_T) <= sequence.width:
            raise MeasurementError(
                f"{self.transport.url}{endpoint} streamed {len(step_T)} tokens"
                + ("" if done else " and no end")
                + f", and 1 to {sequence.width} were asked for",
                hint="look at the log of the server, and at proxies between it and this machine",
            )
        return step_T

    def _scored(self, batch: Batch, sampling: Sampling, path: Path, best: int) -> Trace:
        if path not in self.server.scores:
            can = " or ".join(self.server.scores)
            raise MeasurementError(
                f"{self.transport.url} cannot score given tokens by {path} "
                f"(dialect {self.dialect.name})",
                hint=f"add path: {can} (,path={can})" if can else "let it be infer, or --referee",
            )
        if path == "decode":
            self._refuse_sampling(sampling)
        elif not neutral(sampling):
            raise MeasurementError(
                f"{self.transport.url} scores a prompt by raw logprobs, and the sampling has a "
                "temperature or a filter",
                hint="sample at temperature 1 without filters, or let a kernel that loads the "
                "checkpoint score",
            )
        if self.dialect.flush is not None and not batch.warm:
            self.transport.text(self.dialect.flush)

        def answer(sequence: SequenceRequest) -> Answer:
            if not sequence.given:  # it was lost when it was drawn
                return Answer((), (), ())
            request = self.dialect.score(sequence, self.server, path)
            # by decoding, token after token, as if they were drawn
            reply = self.transport.ask(*request, tokens=len(sequence.given))
            return self.dialect.scored(reply, sequence, self.server, path)

        sequences = self._sequences(batch, sampling, 0, best)
        answers = self._all(answer, sequences, batch)
        return trace_of(batch, answers, best, about_of(batch, self.kernel, path, sampling))

    def _sequences(
        self, batch: Batch, sampling: Sampling, seed: int, best: int, record: bool = True
    ) -> list[SequenceRequest]:
        refuse_misfits(batch, self.describe())
        given = batch.continuations or ((),) * len(batch)
        salts = batch.salts or (None,) * len(batch)
        return [
            SequenceRequest(
                prompt=tuple(int(t) for t in prompt),
                width=len(tokens) or batch.width,
                sampling=sampling,
                seed=seed_of(seed, "http", sequence, self.dialect.seed_bits),
                given=tuple(int(t) for t in tokens),
                best=best,
                record=record,
                salt=salt,
                warm=batch.warm,
            )
            for sequence, prompt, tokens, salt in zip(
                batch.sequence_S, batch.prompts, given, salts, strict=True
            )
        ]

    def _all(
        self,
        answer: Callable[[SequenceRequest], R],
        sequences: Sequence[SequenceRequest],
        batch: Batch,
    ) -> list[R]:
        answers = self._at_once(answer, sequences, batch.together or self.kernel.batch_size)
        self._refuse_another_server()
        return answers

    def _refuse_another_server(self) -> None:
        """Nothing of a batch is kept that a server may have answered which is not the one met.

        Raises:
            MeasurementError: it says other things of itself than it did.
        """
        now = self.dialect.meet(self.transport, self.server.served, self.server)
        if now == self.server:
            return
        what = "another kind of server answers there"
        if now is not None:
            odd = (
                f.name for f in fields(now) if getattr(now, f.name) != getattr(self.server, f.name)
            )
            what = f"its {' and '.join(_changed(name, self.server, now) for name in odd)} changed"
        raise MeasurementError(
            f"{self.transport.url} is no longer the server that was met: {what}",
            hint="put back the server that was measured and repeat the command, which goes on from "
            "there; or measure this one from the start, in another --run-dir",
        )

    def _at_once(self, answer: Callable[[T], R], items: Sequence[T], size: int) -> list[R]:
        """The answers in order, `size` of them in flight; the first that fails ends it all."""
        if not items:
            return []
        with ThreadPoolExecutor(min(size, len(items))) as pool:
            waiting = [pool.submit(partial(answer, item)) for item in items]
            try:
                return [future.result() for future in waiting]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _refuse_sampling(self, sampling: Sampling) -> None:
        refusal = self.dialect.refusal(sampling, self.meaning)
        if refusal is not None:
            reason, hint = refusal
            raise MeasurementError(f"{self.transport.url}: {reason}", hint=hint)


ENGINES.add("openai_http", HTTPEngine)


def _address(kernel: Kernel) -> str:
    """The url of a kernel, if it is the address of a server that may be asked."""
    if server_url(kernel.url or "") is None:
        raise MeasurementError(
            f"engine 'openai_http' needs the url of a server, and has {kernel.url!r}",
            hint="write `url: http://127.0.0.1:8000` beside the engine",
        )
    refuse_code_of_kernel(kernel, "kernel")
    return base_of(kernel.url or "")


def _changed(name: str, before: Server, now: Server) -> str:
    """A field of what a server says, in words; of its facts those that differ."""
    if name != "facts":
        return name
    odd = {key for key, _ in before.facts.items() ^ now.facts.items()}
    return ", ".join(sorted(odd))
