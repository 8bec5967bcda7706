# Measuring: two engines on the same tokens, round by closed round.
#
# The infer kernel samples; the train kernel scores the samples; 10 % of the sequences are scored
# again by each side in other batches, for its noise floor.  If rewards are compared, the train
# kernel also samples, from the same prompts.  While train scores one round, infer samples the next:
# two processes, two cores.  The results of a round are on disk before they count, and a resumed run
# reads them and samples nothing twice, because samples are keyed by (seed, sequence, position).

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from servanda.contract.identity import Description, EvidenceKey, same_policy
from servanda.contract.model import Kernel
from servanda.engines.base import Engine
from servanda.engines.foreign_code import refuse_code_of_kernel
from servanda.engines.worker import spawn
from servanda.errors import ContractError, IdentityError, MeasurementError
from servanda.judgement.admission import (
    refuse_corners,
    refuse_long,
    refuse_outside,
    refuse_unfit,
    refuse_unresolved,
    refuse_unscored,
    refuse_weak_identity,
)
from servanda.judgement.clauses.base import Source
from servanda.judgement.evidence import GoldenRun, Round
from servanda.judgement.plan import Plan
from servanda.judgement.schedule import Schedule
from servanda.judgement.slices.columns import CLASS_FIELDS, codes
from servanda.runner.batch_invariance import measure_batches, measure_corners
from servanda.runner.golden import measure_golden
from servanda.runner.load_test import measure_timing
from servanda.runner.reward_scorer import scorer_of
from servanda.runner.round import RoundRunner, ends_of
from servanda.runner.round_files import SIDES, peers, round_name
from servanda.runner.run_directory import RunDirectory
from servanda.traces.corpus import Corpus
from servanda.traces.trace import Trace, align

_OF_TRAFFIC = (
    "users ask such requests, and train cannot score them: narrow runtime.envelope.prompt_tokens, "
    "outside of which a request is no evidence"
)
_SHOWN = 60  # most characters of a value in a message

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
        scorer = scorer_of(self.plan)  # report a reward that cannot be loaded at once
        kernels = {side: getattr(self.plan.contract.kernels, side) for side in SIDES}
        if self.plan.stable is not None:
            kernels["stable"] = self.plan.stable
        pools = {side: ThreadPoolExecutor(1, side) for side in kernels}
        for pool in pools.values():
            self._stack.callback(pool.shutdown, cancel_futures=True)
        self.watch(Progress("loading the kernels", 0, len(kernels)))
        for side, kernel in kernels.items():
            refuse_code_of_kernel(kernel, f"kernels.{side}")
            self.engines[side] = self.open(kernel, side)
            self._stack.callback(self.engines[side].close)
        loading = {s: pools[s].submit(self.engines[s].describe) for s in kernels}
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
        self.drawing = RoundRunner(
            self.plan,
            self.run,
            kernels,
            self.engines,
            self.descriptions,
            pools,
            self.prompts,
            self._token_classes(),
            scorer,
        )

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

    def rounds(self, schedule: Schedule) -> Iterator[Round]:
        """Closed rounds from the first on: those on disk, then newly measured ones."""
        ahead: Future[Trace] | None = None
        for index in range(schedule.rounds):
            units = schedule.units(index)
            infer = ahead.result() if ahead else self.drawing.drawn(schedule, index, units, "infer")
            ahead = None
            scores = self.drawing.scores(schedule, index, units, infer)
            following = round_name(schedule, index + 1, "train")
            if index + 1 < schedule.rounds and not self.run.has(following):
                later = schedule.units(index + 1)
                pool = self.drawing.pools["infer"]
                ahead = pool.submit(self.drawing.drawn, schedule, index + 1, later, "infer")
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
    text = "nothing" if value is None else str(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
