# The statistics of one scored request for each watched cell.  Pure: from two traces.

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from servanda.gateway.controller.watched_cells import WatchedCells
from servanda.judgement.clauses.base import View
from servanda.judgement.clauses.statistical import Certificate
from servanda.judgement.slices.columns import columns
from servanda.theory.stats.group_ratio import GroupRatio
from servanda.theory.stats.likelihood_ratio import RequestDraws
from servanda.traces.corpus import Prompt
from servanda.traces.request_log import Request
from servanda.traces.trace import Trace, TracePair, align, some

Statistics = Mapping[tuple[str, str], GroupRatio | RequestDraws]
_AGAIN = 16  # one row in so many is scored twice


def statistics_of(
    cells: WatchedCells, requests: Sequence[Request], pair: TracePair, best: Sequence[bool]
) -> tuple[Statistics, ...]:
    """The statistics of each request on its cells.

    Args:
        best: whether top-k logprobs were requested.
        pair: logprobs of both kernels, in order; a request that was lost or not scored has missing
            tokens.
    """
    view = view_of(cells, requests, pair)
    statistics: list[dict[tuple[str, str], GroupRatio | RequestDraws]] = [{} for _ in requests]
    for name, cell in cells.by_name.items():
        assert isinstance(cell.kind, Certificate)
        units = cell.kind.units(cell, view)
        weights, groups = units.x_U, len(requests)
        total_G = np.bincount(units.group_U, weights=weights, minlength=groups).astype(np.float64)
        known_G = np.bincount(units.group_U, minlength=len(requests))
        missing_G = units.missing_G
        for row in np.flatnonzero((known_G > 0) | (missing_G > 0)).tolist():
            request_ = slice(row, row + 1)
            parts = (total_G[request_], known_G[request_], missing_G[request_].astype(np.int64))
            statistics[row][name] = GroupRatio(cell.capacity, 1, *parts)
    for row, draws in enumerate(_draws(pair.infer, cells.width)):
        for cell in cells.draws if best[row] else ():
            if view.may_meet[cell.cut][row]:
                statistics[row][cell.clause, cell.slice] = draws
    return tuple(statistics)


def _draws(infer: Trace, width: int) -> Iterator[RequestDraws]:
    """The sampled tokens of each request; for a lost one the maximum length counts as missing."""
    starts = np.cumsum(infer.length_S) - infer.length_S
    for start, length in zip(starts.tolist(), infer.length_S.tolist(), strict=True):
        tokens = slice(start, start + length)
        if not length or infer.best is None:
            yield RequestDraws.nothing(length or width)
            continue
        ids_NK, logp_NK = (column[tokens] for column in infer.best)
        kept_K = ~np.isnan(logp_NK).all(axis=0)  # other requests of the batch may be longer
        if not kept_K.any():
            yield RequestDraws.nothing(length)
            continue
        yield RequestDraws.of(ids_NK[:, kept_K], logp_NK[:, kept_K], infer.token_N[tokens])


def nothing_of(cells: WatchedCells, slices: Collection[str], *, best: bool) -> Statistics:
    """The statistics of a request with unknown prompt: its maximum length counts as missing.

    Args:
        best: whether top-k logprobs were requested.
    """
    none = np.zeros(1)
    statistics: dict[tuple[str, str], GroupRatio | RequestDraws] = {
        name: GroupRatio(cell.capacity, 1, none, none.astype(np.int64), np.array([cell.capacity]))
        for name, cell in cells.by_name.items()
        if cell.cut.name in slices
    }
    for cell in cells.draws if best else ():
        if cell.slice in slices:
            statistics[cell.clause, cell.slice] = RequestDraws.nothing(cells.width)
    return statistics


class SelfNoise:
    """The noise floor of the train kernel: some rows are scored again in the next batch.

    `waiting`: requests to be scored again with the next batch.
    """

    def __init__(self) -> None:
        self._scored = 0
        self._first: list[tuple[Request, Trace]] = []
        self._noise: dict[tuple[str, str], tuple[float, int]] = {}

    @property
    def waiting(self) -> list[Request]:
        return [request for request, _ in self._first]

    @property
    def floors(self) -> dict[tuple[str, str], float]:
        """The noise floor of each cell that has data."""
        return {name: total / n for name, (total, n) in self._noise.items() if n}

    def compared(self, cells: WatchedCells, scores: Mapping[int, NDArray[np.float64]]) -> None:
        """Record the second scores: of the first waiting request as -1, of the next as -2, ..."""
        for i, (request, first) in enumerate(self._first):
            logp = scores.get(-1 - i)
            if logp is None:
                continue
            pair = align(replace(first, columns={"logp": logp}), first)
            view = replace(view_of(cells, [request], pair), itself=True)
            for name, cell in cells.by_name.items():
                assert isinstance(cell.kind, Certificate)
                total, n = cell.kind.noise(cell, view)[0]
                before = self._noise.get(name, (0.0, 0))
                self._noise[name] = (before[0] + total, before[1] + n)
        self._first = []

    def chosen(
        self,
        infer: Trace,
        requests: Mapping[int, Request],
        scores: Mapping[int, NDArray[np.float64]],
    ) -> None:
        """Choose among the scored rows of a batch, by their number alone."""
        for row, request in requests.items():
            self._scored += 1
            if self._scored % _AGAIN == 1:
                trace = some(infer, [row])
                repeated = replace(request, tokens=trace.continuations[0], best=())
                self._first.append((repeated, replace(trace, columns={"logp": scores[row]})))


def view_of(cells: WatchedCells, requests: Sequence[Request], pair: TracePair) -> View:
    """The view of requests for the clauses: each request is one prompt group."""
    trace: Trace = pair.infer
    prompts = [
        Prompt(line=row, token_ids=request.prompt, labels=dict(request.labels))
        for row, request in enumerate(requests)
    ]
    tokens_S = trace.prompt_tokens_S.tolist()
    group_S = np.arange(len(requests))
    may_meet = {
        cut: np.array(
            [cut.may_meet(p, n) for p, n in zip(prompts, tokens_S, strict=True)], dtype=bool
        )
        for cut in cells.cuts
    }
    return View(
        pair=pair,
        columns=columns(pair, prompts, cells.fields),
        group_N=np.repeat(group_S, trace.length_S),
        group_S=group_S,
        launched=len(requests),
        width=cells.width,
        may_meet=may_meet,
    )
