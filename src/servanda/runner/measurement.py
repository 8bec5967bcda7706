# Measuring: two engines on the same tokens, round by closed round.
#
# The infer kernel samples; the train kernel scores the samples; 10 % of the sequences are scored
# again by each side in other batches, for its noise floor.  If rewards are compared, the train
# kernel also samples, from the same prompts.  While train scores one round, infer samples the next:
# two processes, two cores.  The results of a round are on disk before they count, and a resumed run
# reads them and samples nothing twice, because samples are keyed by (seed, sequence, position).

from __future__ import annotations

import ast
import contextlib
import itertools
import math
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from numbers import Real
from types import ModuleType
from typing import Any

import numpy as np

from servanda.contract.identity import Description, EvidenceKey, digest_of, same_policy
from servanda.contract.model import Kernel, Path
from servanda.engines.base import Engine, verb_of
from servanda.engines.foreign_code import refuse_code, refuse_code_of_kernel
from servanda.engines.worker import spawn
from servanda.errors import ContractError, IdentityError, MeasurementError, Where
from servanda.judgement.admission import (
    as_declared,
    path_of,
    refuse_corners,
    refuse_long,
    refuse_outside,
    refuse_unfit,
    refuse_unresolved,
    refuse_unscored,
    refuse_weak_identity,
)
from servanda.judgement.clauses.base import DRAWS, FORMAT, REWARD, Interim, Source
from servanda.judgement.clauses.service_level import (
    LOOKS,
    RECORDED,
    SERVED,
    STABLE,
    LoadOf,
    LoadRun,
)
from servanda.judgement.evidence import GoldenRun, Round
from servanda.judgement.plan import Plan
from servanda.judgement.rewards import REWARDS, file_and_function
from servanda.judgement.schedule import Arrivals, Schedule, Unit
from servanda.judgement.slices.columns import CLASS_FIELDS, codes
from servanda.registry import cut, did_you_mean, quoted
from servanda.runner.batch_invariance import measure_batches, measure_corners
from servanda.runner.golden import measure_golden
from servanda.runner.round_files import SIDES, batch_of, in_order, peers, round_name
from servanda.runner.run_directory import RunDirectory
from servanda.theory.sampling import Sampling, uniforms
from servanda.traces.corpus import Corpus, joined
from servanda.traces.serialization import from_plain
from servanda.traces.token_history import with_history
from servanda.traces.trace import (
    Batch,
    Timing,
    Trace,
    align,
    answered,
    some,
    with_ends,
    without_mass_beyond,
)

# Scoring: the reward of a response, by a built-in rule or the contract's own function.
#
# The contract's own function is compiled from the text in the evidence key, so evidence of another
# version of the file expires.  Its output goes to stderr: stdout is for the report.


@dataclass(frozen=True)
class Scorer:
    """The reward of a contract, with a check of its range.

    Args:
        of: its name in the contract.
        span: smallest and largest reward.
        file: file of the function; "" for a built-in rule.
    """

    of: str
    score: Callable[[dict[str, Any], str], Any]
    span: tuple[float, float]
    file: str = ""
    # both kernels' threads score, but the contract's function may assume a single thread
    _one: threading.Lock = field(default_factory=threading.Lock, compare=False)

    def __call__(self, corpus: Corpus, row: int, answer: str, side: str) -> float:
        """The reward of a side's response to a line.

        Raises:
            MeasurementError: the function raised, or returned no number within the range.
        """
        line = f"{corpus.file}:{corpus.prompts[row].line}"
        answer_text = f"{side}'s answer {quoted(answer)} to {line}"
        try:
            with self._one, contextlib.redirect_stdout(sys.stderr):
                value = self.score(corpus.given(row), answer)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # exit(0) in it would mean "holds"
            raise MeasurementError(
                f"the reward {self.of} failed on {answer_text}: {_error_text(error)}",
                where=_place(error, self.file),
                hint="correct the function; evidence that was measured with its old text expires",
            ) from error
        if not isinstance(value, Real | np.bool_) or math.isnan(value):
            raise MeasurementError(
                f"the reward {self.of} of {answer_text} is {quoted(value)}, and a number is wanted",
                hint="return a number for every answer: 0 for a wrong one",
            )
        low, high = self.span
        if not low <= (reward := float(value)) <= high:
            raise MeasurementError(
                f"the reward {self.of} of {answer_text} is {reward:g}, outside of the declared "
                f"range {low:g} to {high:g}",
                hint="declare the range that the reward has under reward.range",
            )
        return reward


def scorer_of(plan: Plan) -> Scorer | None:
    """The scorer of a plan's responses; None if no clause uses rewards.

    Raises:
        MeasurementError: the contract's own function cannot be loaded.
    """
    reward = plan.contract.reward
    if not plan.reward or reward is None or reward.of is None:
        return None
    parts = file_and_function(reward.of)
    if parts is None:
        return Scorer(reward.of, REWARDS[reward.of].score, reward.range)
    file, function = parts
    refuse_code(plan.contract)
    return Scorer(reward.of, _loaded(file, function, plan.reward_source), reward.range, file)


def _loaded(file: str, function: str, source: str) -> Callable[[dict[str, Any], str], Any]:
    """The function of a Python file, compiled from the text that was read."""
    module = ModuleType(f"servanda_reward_{digest_of(source)}")
    module.__file__ = file
    sys.modules[module.__name__] = module  # for dataclasses, which look up the module of a class
    try:
        with contextlib.redirect_stdout(sys.stderr):
            exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise MeasurementError(
            f"the reward's file cannot be run: {_error_text(error)}",
            where=_place(error, file),
            hint="it runs in isolation: it can import installed packages, and no file next to it",
        ) from error
    scorer = getattr(module, function, None)
    if not callable(scorer):
        tree = ast.parse(source)
        known = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        raise MeasurementError(
            f"{file} has no function {function!r}",
            hint=did_you_mean(function, known) if known else f"define {function}(prompt, answer)",
        )
    return scorer


def _error_text(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}".rstrip(": ")


def _place(error: BaseException, file: str) -> Where | None:
    """The last line of a file in an error's traceback."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return Where(file, error.lineno or 1, error.offset or 1, (error.text or "").rstrip())
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    if not frames or not file:
        return None
    return Where(file, frames[-1].lineno or 1, 1, frames[-1].line or "")


# Timing: blocks of requests, served sequentially while nothing else runs.
#
# A block is timed as served (without logprobs), and again with recorded logprobs, as in the rest of
# a run (law 10); if a limit is relative to the stable kernel, also on that one.  Every second block
# runs in the opposite order, A B C | C B A, so that a linear drift affects all equally.  The first
# block of a session is a warm-up and is discarded.


Ids = tuple[int, ...]


def measure_timing(
    plan: Plan,
    run: RunDirectory,
    engines: Mapping[str, Engine],
    prompts: Mapping[str, Sequence[Ids]],
    watch: Callable[[int, int], None],
) -> dict[LoadOf, LoadRun]:
    """Timed blocks of every load, until its cells are decided or the last evaluation is reached.

    Args:
        engines: by side; no other work may run meanwhile.
        prompts: token ids of each workload's lines.
    """
    descriptions = {side: engine.describe() for side, engine in engines.items()}
    schedules = {s.name: s for s in plan.schedules}
    runs = {}
    for load, beside in plan.loads.items():
        sides = [SERVED, RECORDED, *([STABLE] if beside else [])]
        needed = ["infer", *([STABLE] if beside else [])]
        deaf = [side for side in needed if not descriptions[side].timed]
        if deaf:
            name = descriptions[deaf[0]].fingerprint.get("engine", "of that name")
            runs[load] = LoadRun(absent=f"the {deaf[0]} engine {name} cannot be timed")
            continue
        session = _Session(load, schedules[load.workload], prompts[load.workload], engines, sides)
        runs[load] = _until_decided(plan, run, session, watch)
    return runs


def _until_decided(
    plan: Plan, run: RunDirectory, session: _Session, watch: Callable[[int, int], None]
) -> LoadRun:
    blocks: list[Mapping[str, Timing]] = []
    result = LoadRun()
    for look in LOOKS:
        while len(blocks) < look:
            watch(len(blocks), look)
            number = len(blocks)
            name = f"timing/{session.load}/{number:06d}"
            data = run.cached_data(name, lambda: session.block(number))  # noqa: B023 - called now
            blocks.append({side: from_plain(Timing, timed) for side, timed in data.items()})
        result = LoadRun(tuple(blocks))
        if not _open(plan, session.load, result):
            break
    watch(len(blocks), len(blocks))
    return result


def _open(plan: Plan, load: LoadOf, result: LoadRun) -> bool:
    """Whether a counting cell of this load is undecided."""
    look = Interim(plan.alpha, plan.price_cells, 0, 0, part=plan.part)
    return any(
        cell.kind.judge(cell, [cell.kind.weigh(cell, {load: result})], None, look).open
        for cell in plan.cells
        if cell.kind.load == load and cell.clause.enforced
    )


@dataclass
class _Session:
    """A timing session of one load on warmed-up engines."""

    load: LoadOf
    schedule: Schedule
    ids: Sequence[Ids]
    engines: Mapping[str, Engine]
    sides: Sequence[str]
    warm: bool = False

    @property
    def _seed(self) -> int:
        return int(digest_of(["timing", self.schedule.seed])[:15], 16)

    def block(self, number: int) -> dict[str, Any]:
        """One block on every side, as plain data."""
        batch = self._batch(number)
        if not self.warm:
            for side in self.sides:
                self._timed(side, batch)
            self.warm = True
        order = self.sides if number % 2 == 0 else self.sides[::-1]
        timed = {side: asdict(self._timed(side, batch)) for side in order}
        return {side: timed[side] for side in self.sides}

    def _timed(self, side: str, batch: Batch) -> Timing:
        name = STABLE if side == STABLE else "infer"
        sampling = self.schedule.workload.sampling.transform
        timing = self.engines[name].time(batch, sampling, self._seed, side == RECORDED)
        seconds = (*timing.first_S, *timing.gap_N)
        sound = all(math.isfinite(s) and s >= 0 for s in seconds) and timing.wall >= 0
        if not sound or len(timing.first_S) != len(batch):
            raise MeasurementError(
                f"the {name} engine timed {len(timing.first_S)} of {len(batch)} requests, and its "
                f"seconds begin {seconds[:3]}",
                hint="Engine.time gives finite seconds >= 0, and a first token for each request",
            )
        return timing

    def _batch(self, number: int) -> Batch:
        """The requests of a block: random prompts with replacement, determined by the seed."""
        load, ids, seed = self.load, self.ids, self._seed
        start = number * load.concurrency
        draws = range(start, start + load.concurrency)
        rows = [int(uniforms(seed, "prompt", d, 1)[0] * len(ids)) for d in draws]
        n = load.prompt_tokens
        prompts = tuple(joined(ids, row, n) if n else ids[row] for row in rows)
        return Batch(tuple(draws), prompts, load.new_tokens)


def ends_of(descriptions: Mapping[str, Description], side: str) -> tuple[int, ...]:
    """The ids that end a sequence; a side without them uses those of another."""
    return next((d.eos for d in (descriptions[side], *descriptions.values()) if d.eos), ())


_OF_TRAFFIC = (
    "users ask such requests, and train cannot score them: narrow runtime.envelope.prompt_tokens, "
    "outside of which a request is no evidence"
)
_SHOWN = 60  # most characters of a value in a message
_DREW = {"train": "infer", "stable_train": "stable"}  # train's scores -> the side that drew

Open = Callable[[Kernel, str], Engine]


@dataclass(frozen=True)
class Progress:
    """The progress of a run: `done` of about `total` in the activity `what`.

    Args:
        run: which of several runs it is of, such as "run 1 of 2"; "" for a single run.
    """

    what: str
    done: int
    total: int
    run: str = ""

    def __str__(self) -> str:
        return f"{self.run}, {self.what}" if self.run else self.what


Watch = Callable[[Progress], None]


def unwatched(_: Progress) -> None:
    """A progress callback that does nothing."""


class ExpiredError(MeasurementError):
    """The run directory has evidence of another key.

    Args:
        key: evidence key of the current kernels.
    """

    def __init__(self, message: str, *, hint: str, key: EvidenceKey) -> None:
        super().__init__(message, hint=hint)
        self.key = key


def key_of(plan: Plan, descriptions: Mapping[str, Description]) -> EvidenceKey:
    """The key of a plan's evidence for these descriptions of kernels.

    Raises:
        IdentityError: they run different policies.
    """
    train, infer = descriptions["train"], descriptions["infer"]
    grade, stable = same_policy(train, infer), descriptions.get("stable")
    if stable is not None:
        same_policy(train, stable, "stable")
    return EvidenceKey(
        contract=plan.contract.digest,
        corpus=plan.texts,
        train=train.digest,
        infer=infer.digest,
        weights=train.weights,
        attempt=plan.attempt,
        grade=grade,
        stable=stable.digest if stable is not None else "",
        reward=plan.reward,
    )


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
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        # engines first: then waiting tasks of a pool fail, and the pool can end
        self._stack.close()

    def _start(self) -> None:
        self.scorer = scorer_of(self.plan)  # report a reward that cannot be loaded at once
        self.kernels = kernels = self.plan.kernels
        self.pools = {side: ThreadPoolExecutor(1, side) for side in kernels}
        for pool in self.pools.values():
            self._stack.callback(pool.shutdown, cancel_futures=True)
        self.watch(Progress("loading the kernels", 0, len(kernels)))
        for side, kernel in kernels.items():
            refuse_code_of_kernel(kernel, f"kernels.{side}")
            self.engines[side] = self.open(kernel, side)
            self._stack.callback(self.engines[side].close)
        loading = {s: self.pools[s].submit(self.engines[s].describe) for s in kernels}
        self.descriptions = {side: future.result() for side, future in loading.items()}
        self.watch(Progress("loading the kernels", len(kernels), len(kernels)))
        for side in [*kernels][1:]:
            self._refuse_other_tokens(side)
        refuse_unscored(kernels["train"], self.descriptions["train"])
        self.key = key_of(self.plan, self.descriptions)
        refuse_weak_identity(self.plan.contract, self.key.grade)
        refuse_unresolved(self.plan, self.descriptions)
        refuse_corners(self.plan, self.descriptions)
        self._claim_directory()
        self.prompts = {s.name: self._encode(s.corpus, s.width) for s in self.plan.schedules}
        refuse_long(self.plan, self.descriptions, self.prompts)
        # golden texts are not measured on traffic
        golden = None if self.plan.live else self.plan.golden
        self.golden_ids = self._encode(golden, 0) if golden else []
        self._refuse_empty_slices()
        self.classes = self._token_classes()

    def _refuse_other_tokens(self, other: str) -> None:
        """Name the first id with two meanings; same_policy compares only digests."""
        ours, theirs = (self.descriptions[side].tokens for side in ("train", other))
        if ours == theirs or not ours or not theirs:
            return
        train, others = (self.engines[side].vocabulary() for side in ("train", other))
        for i, (ours, theirs) in enumerate(zip(train, others, strict=False)):
            if ours != theirs:
                raise IdentityError(
                    f"the tokenizers differ: id {i} is {ours!r} on train and {theirs!r} on {other}",
                    hint="a token id must mean the same on both sides: use one tokenizer.json",
                )

    def _claim_directory(self) -> None:
        contract = self.plan.contract.meaning
        begun = self.run.begun
        if begun is None:
            self.run.begin(self.key, contract)
            return
        before, text = begun
        if before != self.key:
            what = ", ".join(before.differences(self.key)) or "the attempt"
            changes = "; ".join(_changes(text, contract)[:3])
            self.run.expire(what)
            raise ExpiredError(
                f"{self.run.path} holds evidence of another agreement: {what} changed since"
                + (f" ({changes})" if changes else ""),
                hint="evidence expires with its key: --fresh opens attempt "
                f"{self.run.attempt + 1}, judged at a smaller alpha; or choose another --run-dir",
                key=self.key,
            )

    def _encode(self, corpus: Corpus, width: int) -> list[tuple[int, ...]]:
        """Token ids of every line, the same on all sides that encode, and within the context."""
        texts = [p.text for p in corpus.prompts if p.token_ids is None]
        sides = [side for side in SIDES if self.descriptions[side].encodes]
        if texts and not sides:
            raise MeasurementError(
                "neither engine has a tokenizer, and the prompts are texts",
                hint='give "token_ids" on every line of the prompts',
            )
        by_side = {side: iter(self.engines[side].encode(texts)) for side in sides}
        ids: list[tuple[int, ...]] = []
        for prompt in corpus.prompts:
            if prompt.token_ids is not None:
                ids.append(prompt.token_ids)
                continue
            first, *others = (next(by_side[side]) for side in sides)
            if others and first != others[0]:
                raise IdentityError(
                    f"{corpus.file}:{prompt.line}: the two sides encode this prompt differently: "
                    f"train {first[:8]}..., infer {others[0][:8]}...",
                    hint="use one tokenizer.json on both sides",
                )
            ids.append(tuple(first))
        advice = _OF_TRAFFIC if self.plan.live else ""
        refuse_unfit(corpus, ids, width, [*self.descriptions.values()], advice)
        if corpus is not self.plan.golden:
            refuse_outside(self.plan.contract, corpus, ids)
        return ids

    def _refuse_empty_slices(self) -> None:
        """Refuse empty slices of request.prompt_tokens, which are known only now."""
        if self.plan.live:
            return  # users may still send such requests
        schedules = {s.name: s for s in self.plan.schedules}
        for cell in self.plan.cells:
            corpus, ids = self.plan.golden, self.golden_ids
            if cell.workload:
                corpus, ids = schedules[cell.workload].corpus, self.prompts[cell.workload]
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
        """The golden texts, measured or read; None without any, and on traffic."""
        if self.plan.golden is None or self.plan.live:
            return None
        watch = self._watching("golden texts")
        return measure_golden(self.plan, self.run, self.engines, self.golden_ids, watch)

    def _watching(self, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self.watch(Progress(what, done, total))

    def once(self) -> dict[Source, Any]:
        """Measurements other than golden texts and rounds; timing first, while all is idle."""

        plan, run, ids = self.plan, self.run, self.golden_ids
        sources = {cell.kind.source for cell in plan.cells}
        measured: dict[Source, Any] = {}
        if "timing" in sources:
            watch = self._watching("timed blocks")
            measured["timing"] = measure_timing(plan, run, self.engines, self.prompts, watch)
        if "batches" in sources:
            infer = self.engines["infer"]
            measured["batches"] = measure_batches(plan, run, infer, ids, self.prompts)
        if "corners" in sources:
            watch = self._watching("corners of the envelope")
            measured["corners"] = measure_corners(plan, run, self.engines, ids, watch)
        return measured

    def _token_classes(self) -> Any:
        """The class of every token id, if a slice uses it; else None."""
        fields = {field for cell in self.plan.cells for field in cell.cut.fields}
        if not fields & set(CLASS_FIELDS):
            return None
        for side in ("infer", "train"):
            if vocabulary := self.engines[side].vocabulary():
                return codes(vocabulary, ends_of(self.descriptions, side))
        raise MeasurementError(
            "slices by class of token need the vocabulary, and neither engine has it",
            hint="cut by another field, or let one side be a kernel that loads the checkpoint",
        )

    # Sampling and scoring: the kernels on the dispatched units of one round.
    #
    # Each kernel has a separate waiting thread, so that one samples while another scores.  Results
    # are on disk before they are passed on.

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

    def _as_ended(self, trace: Trace, drew: str, width: int) -> Trace:
        """Train's scores of the responses of a side, of which some train would have ended."""
        theirs = self.descriptions[drew].eos
        # a server may report one end token of several
        known = theirs if self.kernels["train"].url is None else ()
        return without_mass_beyond(trace, self.descriptions["train"].eos, known, width)

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
        of_train = side in ("train", FORMAT)
        own = self.plan.contract.kernels.train.sampling if of_train else None
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
                if what in _DREW and not isinstance(schedule, Arrivals):
                    trace = self._as_ended(trace, _DREW[what], schedule.width)
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
        if self.plan.format is not None:
            scores[FORMAT] = score(FORMAT, FORMAT, replayed)
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

    def rounds(self, schedule: Schedule) -> Iterator[Round]:
        """Closed rounds from the first on: those on disk, then newly measured ones."""
        ahead: Future[Trace] | None = None
        for index in range(schedule.rounds):
            units = schedule.units(index)
            infer = ahead.result() if ahead else self.drawn(schedule, index, units, "infer")
            ahead = None
            scores = self.scores(schedule, index, units, infer)
            following = round_name(schedule, index + 1, "train")
            if index + 1 < schedule.rounds and not self.run.has(following):
                later = schedule.units(index + 1)
                pool = self.pools["infer"]
                ahead = pool.submit(self.drawn, schedule, index + 1, later, "infer")
            traces = {what: score.result() for what, score in scores.items()}
            train = traces.pop("train")
            yield Round(
                schedule.name,
                index,
                units,
                align(train, infer),
                peers(infer, train, traces),
            )


def _changes(old: Any, new: Any, place: str = "") -> list[str]:
    """The differences of two texts: "statistical.tv.at_most: 0.05 -> 0.06"; clauses by id."""
    old, new = _by_id(old), _by_id(new)
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys([*old, *new])
        pairs = [(str(k), old.get(k), new.get(k)) for k in keys]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(old, new, strict=True))]
    else:
        return [] if old == new else [f"{place}: {_cut(old)} -> {_cut(new)}"]
    return [c for k, a, b in pairs for c in _changes(a, b, f"{place}.{k}" if place else k)]


def _by_id(value: Any) -> Any:
    """A list of clauses as id -> clause; other values unchanged."""
    named = isinstance(value, list) and value and all(isinstance(v, dict) for v in value)
    if not named or not all("id" in v for v in value):
        return value
    return {v["id"]: v for v in value}


def _cut(value: Any) -> str:
    return "nothing" if value is None else cut(str(value), _SHOWN)
