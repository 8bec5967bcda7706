# Ranks of whole answers: how likely the reference finds an answer, among fresh draws of its own.
#
# Draws and answer take one way: text, tokens of the reference's own, score.  So the rank is uniform
# if the endpoint draws as the reference does, whatever tokens it drew.
# Source: Auditing Black-Box LLM APIs with a Rank-Based Uniformity Test, arXiv 2506.06975, whose
# score is the log-rank.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from servanda.contract.model import Kernel
from servanda.engines.base import Engine
from servanda.runner.heartbeat.baseline import Baseline, plain
from servanda.theory.sampling import Sampling, uniforms
from servanda.traces.trace import Batch

SCORES = ("logprob", "log-rank")
BINS = 8  # of ranks, that are bet on


class RankScorer:
    """The kernel of a reference, which draws and scores."""

    def __init__(
        self,
        engine: Engine,
        kernel: Kernel,
        baseline: Baseline,
        prompts: Sequence[tuple[int, ...]],
    ) -> None:
        self._engine, self._kernel, self._baseline = engine, kernel, baseline
        self._prompts = prompts
        self._eos = frozenset(engine.describe().eos)
        self._sampling = Sampling(  # type: ignore[call-arg]
            temperature=baseline.temperature, top_p=baseline.top_p
        )

    def bins(self, row: int, answer: str, number: int, seed: int) -> tuple[int, ...]:
        """The bin of an answer's rank by each of SCORES.

        Args:
            row: of the prompt; number: of the request, which no other request has.
        """
        many = self._baseline.draws
        sequences = tuple(range(number * many, (number + 1) * many))
        batch = Batch(sequences, (self._prompts[row],) * many, self._baseline.width)
        texts = self._texts(batch, self._sampling, seed)
        score_XS = self._scores(row, [*texts, plain(answer)])
        v_S = uniforms(seed, "heartbeat rank", number, len(SCORES))
        own_X1 = score_XS[:, -1:]
        before_X = (score_XS < own_X1).sum(axis=1)
        tied_X = (score_XS == own_X1).sum(axis=1)  # itself included
        return tuple(((before_X + v_S * tied_X) / (many + 1) * BINS).astype(int).tolist())

    def greedy(self, rows: Sequence[int]) -> list[str]:
        """Greedy answers to prompts."""
        prompts = tuple(self._prompts[row] for row in rows)
        batch = Batch(tuple(range(len(rows))), prompts, self._baseline.width)
        return self._texts(batch, Sampling(top_k=1), 0)  # type: ignore[call-arg]

    def _texts(self, batch: Batch, sampling: Sampling, seed: int) -> list[str]:
        drawn = self._engine.generate(batch, sampling, seed)
        ids = [[t for t in tokens if t not in self._eos] for tokens in drawn.continuations]
        return [plain(text) for text in self._engine.decode(ids)]

    def _scores(self, row: int, texts: Sequence[str]) -> NDArray[np.float64]:
        """Total logprob and mean log-rank of texts after a prompt, [2, S]; 0 of an empty one."""
        tokens = [tuple(ids) for ids in self._engine.encode(list(texts))]
        score_XS = np.zeros((2, len(texts)))
        said = [s for s, ids in enumerate(tokens) if ids]
        if not said:
            return score_XS
        given = tuple(tokens[s] for s in said)
        prompts = (self._prompts[row],) * len(said)
        batch = Batch(tuple(range(len(said))), prompts, max(map(len, given)), given)
        plain_sampling = Sampling()  # type: ignore[call-arg]
        trace = self._engine.score(batch, plain_sampling, self._kernel.path or "prefill")
        ends = np.cumsum(trace.length_S)[:-1]
        for s, logp, rank in zip(
            said,
            np.split(trace.columns["logp"], ends),
            np.split(trace.columns["rank"], ends),
            strict=True,
        ):
            score_XS[:, s] = logp.sum(), np.log1p(rank).mean() if len(rank) else 0.0
        return score_XS
