# Sampling and scoring: the kernels on the dispatched units of one round.
#
# Each kernel has a separate waiting thread, so that one samples while another scores.  Results are
# on disk before they are passed on.

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from servanda.contract.identity import Description
from servanda.contract.model import Kernel, Path
from servanda.engines.base import Engine, verb_of
from servanda.errors import MeasurementError
from servanda.judgement.admission import as_declared, path_of
from servanda.judgement.clauses.base import DRAWS, REWARD
from servanda.judgement.schedule import Arrivals, Schedule, Unit
from servanda.runner.reward_scorer import Scorer
from servanda.runner.round_files import SIDES, batch_of, in_order, round_name
from servanda.runner.run_directory import RunDirectory
from servanda.theory.sampling import Sampling
from servanda.traces.token_history import with_history
from servanda.traces.trace import Batch, Trace, answered, some, with_ends

if TYPE_CHECKING:
    from servanda.judgement.plan import Plan


def ends_of(descriptions: Mapping[str, Description], side: str) -> tuple[int, ...]:
    """The ids that end a sequence; a side without them uses those of another."""
    return next((d.eos for d in (descriptions[side], *descriptions.values()) if d.eos), ())


@dataclass(frozen=True)
class RoundRunner:
    """The open kernels of a measurement, and the storage of their traces.

    Args:
        kernels, engines, descriptions, pools: of each side; a pool is one thread.
        prompts: workload -> token ids of each line.
        classes: class of each token id, [V], or None if no slice uses them.
        scorer: scorer of whole responses; None if no clause uses rewards.
    """

    plan: Plan
    run: RunDirectory
    kernels: Mapping[str, Kernel]
    engines: Mapping[str, Engine]
    descriptions: Mapping[str, Description]
    pools: Mapping[str, ThreadPoolExecutor]
    prompts: Mapping[str, Sequence[tuple[int, ...]]]
    classes: Any
    scorer: Scorer | None = None

    def _batch(self, schedule: Schedule, units: Sequence[Unit], continuations: Any = ()) -> Batch:
        return batch_of(units, self.prompts[schedule.name], schedule.width, continuations)

    def drawn(
        self,
        schedule: Schedule,
        index: int,
        units: tuple[Unit, ...],
        side: str,
        what: str | None = None,
    ) -> Trace:
        """The responses of one kernel to a round's prompts, from disk or sampled now.

        Args:
            what: their name on disk, if not that of the side.
        """
        batch = self._batch(schedule, units)
        engine, sampling = self.engines[side], self._sampling(schedule, side)

        def draw() -> Trace:
            # one seed for every kernel: the samples of a sequence are coupled, see reward_gap
            trace = in_order(batch, verb_of(engine, "generate"), sampling, schedule.seed)
            if not isinstance(schedule, Arrivals):  # a user's request has its own length
                trace = with_ends(trace, schedule.width, self._ends(side))
            known = with_history(self._classified(batch, trace), batch.prompts)
            return self._rewarded(schedule, units, side, known)

        trace = self.run.cached(round_name(schedule, index, what or side), draw)
        if what == DRAWS and "path" not in trace.about:
            # train declares only its scoring path, so this records its sampling
            raise MeasurementError(
                f"the {side} engine {self.kernels[side].engine!r} does not record by which path "
                "it drew its answers",
                hint='let the trace of Engine.generate say about={"path": "decode"}',
            )
        return self._declared(trace, schedule, side, "decode")

    def _ends(self, side: str) -> tuple[int, ...]:
        """The ids that may end a response of a side that reports them; () if it does not.

        A server may report one end token of a model with several, which the other side knows.
        """
        own = self.descriptions[side].eos
        others = (end for d in self.descriptions.values() for end in d.eos)
        return tuple(dict.fromkeys((*own, *others))) if own else ()

    def _declared(self, trace: Trace, schedule: Schedule, side: str, path: Path) -> Trace:
        record = self.plan.contract.observability.record
        sampling, description = self._sampling(schedule, side), self.descriptions[side]
        return as_declared(trace, side, self.kernels[side], path, sampling, description, record)

    def _classified(self, batch: Batch, trace: Trace) -> Trace:
        """The trace with the class of each token, and of the token before it."""
        if self.classes is None:
            return trace
        before_N = [
            token
            for prompt, drawn in zip(batch.prompts, trace.continuations, strict=True)
            for token in (prompt[-1], *drawn[:-1])[: len(drawn)]
        ]
        code_N = self.classes[trace.token_N]
        previous_N = self.classes[np.array(before_N, dtype=np.int64)]
        columns = {**trace.columns, "token_class": code_N, "previous_class": previous_N}
        return replace(trace, columns=columns)

    def _rewarded(
        self, schedule: Schedule, units: Sequence[Unit], side: str, trace: Trace
    ) -> Trace:
        """The trace with the reward of each response that a reward clause uses."""
        cuts = self.plan.scored(schedule.name)
        if self.scorer is None or not cuts or side == "stable":
            return trace
        prompts, lost_S = schedule.corpus.prompts, trace.lost_S | (trace.length_S == 0)
        tokens_S = trace.prompt_tokens_S.tolist()
        scored = [
            s
            for s, unit in enumerate(units)
            if not lost_S[s]
            if any(cut.may_meet(prompts[unit.row], tokens_S[s]) for cut in cuts)
        ]
        answers = trace.continuations
        texts = self._texts(side, [answers[s] for s in scored])
        reward_S = np.full(len(units), np.nan)
        for s, text in zip(scored, texts, strict=True):
            reward_S[s] = self.scorer(schedule.corpus, units[s].row, text, side)
        columns = {**trace.columns, REWARD: np.repeat(reward_S, trace.length_S)}
        return replace(trace, columns=columns)

    def _texts(self, side: str, answers: Sequence[Sequence[int]]) -> list[str]:
        """The text of each response before its end token."""
        ends = set(ends_of(self.descriptions, side))
        ids = [[*itertools.takewhile(lambda t: t not in ends, tokens)] for tokens in answers]
        if self.descriptions[side].decodes:
            return verb_of(self.engines[side], "decode")(ids)
        # both sides have one vocabulary
        decode = verb_of(self.engines["train"], "decode")
        return self.pools["train"].submit(decode, ids).result()

    def _sampling(self, schedule: Schedule, side: str) -> Sampling:
        """The declared transform; the train kernel may have its own."""
        own = self.plan.contract.kernels.train.sampling if side == "train" else None
        return own or schedule.workload.sampling.transform

    def scores(
        self, schedule: Schedule, index: int, units: tuple[Unit, ...], infer: Trace
    ) -> dict[str, Future[Trace]]:
        """Train's scores of infer's samples, the noise floor scores, and the stable kernel."""
        batch = self._batch(schedule, units, infer.continuations)
        replayed = self._replayed(batch, infer, "infer")
        again = replayed.take([r for r in schedule.noise_rows(len(units)) if not infer.lost_S[r]])

        def score(side: str, what: str, given: Batch) -> Future[Trace]:
            path = path_of(self.kernels[side], side)
            engine, sampling = self.engines[side], self._sampling(schedule, side)

            def make() -> Trace:
                trace = answered(in_order(given, engine.score, sampling, path), given)
                return with_history(trace, given.prompts)

            def scored() -> Trace:
                trace = self.run.cached(round_name(schedule, index, what), make)
                return self._declared(trace, schedule, side, path)

            return self.pools[side].submit(scored)

        scores = {"train": score("train", "train", replayed)}
        if len(again):
            for side in SIDES:
                what = f"self_{side}"
                if path_of(self.kernels[side], side) in self.descriptions[side].scores:
                    own = again if side == "train" else replace(again, routes=())
                    scores[what] = score(side, what, own)
                else:  # it cannot score its own samples: its noise floor is unknown
                    nothing = partial(some, infer, ())
                    name = round_name(schedule, index, what)
                    scores[what] = self.pools[side].submit(self.run.cached, name, nothing)
        if self.plan.scored(schedule.name):
            pool = self.pools["train"]
            scores[DRAWS] = pool.submit(self.drawn, schedule, index, units, "train", DRAWS)
        if self.plan.stable_rounds:
            pool = self.pools["stable"]
            scores["stable"] = pool.submit(self.drawn, schedule, index, units, "stable")
            drawn = scores["stable"].result()
            served = self._batch(schedule, units, drawn.continuations)
            served = self._replayed(served, drawn, "stable")
            scores["stable_train"] = score("train", "stable_train", served)
        return scores

    def _replayed(self, batch: Batch, drawn: Trace, side: str) -> Batch:
        """A batch that train scores, with the experts that another side used if it replays them."""
        if self.kernels["train"].routes is None:
            return batch
        routes = drawn.routes_S
        if routes is None:
            raise MeasurementError(
                f"kernels.train.routes is replayed, and the {side} engine "
                f"{self.kernels[side].engine!r} recorded no experts",
                hint="remove the key routes, or let engine transformers run a mixture of experts",
            )
        return replace(batch, routes=routes)
