# Rescoring: the train kernel's logprobs of responses, and the statistics of each watched cell.
#
# Each row that goes in comes out again, in order, with a value or as missing.  A row that the train
# kernel cannot score is missing on its own; an engine that does not respond is restarted.

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import count
from threading import Timer
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.identity import Description, same_policy
from servanda.contract.model import Contract
from servanda.engines.base import Engine
from servanda.engines.traffic_replay import TrafficReplayEngine
from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.gateway.controller.intake import Row
from servanda.gateway.controller.watched_cells import WatchedCells
from servanda.judgement.admission import as_declared, path_of, refuse_unscored
from servanda.judgement.breakdown import Advice
from servanda.judgement.clauses.base import View
from servanda.judgement.evidence import agreement_of
from servanda.judgement.slices.columns import columns
from servanda.judgement.traffic import Entrance, within
from servanda.judgement.verdict import objection
from servanda.runner.measurement import Open
from servanda.runner.round_files import in_order
from servanda.theory.sampling import Sampling
from servanda.theory.stats.agreement import Agreement
from servanda.theory.stats.group_ratio import GroupRatio
from servanda.theory.stats.likelihood_ratio import RequestDraws
from servanda.traces.corpus import Prompt
from servanda.traces.request_log import Request
from servanda.traces.trace import Batch, Trace, TracePair, align, answered, some

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
_TOKENS = 100_000  # the most that are kept
_NICE = 10  # process priority below all serving processes
_LOADING_S = 1800.0  # allowed for loading a large model
Statistics = Mapping[tuple[str, str], GroupRatio | RequestDraws]
_AGAIN = 16  # one row in so many is scored twice


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


# The tokens that were scored last, and the advice that they give when a slice is diverted.


class RecentTokens:
    """The last scored requests, with both kernels' logprobs; kept in memory alone."""

    def __init__(self) -> None:
        self._pairs: deque[TracePair] = deque()
        self._tokens, self._number = 0, count()

    def add(self, requests: Sequence[Request], pair: TracePair) -> None:
        """Keep the pair of some requests; the oldest ones are dropped."""
        names = sorted({name for request in requests for name in request.labels})
        labels = {name: tuple(r.labels.get(name, "") for r in requests) for name in names}
        # requests of one user may depend on each other
        users = tuple(r.key or f"request {next(self._number)}" for r in requests)
        self._pairs.append(replace(pair, group_S=users, labels=labels))
        self._tokens += len(pair.infer.token_N)
        while self._tokens > _TOKENS and len(self._pairs) > 1:
            self._tokens -= len(self._pairs.popleft().infer.token_N)

    def advice(self, contract: Contract) -> Advice | None:
        """The likely cause of their gap, and what to do; None without a scored token."""
        # a gateway that diverts nothing does not need these
        from servanda.judgement.causes.token_table import TokenTable
        from servanda.runner.round_advice import advice_of

        table = TokenTable.of(
            (1, pair, [""] * len(pair.infer.length_S)) for pair in tuple(self._pairs)
        )
        if table is None:
            return None
        # a row of a scored batch is no place on the server
        numbers = {name: of for name, of in table.numbers.items() if name != "context.row"}
        found = advice_of(replace(table, numbers=numbers), contract)
        return replace(found, corrections=())  # no one trains on these tokens


# The reference scorer: the train kernel, started on demand and restarted if it has died.
#
# It serves no user.  A batch that it rejects is split in halves, down to the rows that it cannot
# score, which get no logprob.  If it does not respond at all, no row is decided.


class DeadEngineError(MeasurementError):
    """The train engine has died and cannot be restarted now."""


class Referee:
    """The reference scorer: one train engine.

    Args:
        sampling: sampling parameters of the logprobs.
        admit: checks the engine's description; raises to refuse it.
        timeout_s: time after which an unresponsive engine is killed; loading may take half an hour.
        clock: monotonic seconds.

    `seconds`: total time of completed calls; a call that hangs or loads a model is not counted.
    """

    def __init__(
        self,
        contract: Contract,
        sampling: Sampling,
        open_: Open,
        admit: Callable[[Description], None],
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._clock, self.seconds = clock, 0.0
        self._contract, self._open, self._admit = contract, open_, admit
        self._kernel = contract.kernels.train
        self._sampling = self._kernel.sampling or sampling
        self._timeout_s, self._ended = timeout_s, False
        self._engine: Engine | None = None
        self._loading: Engine | None = None
        self.described: Description | None = None
        self.errors = self.restarts = 0

    @property
    def alive(self) -> bool:
        return self._engine is not None

    def start(self) -> None:
        """Load the engine if it is not loaded.

        Raises:
            MeasurementError: it does not respond, or is not an admissible kernel.
        """
        if self._ended:
            raise MeasurementError("the leader ends")
        if self._engine is not None:
            return
        engine = self._loading = self._open(self._kernel, "train")
        try:
            if self._ended:
                raise MeasurementError("the leader ends")
            with suppress(AttributeError, OSError):  # not every engine is a child process
                os.setpriority(os.PRIO_PROCESS, engine.pid, _NICE)  # type: ignore[attr-defined]
            loading_s = max(self._timeout_s, _LOADING_S)
            described: Description = self._timed(engine, engine.describe, loading_s)
            refuse_unscored(self._kernel, described)
            self._admit(described)
            self._engine, self.described = engine, described
        except BaseException:
            engine.close()
            raise
        finally:
            self._loading = None

    def score(self, batch: Batch) -> dict[int, NDArray[np.float64]]:
        """Sequence -> logprobs of its tokens; sequences that could not be scored are left out.

        Raises:
            DeadEngineError: the engine has died and cannot be restarted now.
        """
        try:
            trace = self._once(batch)
        except MeasurementError as error:
            self.errors += 1
            self._revive(error)
            if len(batch) == 1:
                return {}
            middle = len(batch) // 2
            left, right = (range(middle), range(middle, len(batch)))
            return {**self.score(batch.take(left)), **self.score(batch.take(right))}
        parts = np.split(trace.columns["logp"], np.cumsum(trace.length_S)[:-1])
        pairs = zip(batch.sequence_S, parts, strict=True)
        return {row: logp for row, logp in pairs if not np.isnan(logp).all()}

    def _once(self, batch: Batch) -> Trace:
        engine, described = self._engine, self.described
        assert engine is not None and described is not None
        path = path_of(self._kernel, "train")
        # engines number sequences from 0 in order
        rows = replace(batch, sequence_S=tuple(range(len(batch))))
        began = self._clock()
        try:
            ask = lambda: in_order(rows, engine.score, self._sampling, path)  # noqa: E731
            trace = answered(self._timed(engine, ask, self._timeout_s), rows)
        except EvidenceError as error:  # its output is for other sequences
            raise MeasurementError(f"train: {error}") from None
        self.seconds += self._clock() - began
        record = self._contract.observability.record
        as_declared(trace, "train", self._kernel, path, self._sampling, described, record)
        if trace.continuations != rows.continuations:
            raise MeasurementError("the train kernel scored other tokens than requested")
        return trace

    def _timed(self, engine: Engine, call: Callable[[], Any], seconds: float) -> Any:
        """Call an engine; close it if the call takes too long."""
        timer = Timer(seconds, engine.close)
        timer.daemon = True
        timer.start()
        try:
            return call()
        finally:
            timer.cancel()

    def _revive(self, error: MeasurementError) -> None:
        """Restart a dead engine; one that is alive rejected the rows."""
        engine = self._engine
        if engine is None:  # it was closed meanwhile
            raise DeadEngineError(f"{error}; the leader ends")
        try:
            self._timed(engine, engine.describe, self._timeout_s)
            return
        except (MeasurementError, OSError, ValueError):
            self.close()
        self.restarts += 1
        try:
            self.start()
        except MeasurementError as again:
            raise DeadEngineError(f"{error}; {again}") from None

    def adopt(self, other: Referee) -> None:
        """Take over the engine of another scorer, which then has none."""
        self.close()
        self._engine, self.described, other._engine = other._engine, other.described, None

    def close(self) -> None:
        """Close the engine; it is restarted on demand."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def end(self) -> None:
        """Close the engine permanently, also while it is loading."""
        self._ended = True
        loading = self._loading
        if loading is not None:
            loading.close()
        self.close()


# The statistics of one scored request for each watched cell.  Pure: from two traces.


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
        assert cell.kind.certificate
        units = cell.kind.certificate.units(cell, view)
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
