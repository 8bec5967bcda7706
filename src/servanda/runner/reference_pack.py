# Makes a reference pack: one kernel samples on a schedule and is recorded.

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from servanda.contract.model import Kernel
from servanda.contract.model import Path as Scoring
from servanda.engines.arrow import to_parquet
from servanda.engines.base import Engine
from servanda.engines.pack_file import GOLDEN_PATH, Pack, write_pack
from servanda.errors import ContractError, MeasurementError
from servanda.judgement.plan import Plan
from servanda.judgement.schedule import Schedule
from servanda.runner.golden import by_length, refuse_short, text_batch
from servanda.runner.measurement import Open, Progress, Watch
from servanda.runner.probe import encoded
from servanda.runner.round_files import batch_of, in_order
from servanda.theory.sampling import log_softmax
from servanda.traces.corpus import Corpus
from servanda.traces.trace import Trace, some

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
    schedule = plan.schedules[0]
    watch(Progress("loading the kernel", 0, 1))
    engine = open(kernel, "reference")
    try:
        description = engine.describe()
        watch(Progress("loading the kernel", 1, 1))
        tokens = {"prompts": encoded(schedule.corpus, engine)}
        others = {"prompts.jsonl": schedule.corpus.text.encode()}
        drawn, again = _drawn(schedule, kernel, engine, tokens["prompts"], watch)
        if plan.golden is not None:
            tokens["golden"] = encoded(plan.golden, engine)
            others["golden.jsonl"] = plan.golden.text.encode()
            watch(Progress("golden texts", 0, len(plan.golden)))
            assert plan.contract.golden is not None
            path = kernel.path or plan.contract.golden.path
            others["golden.parquet"] = to_parquet(
                _golden(kernel, engine, plan.golden, tokens["golden"], path)
            )
        others["tokens.json"] = json.dumps(tokens, separators=(",", ":")).encode()
        others["vocabulary.json"] = json.dumps(engine.vocabulary()).encode()
    finally:
        engine.close()
    return write_pack(
        out,
        kernel=kernel,
        description=description,
        workload=schedule.workload,
        seed=schedule.seed,
        groups=schedule.rounds * schedule.workload.round,
        traces={"drawn": drawn, "again": again},
        others=others,
    )


def _drawn(
    schedule: Schedule,
    kernel: Kernel,
    engine: Engine,
    ids: Sequence[tuple[int, ...]],
    watch: Watch,
) -> tuple[Trace, Trace]:
    """Every sequence, and 10 % of them scored again in other batches."""
    sampling, drawn, again = schedule.workload.sampling.transform, [], []
    for index in range(schedule.rounds):
        watch(Progress("prompt groups", index * schedule.workload.round, schedule.last))
        units = schedule.units(index)
        batch = batch_of(units, ids, schedule.width)
        trace = in_order(batch, engine.generate, sampling, schedule.seed)
        drawn.append(trace)
        given = batch_of(units, ids, schedule.width, trace.continuations)
        rows = [row for row in schedule.noise_rows(len(units)) if not trace.lost_S[row]]
        if rows:
            path = kernel.path or "decode"
            again.append(in_order(given.take(rows), engine.score, sampling, path))
    watch(Progress("prompt groups", schedule.last, schedule.last))
    return Trace.join(drawn), Trace.join(again or [some(drawn[0], ())])


def _golden(
    kernel: Kernel,
    engine: Engine,
    golden: Corpus,
    ids: Sequence[tuple[int, ...]],
    path: Scoring,
) -> pa.Table:
    """The record that bounds every divergence at a golden position, given a candidate's top-k.

    One row per position: text, token, its raw logprob and the log-sum-exp of the logits in
    float64, and the best TOP ids with their raw logprobs in float32.
    """
    if not engine.describe().full_logits:
        raise MeasurementError(
            f"engine {kernel.engine!r} cannot give full logits, which golden texts need",
            hint="leave out the golden texts",
        )
    refuse_short(golden, ids)
    order = by_length(ids)
    text_N = np.array([row for row in order for _ in ids[row][1:]], dtype=np.int32)
    token_N = np.array([token for row in order for token in ids[row][1:]], dtype=np.int64)
    parts: list[tuple[NDArray[Any], ...]] = []
    at = 0
    for start in range(0, len(order), kernel.batch_size):
        batch = text_batch(order[start : start + kernel.batch_size], ids)
        for logits_RV in engine.logits(batch, path):
            parts.append(_reduced(logits_RV, token_N[at : at + len(logits_RV)]))
            at += len(logits_RV)
    logp_N, lse_N, top_NK, top_logp_NK = (np.concatenate(p) for p in zip(*parts, strict=True))
    table = pa.table(
        {
            "text": pa.array(text_N),
            "token": pa.array(token_N.astype(np.int32)),
            "logp": pa.array(logp_N),
            "log_sum_exp": pa.array(lse_N),
            "top_ids": _rows(top_NK.astype(np.int32)),
            "top_logp": _rows(top_logp_NK.astype(np.float32)),
        }
    )
    return table.replace_schema_metadata({GOLDEN_PATH: path})


def _reduced(
    logits_RV: NDArray[np.floating], token_R: NDArray[np.int64]
) -> tuple[NDArray[Any], ...]:
    logp_RV = log_softmax(logits_RV)
    rows_R1 = np.arange(len(token_R))[:, None]
    best_RK = np.argsort(-logp_RV, axis=-1, kind="stable")[:, :TOP]
    # at the top-1 token, which always has mass: logit - logprob is the normaliser
    logit_R1 = np.asarray(logits_RV, dtype=np.float64)[rows_R1, best_RK[:, :1]]
    lse_R = (logit_R1 - logp_RV[rows_R1, best_RK[:, :1]])[:, 0]
    return logp_RV[rows_R1[:, 0], token_R], lse_R, best_RK, logp_RV[rows_R1, best_RK]


def _rows(values_NK: NDArray[Any]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values_NK.reshape(-1)), values_NK.shape[1])
