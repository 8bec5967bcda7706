# Makes a reference pack: one kernel samples on a schedule and is recorded.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.model import Kernel
from servanda.contract.model import Path as Scoring
from servanda.engines.base import Engine
from servanda.engines.recorded import record
from servanda.engines.recorded_file import Pack, PackSchedule
from servanda.errors import ContractError, MeasurementError
from servanda.judgement.plan import Plan
from servanda.judgement.schedule import Schedule
from servanda.runner.golden import by_length, refuse_short, text_batch
from servanda.runner.measurement import Open, Progress, Watch
from servanda.runner.probe import encoded
from servanda.runner.round_files import batch_of, in_order
from servanda.theory.sampling import best_columns, log_softmax
from servanda.traces.trace import Batch, Trace

TOP = 64  # top-k tokens recorded per golden position


def make_pack(plan: Plan, kernel: Kernel, out: Path, *, open: Open, watch: Watch) -> Pack:
    """Sample every round of a plan's workload with one kernel, and write the pack.

    The rounds are those of `check` at the same sizes, so that a candidate scores exactly the
    sequences of the schedule.

    Raises:
        ContractError: the plan has no workload, or more than one.
        MeasurementError: the engine failed, or the file cannot be written.
    """
    if len(plan.schedules) != 1:
        raise ContractError(
            f"a pack holds one workload, and the contract has {len(plan.schedules)}",
            hint="write a contract with one workload",
        )
    if kernel.sampling is not None:
        raise ContractError(
            "a pack is drawn as workload.sampling says, and this kernel has a sampling of its own",
            hint="remove kernels.train.sampling",
        )
    schedule, golden = plan.schedules[0], plan.golden
    own = plan.contract.golden.path if plan.contract.golden is not None else "prefill"
    held = PackSchedule(
        kernel=kernel,
        workload=schedule.workload,
        groups=schedule.rounds * schedule.workload.round,
        prompts=schedule.corpus.text,
        golden=None if golden is None else golden.text,
        golden_path=kernel.path or own,
    )
    watch(Progress("loading the kernel", 0, 1))
    engine = open(kernel, "reference")
    with record(engine, out, held) as recorder:
        recorder.describe()
        watch(Progress("loading the kernel", 1, 1))
        _draw(schedule, kernel, recorder, encoded(schedule.corpus, recorder), watch)
        if golden is not None:
            ids = encoded(golden, recorder)
            watch(Progress("golden texts", 0, len(golden)))
            refuse_short(golden, ids)
            batch = text_batch(by_length(ids), ids)
            best = _best(kernel, engine, batch, held.golden_path)
            recorder.keep_top(batch, held.golden_path, best)
    return Pack.read(str(out))


def _draw(
    schedule: Schedule,
    kernel: Kernel,
    engine: Engine,
    ids: Sequence[tuple[int, ...]],
    watch: Watch,
) -> None:
    """Every sequence, and 10 % of them scored again in other batches."""
    sampling = schedule.workload.sampling.transform
    for index in range(schedule.rounds):
        watch(Progress("prompt groups", index * schedule.workload.round, schedule.last))
        units = schedule.units(index)
        batch = batch_of(units, ids, schedule.width)
        trace = in_order(batch, engine.generate, sampling, schedule.seed)
        given = batch_of(units, ids, schedule.width, trace.continuations)
        rows = [row for row in schedule.noise_rows(len(units)) if not trace.lost_S[row]]
        if rows:
            in_order(given.take(rows), engine.score, sampling, kernel.path or "decode")
    watch(Progress("prompt groups", schedule.last, schedule.last))


def _best(kernel: Kernel, engine: Engine, batch: Batch, path: Scoring) -> Trace:
    """The record that bounds every divergence at a golden position, given a candidate's top-k.

    Of each position: its raw logprob in float64, and the best TOP ids with their raw logprobs in
    float32.
    """
    if not engine.describe().full_logits:
        raise MeasurementError(
            f"engine {kernel.engine!r} cannot give full logits, which golden texts need",
            hint="leave out the golden texts",
        )
    lengths = [len(given) for given in batch.continuations]
    token_N = np.array([t for given in batch.continuations for t in given], dtype=np.int64)
    parts: list[tuple[NDArray[Any], ...]] = []
    at = 0
    for rows in batch.chunks(kernel.batch_size):
        width = max(map(len, rows.continuations))
        for logits_RV in engine.logits(replace(rows, width=width), path):
            parts.append(_reduced(logits_RV, token_N[at : at + len(logits_RV)]))
            at += len(logits_RV)
    logp_N, best_NK, best_logp_NK = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Trace.of(
        batch, lengths, token_N, {"logp": logp_N, **best_columns(best_NK, best_logp_NK)}
    )


def _reduced(
    logits_RV: NDArray[np.floating], token_R: NDArray[np.int64]
) -> tuple[NDArray[Any], ...]:
    logp_RV = log_softmax(logits_RV)
    rows_R1 = np.arange(len(token_R))[:, None]
    best_RK = np.argsort(-logp_RV, axis=-1, kind="stable")[:, :TOP]
    return logp_RV[rows_R1[:, 0], token_R], best_RK, logp_RV[rows_R1, best_RK].astype(np.float32)
