# Served requests as an engine: it draws what infer drew already, for users, and nothing else.
#
# It stands on the side of infer while a live leg is measured.  It cannot score: what a server
# computed at that hour, in that batch, cannot be computed again, so there is no noise floor of
# infer on traffic.

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from servanda.contract.identity import Description, digest_of
from servanda.contract.model import Kernel, Path
from servanda.engines.base import about_of, padded_best
from servanda.errors import MeasurementError
from servanda.theory.sampling import Sampling
from servanda.traces.request_log import Request
from servanda.traces.trace import Batch, Timing, Trace


class TrafficReplayEngine:
    """Hands out the answers of a log of served requests, by their index.

    Args:
        kernel: the infer kernel; described: by itself, so that evidence concerns it.
    """

    def __init__(self, kernel: Kernel, described: Description, requests: Sequence[Request]) -> None:
        self.kernel, self._described = kernel, described
        self._by_index = {request.index: request for request in requests}

    def describe(self) -> Description:
        return replace(
            self._described,
            full_logits=False,
            top=0,
            timed=False,
            scores=(),
            encodes=False,
            decodes=False,
        )

    def vocabulary(self) -> list[str]:
        return []

    def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Trace:
        """What was drawn; logprobs are processed, or raw where that is the same.

        Raises:
            MeasurementError: the logprobs do not say what the tokens were drawn with.
        """
        self._refuse_raw(sampling)
        requests = [self._by_index[sequence] for sequence in batch.sequence_S]
        ends = [self._ended(request) for request in requests]
        tokens = [
            (*r.tokens, *self._described.eos[:1]) if cut else r.tokens
            for r, cut in zip(requests, ends, strict=True)
        ]
        # no one knows the probability of an end that was not logged: it counts as missing
        logp = [(*r.logp, *[math.nan] * cut) for r, cut in zip(requests, ends, strict=True)]
        best = [
            (*(r.best or ((),) * len(r.tokens)), *[()] * cut)
            for r, cut in zip(requests, ends, strict=True)
        ]
        k = max((len(step) for steps in best for step in steps), default=0)
        columns = {"logp": np.array([v for answer in logp for v in answer], dtype=np.float64)}
        launched = sorted(requests, key=lambda request: request.index)  # whatever the batch's order
        # beside the answer, wherever the log keeps it now
        said = [
            [r.at, r.served, r.prompt, r.group, r.key, dict(r.sampling), dict(r.labels)]
            for r in launched
        ]
        return Trace.of(
            batch,
            [len(answer) for answer in tokens],
            [t for answer in tokens for t in answer],
            columns | padded_best([step for answer in best for step in answer], k),
            about_of(batch, self.kernel, "decode", sampling) | {"requests": digest_of(said)},
            lost_S=[bool(request.lost) for request in requests],
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        self._refuse("encode a text")

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        self._refuse("decode ids")

    def score(self, batch: Batch, sampling: Sampling, path: Path) -> Trace:
        self._refuse("score a text")

    def logits(self, batch: Batch, path: Path) -> Iterator[NDArray[np.float32]]:
        self._refuse("give logits")

    def top(self, batch: Batch, path: Path) -> Trace:
        self._refuse("score a text")

    def time(self, batch: Batch, sampling: Sampling, seed: int, record: bool) -> Timing:
        self._refuse("be timed")

    def close(self) -> None:
        pass

    def _ended(self, request: Request) -> bool:
        """Whether the model ended an answer by a token that the log leaves out."""
        eos, most = self._described.eos, request.sampling["max_new_tokens"]
        complete = request.finish != "stop" or not eos or request.tokens[-1] in eos
        return not complete and len(request.tokens) < most

    def _refuse_raw(self, sampling: Sampling) -> None:
        meaning = self.kernel.logprobs or self._described.fingerprint.get("logprobs", "processed")
        neutral = sampling.temperature == 1.0 and not sampling.filters
        if meaning == "raw" and not neutral:
            raise MeasurementError(
                "the log of served requests has raw logprobs, and the workload's sampling has a "
                "temperature or a filter: they do not say what the tokens were drawn with",
                hint="let the server report processed logprobs, and declare "
                "kernels.infer.logprobs: processed",
            )

    def _refuse(self, verb: str) -> NoReturn:
        raise MeasurementError(
            f"a log of served requests cannot {verb}",
            hint="it contains responses of the infer kernel only, and cannot generate or score",
        )
