# A reference pack for `servanda tools measure`: one kernel samples on a schedule and is recorded.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract import presets
from servanda.contract.kernel_string import parse_kernel
from servanda.contract.model import Contract, Kernel, Kernels
from servanda.contract.model import Path as Scoring
from servanda.contract.workload import Golden, Workload
from servanda.engines import engine_names
from servanda.engines.base import Engine
from servanda.engines.recorded import Pack, PackSchedule, record
from servanda.engines.worker import spawn
from servanda.errors import ContractError, MeasurementError
from servanda.judgement.plan import Plan
from servanda.judgement.schedule import Schedule
from servanda.runner import load, run
from servanda.runner.compare.contract import SHIPPED, read_corpus, shipped
from servanda.runner.compare.sides import refuse_missing
from servanda.runner.golden import by_length, refuse_short, text_batch
from servanda.runner.measurement import Open, Progress, Watch, unwatched
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
        ids = encoded(schedule.corpus, recorder, schedule.width)
        _draw(schedule, kernel, recorder, ids, watch)
        if golden is not None:
            ids = encoded(golden, recorder, 0)
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
            logp_RV, token_R = log_softmax(logits_RV), token_N[at : at + len(logits_RV)]
            at += len(logits_RV)
            row_R = np.arange(len(token_R))
            best_RK = np.argsort(-logp_RV, axis=-1, kind="stable")[:, :TOP]
            best_logp_RK = logp_RV[row_R[:, None], best_RK].astype(np.float32)
            parts.append((logp_RV[row_R, token_R], best_RK, best_logp_RK))
    logp_N, best_NK, best_logp_NK = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Trace.of(
        batch, lengths, token_N, {"logp": logp_N, **best_columns(best_NK, best_logp_NK)}
    )


_PACKED = 1024  # default number of prompt groups of a pack


@dataclass(frozen=True)
class PackOptions:
    """The options of `measure`: a contract and its side, or a kernel and its texts."""

    what: str
    side: str | None = None
    prompts: Path | None = None
    golden: Path | None = None
    sequences: int | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None


def pack_contract(options: PackOptions) -> tuple[Contract, str]:
    """The contract and the side of a pack.

    Raises:
        ContractError: inconsistent options, or an invalid text.
    """
    own = ("prompts", "golden", "max_new_tokens", "temperature", "top_p")
    if options.what.endswith((".yaml", ".yml")):
        given = [name for name in own if getattr(options, name) is not None]
        if given:
            raise ContractError(
                f"--{given[0].replace('_', '-')} is the contract's to say",
                hint="write it in the contract, or name a kernel instead of the contract",
            )
        contract = run.load(options.what)
        return _sized(contract, options.sequences), options.side or "train"
    if options.side is not None:
        raise ContractError("--side names a side of a contract, and this is a kernel")
    kernel = parse_kernel(options.what, engines=engine_names(), name="KERNEL")
    refuse_missing(kernel, options.what, "KERNEL")
    sampling = {n: getattr(options, n) for n in own[2:] if getattr(options, n) is not None}
    template = load.contract_of(presets.preset_text("fp8"), "fp8")
    assert template.workload is not None
    prompts = options.prompts or shipped(SHIPPED)
    for file in (prompts, options.golden):
        if file is not None:
            read_corpus(file)
    workload = Workload(  # type: ignore[call-arg]
        prompts=str(prompts), sampling=template.workload.sampling.model_copy(update=sampling)
    )
    changes = {
        "kernels": Kernels(train=kernel, infer=kernel),
        "workload": workload,
        "golden": Golden(prompts=str(options.golden), path="decode") if options.golden else None,
        "slices": (),
    }
    return _sized(template.model_copy(update=changes), options.sequences or _PACKED), "train"


def _sized(contract: Contract, sequences: int | None) -> Contract:
    if sequences is None:
        return contract
    offline = contract.promotion.offline.model_copy(update={"sequences": (1, sequences)})
    promotion = contract.promotion.model_copy(update={"offline": offline})
    return contract.model_copy(update={"promotion": promotion})


def measure_pack(
    contract: Contract, side: str, out: Path, *, open: Open = spawn, watch: Watch | None = None
) -> Pack:
    """A reference pack of one side of a contract.

    Raises:
        ContractError, MeasurementError: as in compile and packing.
    """
    kernel: Kernel = getattr(contract.kernels, side)
    # a pack has no promises: its contract only defines the samples
    drawing = contract.model_copy(update={"numerical": (), "statistical": ()})
    return make_pack(run.compile(drawing), kernel, out, open=open, watch=watch or unwatched)
