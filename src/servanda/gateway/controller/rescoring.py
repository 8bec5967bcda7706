# Rescoring: the train kernel's logprobs of responses, and the statistics of each watched cell.
#
# Each row that goes in comes out again, in order, with a value or as missing.  A row that the train
# kernel cannot score is missing on its own; an engine that does not respond is restarted.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from servanda.contract.identity import Description, same_policy
from servanda.engines.traffic_replay import TrafficReplayEngine
from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.gateway.controller.intake import Row
from servanda.gateway.controller.recent_tokens import RecentTokens
from servanda.gateway.controller.referee import Referee
from servanda.gateway.controller.statistics import (
    SelfNoise,
    Statistics,
    nothing_of,
    statistics_of,
)
from servanda.gateway.controller.watched_cells import WatchedCells
from servanda.judgement.bitwise import objection
from servanda.judgement.evidence import agreement_of
from servanda.judgement.traffic import Entrance, within
from servanda.runner.measurement import Open
from servanda.theory.stats.agreement import Agreement
from servanda.traces.request_log import Request
from servanda.traces.trace import Batch, Trace, align

ANOTHER = "served by another build of infer"
ODD = "a response without usable logprobs"
COPIED = (
    "its logprobs equal the train kernel's bit for bit, and the contract has no `bitwise: true`"
)
EARLIER = "dispatched under an earlier contract"
ONE_KERNEL = "train and infer have one fingerprint: the reference scorer must not serve"
_SEEDS = 65_536  # of requests, kept
_AGAIN_S = 60.0  # before the infer kernel is asked for its description again
_LARGEST = 10**4000  # seed: Python parses no integers with more digits
_SMOOTH = 0.2  # weight of the latest batch in the mean cost of a request


@dataclass(frozen=True)
class ScoredRow:
    """A row with its statistics; None if it is no evidence.

    Args:
        seed: its sampling seed, if it is evidence.
    """

    row: Row
    statistics: Statistics | None = None
    seed: int | None = None


class TrainDownError(MeasurementError):
    """The train kernel does not respond; no row was counted.

    Args:
        rows: to be submitted again.
    """

    def __init__(self, message: str, rows: Sequence[Row]) -> None:
        super().__init__(message)
        self.rows = rows


# placeholder of a server that has not responded yet
_UNASKED = Description(fingerprint={}, tensors={}, tokens="", vocab_size=0, eos=())


class Scorer:
    """Scores sampled requests with the reference scorer.

    Args:
        clock: monotonic seconds.
        timeout_s: time after which an unresponsive engine is killed.
        seeds: seeds of earlier requests.
        since: version of the first snapshot under this contract.
    """

    def __init__(
        self,
        cells: WatchedCells,
        open_: Open,
        *,
        clock: Callable[[], float],
        timeout_s: float = 120.0,
        seeds: Iterable[int] = (),
        since: int = 0,
    ) -> None:
        self.cells, self._open, self._clock = cells, open_, clock
        self.since = since
        self._seeds = tuple(seeds)
        self.train = Referee(
            cells.contract,
            cells.workload.sampling.transform,
            open_,
            self._admit,
            timeout_s,
            clock,
        )
        self.infer: Description | None = None
        self._asked_at: float | None = None
        self._entrance: Entrance | None = None
        self._context: int | None = None
        self.noise = SelfNoise()
        self.outside: Counter[str] = Counter()
        self.seconds = 0.0
        self.cost_s: float | None = None
        self.scored = self.missing = 0
        self.agreement = Agreement()
        self.recent = RecentTokens()

    def start(self) -> None:
        """Load the train engine and get the infer kernel's description, if not done yet.

        Raises:
            ContractError: the two are one kernel.
            MeasurementError: one of them does not respond, or they run different policies.
        """
        if self.infer is None or self._asked_at is None:
            with closing(self._open(self.cells.contract.kernels.infer, "infer")) as engine:
                self.infer = engine.describe()
            self._asked_at = self._clock()
        self.train.start()

    @property
    def described(self) -> dict[str, Description]:
        """The descriptions of the kernels, as far as known."""
        known = {"train": self.train.described, "infer": self.infer}
        return {side: described for side, described in known.items() if described is not None}

    def _admit(self, train: Description) -> None:
        """Refuse a train kernel that is a serving backend, or of another policy than infer."""
        infer = self.infer or _UNASKED
        if train.digest == infer.digest:
            contract = self.cells.contract
            raise ContractError(
                ONE_KERNEL,
                where=contract.where("kernels", "train"),
                hint="set kernels.train to the reference kernel, on a separate engine",
            )
        same_policy(train, infer)
        nothing = Batch((), (), self.cells.width)
        # logprobs without information on the sample are refused before the first row
        self._replay_engine(()).generate(nothing, self.cells.workload.sampling.transform, 0)

    def score(self, rows: Sequence[Row]) -> list[ScoredRow]:
        """The statistics of rows, in order; dropped rows are not scored.

        Raises:
            TrainDownError: the train kernel does not respond.
        """
        try:
            if not all(row.dropped or row.outside or row.slices is not None for row in rows):
                self.start()
            rows = [self._checked(row) for row in rows]
            evidence = [row for row in rows if not row.outside]
            known = [row for row in evidence if row.slices is None]
            statistics = self._statistics_by_row(known)
        except (MeasurementError, ContractError) as error:
            raise TrainDownError(str(error), rows) from None
        self.outside.update(row.outside for row in rows if row.outside and row.request)
        copied = bool(objection(self.cells.contract, self.agreement))
        if copied:  # infer reports train's logprobs, or is train: there is no comparison
            statistics = {}
        unknown = [row for row in evidence if row.slices is not None]
        self.missing += len(unknown)
        statistics |= {
            _place(r): nothing_of(self.cells, r.slices or (), best=r.best > 0) for r in unknown
        }
        why = COPIED if copied else ODD
        self.outside.update(why for row in known if _place(row) not in statistics)
        return [ScoredRow(r, statistics.get(_place(r)), _seed(r)) for r in rows]

    def _statistics_by_row(self, rows: Sequence[Row]) -> dict[tuple[str, float, int], Statistics]:
        """The statistics of rows; an unusable row does not affect the others.

        Its response counts as lost: the response must not decide whether the request counts.
        """
        try:
            return dict(zip(map(_place, rows), self._statistics(rows), strict=True))
        except EvidenceError:
            if len(rows) == 1:
                row = rows[0]
                if row.request is None or row.request.lost:
                    return {}
                none: dict[str, Any] = {"tokens": (), "logp": (), "best": (), "finish": ""}
                lost = replace(row.request, **none, lost=ODD)
                return self._statistics_by_row([replace(row, request=lost)])
        middle = len(rows) // 2
        return {**self._statistics_by_row(rows[:middle]), **self._statistics_by_row(rows[middle:])}

    def _checked(self, row: Row) -> Row:
        """The row, with the reason if it is no evidence.

        Checked once, because its seed is recorded; but the contract may have changed since.
        """
        earlier = 0 < row.version < self.since
        if row.checked:
            return replace(row, outside=EARLIER) if earlier and not row.outside else row
        assert row.request is not None
        infer = self.infer or _UNASKED
        if self._entrance is None or infer.context != self._context:
            seeds, self._context = self.seeds, infer.context
            contract = self.cells.contract
            self._entrance = Entrance(contract, infer.context, most=_SEEDS, seeds=seeds)
        known = infer.fingerprint.get("system_fingerprint", "")
        fingerprint = row.request.fingerprint
        if earlier:
            why = EARLIER
        elif known and fingerprint and known != fingerprint:
            why = ANOTHER
            if self._asked_at is not None and self._clock() - self._asked_at > _AGAIN_S:
                self._asked_at = None  # the build may have changed
        else:
            why = self._entrance.outside(row.request, prompt=row.slices is None)
        return replace(row, outside=why, checked=True)

    def _statistics(self, rows: Sequence[Row]) -> tuple[Statistics, ...]:
        if not rows:
            return ()
        width = self.cells.width
        known = [within(row.request, width) for row in rows if row.request]
        requests = [replace(request, index=i) for i, request in enumerate(known)]
        replay = self._replay_engine(requests)
        batch = Batch(tuple(range(len(requests))), tuple(r.prompt for r in requests), width)
        sampling = self.cells.workload.sampling.transform
        infer = replay.generate(batch, sampling, 0)
        wanted = [
            i
            for i, row in enumerate(rows)
            if not row.dropped
            and infer.length_S[i]
            and not infer.lost_S[i]
            and self._fits(requests[i], int(infer.length_S[i]))
        ]
        train, failed = self._train_on(batch, infer, {i: requests[i] for i in wanted})
        self.scored += len(wanted) - failed
        self.missing += len(rows) - len(wanted) + failed
        pair = align(train, infer)
        self.agreement += agreement_of(pair)
        self.recent.add(requests, pair)
        return statistics_of(self.cells, requests, pair, [row.best > 0 for row in rows])

    def _fits(self, request: Request, tokens: int) -> bool:
        """Whether the row can be scored: unknown token ids kill some engines."""
        about = self.train.described or _UNASKED
        most = max((*request.prompt, *request.tokens))
        if about.vocab_size and most >= about.vocab_size:
            return False
        return about.context is None or len(request.prompt) + tokens <= about.context

    def _replay_engine(self, requests: Sequence[Request]) -> TrafficReplayEngine:
        kernel = self.cells.contract.kernels.infer
        return TrafficReplayEngine(kernel, self.infer or _UNASKED, requests)

    def _train_on(
        self, batch: Batch, infer: Trace, wanted: dict[int, Request]
    ) -> tuple[Trace, int]:
        """Logprobs of the train kernel on some rows, NaN on the others; and how many failed."""
        train = replace(infer, columns={"logp": np.full(len(infer.token_N), np.nan)})
        if not wanted:
            return train, 0
        given = replace(batch, continuations=infer.continuations).take([*wanted])
        scores = self._score_with_train(given, self.noise.waiting)
        logp_N = train.columns["logp"]
        starts = np.cumsum(infer.length_S) - infer.length_S
        for row, logp in scores.items():
            if row >= 0:
                logp_N[starts[row] : starts[row] + len(logp)] = logp
        failed = len(wanted) - sum(row >= 0 for row in scores)
        self.noise.compared(self.cells, scores)
        self.noise.chosen(infer, {i: r for i, r in wanted.items() if i in scores}, scores)
        return train, failed

    def _score_with_train(self, given: Batch, again: Sequence[Request]) -> dict[int, Any]:
        """row -> train's logprobs, and those of `again` as -1, -2, ...; may be incomplete."""
        batch = Batch(
            (*given.sequence_S, *range(-1, -1 - len(again), -1)),
            (*given.prompts, *(r.prompt for r in again)),
            given.width,
            (*given.continuations, *(r.tokens for r in again)),
        )
        before = self.train.seconds
        scores = self.train.score(batch)
        spent = self.train.seconds - before
        self.seconds += spent
        each = spent / len(batch)
        self.cost_s = (
            each if self.cost_s is None else (_SMOOTH * each + (1 - _SMOOTH) * self.cost_s)
        )
        return scores

    def adopt(self, other: Scorer, *, engine: bool) -> None:
        """Take over the counts and seeds of another scorer, and its engine if requested."""
        self._seeds, self._entrance = other.seeds, None
        self.outside, self.seconds = other.outside, other.seconds
        self.scored, self.missing = other.scored, other.missing
        self.agreement = other.agreement
        if engine:
            self.train.adopt(other.train)
            self.cost_s = other.cost_s
            if self.cells.contract.digest == other.cells.contract.digest:
                self.noise = other.noise  # of the same cells
                self.recent = other.recent

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of requests that were evidence, oldest first."""
        return tuple(self._entrance.seeds) if self._entrance is not None else self._seeds


def _place(row: Row) -> tuple[str, float, int]:
    return (*row.start, row.number)


def _seed(row: Row) -> int | None:
    seed = row.request.sampling.get("seed") if row.request and not row.outside else None
    return seed if isinstance(seed, int) and abs(seed) < _LARGEST else None
