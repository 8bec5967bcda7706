# Measuring: two engines on the same tokens, round by closed round.
#
# The infer kernel draws; the train kernel re-scores what was drawn; a tenth of the
# sequences is scored once more by each side in another batch, which is its self-noise.
# While train scores one round, infer draws the next: two processes, two cores.  Whatever a
# round yields is on disk before it counts, and a resumed run re-reads it and draws nothing
# twice, for a draw is keyed by (seed, sequence, position).

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from servanda.contract import Kernel
from servanda.corpus import Corpus
from servanda.engines.base import Engine
from servanda.engines.wire import from_table, to_table
from servanda.engines.worker import spawn
from servanda.errors import (
    ContractError,
    IdentityError,
    Interrupted,
    MeasurementError,
    Problem,
    Where,
)
from servanda.evidence import GoldenRun, Round
from servanda.golden import measure_golden
from servanda.identity import Description, EvidenceKey, digest_of, same_policy
from servanda.plan import Plan, Unit
from servanda.rundir import RunDirectory
from servanda.sampling import Sampling
from servanda.trace import Batch, Trace, align

Open = Callable[[Kernel, str], Engine]
_SIDES = ("train", "infer")


@dataclass(frozen=True)
class Progress:
    """What is being done, for whoever watches: `done` of about `total` in `what`."""

    what: str
    done: int
    total: int


Watch = Callable[[Progress], None]


def unwatched(_: Progress) -> None:
    """Nobody watches."""


@dataclass
class Measurement:
    """A plan being measured in a run directory; a context manager that owns both engines."""

    plan: Plan
    run: RunDirectory
    open: Open = spawn
    watch: Watch = unwatched
    engines: dict[str, Engine] = field(default_factory=dict)
    descriptions: dict[str, Description] = field(default_factory=dict)

    def __enter__(self) -> Measurement:
        self._stack = ExitStack()
        try:
            self._start()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt | Interrupted):
            for engine in self.engines.values():
                getattr(engine, "kill", engine.close)()
        self._stack.close()

    def _start(self) -> None:
        kernels = self.plan.contract.kernels
        self._pools = {
            side: self._stack.enter_context(ThreadPoolExecutor(1, side)) for side in _SIDES
        }
        self.watch(Progress("loading both kernels", 0, 2))
        opening = {
            side: self._pools[side].submit(self.open, getattr(kernels, side), side)
            for side in _SIDES
        }
        failures = []
        for side, future in opening.items():
            try:
                self.engines[side] = future.result()
                self._stack.callback(self.engines[side].close)
            except MeasurementError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        self.descriptions = {side: e.describe() for side, e in self.engines.items()}
        grade = same_policy(self.descriptions["train"], self.descriptions["infer"])
        self.key = EvidenceKey(
            contract=self.plan.contract.digest,
            corpus=digest_of([c.digest if c else "" for c in (self.plan.corpus, self.plan.golden)]),
            train=self.descriptions["train"].digest,
            infer=self.descriptions["infer"].digest,
            weights=self.descriptions["train"].weights,
            attempt=self.plan.attempt,
            grade=grade,
        )
        self._claim_directory()
        width = self.plan.width
        self.prompts = self._encode(self.plan.corpus, width) if self.plan.corpus else []
        self.golden_ids = self._encode(self.plan.golden, 0) if self.plan.golden else []
        self._refuse_empty_slices()

    def _claim_directory(self) -> None:
        before = self.run.key
        if before is None:
            self.run.begin(self.key, self.plan.contract.model_dump_json())
        elif before != self.key:
            what = ", ".join(before.differences(self.key)) or "the attempt"
            raise MeasurementError(
                f"{self.run.path} holds evidence of another agreement: {what} changed since",
                hint="evidence expires with its key: --fresh opens attempt "
                f"{self.run.attempt + 1}, judged at a smaller alpha; or choose another --run-dir",
            )

    def _encode(self, corpus: Corpus, width: int) -> list[tuple[int, ...]]:
        """Token ids of every line, the same on both sides and within the context."""
        texts = [p.text for p in corpus.prompts if p.token_ids is None]
        by_side = {side: iter(e.encode(texts)) for side, e in self.engines.items()}
        ids: list[tuple[int, ...]] = []
        for prompt in corpus.prompts:
            if prompt.token_ids is not None:
                ids.append(prompt.token_ids)
                continue
            train, infer = next(by_side["train"]), next(by_side["infer"])
            if train != infer:
                raise IdentityError(
                    f"{corpus.file}:{prompt.line}: the two sides encode this prompt differently: "
                    f"train {train[:8]}..., infer {infer[:8]}...",
                    hint="use one tokenizer.json on both sides",
                )
            ids.append(tuple(train))
        self._refuse_unfit(corpus, ids, width)
        return ids

    def _refuse_unfit(self, corpus: Corpus, ids: Sequence[tuple[int, ...]], width: int) -> None:
        limits = [d.context for d in self.descriptions.values() if d.context is not None]
        context = min(limits, default=None)
        vocabulary = self.descriptions["train"].vocab_size
        problems = []
        for prompt, tokens in zip(corpus.prompts, ids, strict=True):
            where = Where(corpus.file, prompt.line, 1)
            if not tokens or max(tokens) >= vocabulary:
                found = f"id {max(tokens)}" if tokens else "no token at all"
                problems.append(
                    Problem(f"{found} in a prompt for a vocabulary of {vocabulary} ids", where)
                )
            elif context is not None and len(tokens) + width > context:
                new = f" and {width} new ones" if width else ""
                problems.append(
                    Problem(
                        f"a prompt of {len(tokens)} tokens{new} exceeds the context of {context}",
                        where,
                        "shorten or drop the line, or lower max_new_tokens",
                    )
                )
        if problems:
            shown = problems[:5]
            if len(problems) > len(shown):
                shown.append(Problem(f"{corpus.file}: {len(problems) - 5} more lines like these"))
            raise ContractError.all(shown)

    def _refuse_empty_slices(self) -> None:
        """Slices of request.prompt_tokens are known to be empty only now."""
        for cell in self.plan.cells:
            golden = cell.kind.source == "golden"
            corpus, ids = (
                (self.plan.golden, self.golden_ids) if golden else (self.plan.corpus, self.prompts)
            )
            if corpus is None or "request.prompt_tokens" not in cell.cut.fields:
                continue
            rows = zip(corpus.prompts, ids, strict=True)
            if not any(cell.cut.may_meet(p, len(t)) for p, t in rows):
                raise ContractError(
                    f"slice {cell.cut.name!r} of clause {cell.clause.id!r} is empty: no line of "
                    f"{corpus.file} has such a length (longest: {max(map(len, ids))} tokens)",
                    hint=f"add such prompts, or give {cell.clause.id!r} other `slices:`",
                )

    def golden(self) -> GoldenRun | None:
        """The golden texts, measured or re-read; None where the contract has none."""
        if self.plan.golden is None:
            return None
        return measure_golden(
            self.plan,
            self.run,
            self.engines,
            self.golden_ids,
            lambda d, t: self.watch(Progress("golden texts", d, t)),
        )

    def rounds(self) -> Iterator[Round]:
        """Closed rounds from the first on: those on disk, then new ones as they are measured."""
        ahead: Future[Trace] | None = None
        for index in range(self.plan.rounds):
            units = tuple(self.plan.units(index))
            infer = ahead.result() if ahead else self._drawn(index, units)
            ahead = None
            if index + 1 < self.plan.rounds and not self.run.has(_name(index, "train")):
                ahead = self._pools["infer"].submit(
                    self._drawn, index + 1, tuple(self.plan.units(index + 1))
                )
            yield self._close(index, units, infer)

    def _kept(self, index: int, what: str, make: Callable[[], Trace]) -> Trace:
        """A trace from disk, or made and put there."""
        name = _name(index, what)
        if self.run.has(name):
            return from_table(self.run.read(name))
        trace = make()
        self.run.write(name, to_table(trace))
        return trace

    def _batch(self, units: Sequence[Unit], continuations: Any = ()) -> Batch:
        return Batch(
            tuple(u.sequence for u in units),
            tuple(self.prompts[u.row] for u in units),
            self.plan.width,
            continuations,
        )

    def _drawn(self, index: int, units: tuple[Unit, ...]) -> Trace:
        batch = self._batch(units)
        engine, sampling = self.engines["infer"], self._sampling("infer")
        return self._kept(
            index, "infer", lambda: _in_order(batch, engine.generate, sampling, self.plan.seed)
        )

    def _sampling(self, side: str) -> Sampling:
        """The declared transform; the train kernel may have one of its own."""
        assert self.plan.contract.workload is not None
        own = getattr(self.plan.contract.kernels, side).sampling
        return own or self.plan.contract.workload.sampling.transform

    def _close(self, index: int, units: tuple[Unit, ...], infer: Trace) -> Round:
        batch = self._batch(units, infer.continuations)
        again = batch.take([r for r in self.plan.noise_rows(len(units)) if not infer.lost_S[r]])

        def score(side: str, what: str, some: Batch) -> Future[Trace]:
            path = getattr(self.plan.contract.kernels, side).path
            path = path or ("decode" if side == "infer" else "prefill")
            return self._pools[side].submit(
                self._kept,
                index,
                what,
                lambda: _in_order(some, self.engines[side].score, self._sampling(side), path),
            )

        futures = [score("train", "train", batch)]
        if len(again):
            futures += [score(s, f"self_{s}", again) for s in _SIDES]
        traces = [f.result() for f in futures]
        return _round(index, units, infer, *traces)


def read_rounds(plan: Plan, run: RunDirectory) -> Iterator[Round]:
    """The closed rounds of a run directory; no engine is needed."""
    for index in range(plan.rounds):
        names = [_name(index, what) for what in ("infer", "train", "self_train", "self_infer")]
        if not all(map(run.has, names[:2])):
            return
        traces = [from_table(run.read(name)) for name in names if run.has(name)]
        yield _round(index, tuple(plan.units(index)), *traces)


def _name(index: int, what: str) -> str:
    return f"rounds/{index:06d}.{what}"


def _round(
    index: int, units: tuple[Unit, ...], infer: Trace, train: Trace, *selves: Trace
) -> Round:
    pair = align(train, infer)
    if not selves:
        return Round(index, units, pair)  # every sequence of the tenth was lost
    self_train, self_infer = (
        align(again, _some(side, again.sequence_S.tolist()))
        for again, side in zip(selves, (train, infer), strict=True)
    )
    return Round(index, units, pair, self_train, self_infer)


def _in_order(batch: Batch, verb: Callable[..., Trace], *options: object) -> Trace:
    """Run a batch with prompts of like length side by side, and return it in launch order.

    Lengths of prompts are known at launch, so the composition does not depend on an outcome.
    """
    rows = sorted(range(len(batch)), key=lambda row: len(batch.prompts[row]))
    return _some(verb(batch.take(rows), *options), list(batch.sequence_S))


def _some(trace: Trace, sequences: list[int]) -> Trace:
    """The given sequences of a trace, in the given order."""
    starts = np.cumsum(trace.length_S) - trace.length_S
    rows = [int(np.flatnonzero(trace.sequence_S == s)[0]) for s in sequences]
    spans = [np.arange(starts[r], starts[r] + trace.length_S[r]) for r in rows]
    at = np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)
    return replace(
        trace,
        sequence_S=trace.sequence_S[rows],
        length_S=trace.length_S[rows],
        lost_S=trace.lost_S[rows],
        prompt_tokens_S=trace.prompt_tokens_S[rows],
        token_N=trace.token_N[at],
        columns={name: column[at] for name, column in trace.columns.items()},
    )
