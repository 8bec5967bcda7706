# The golden texts: fixed tokens that both kernels score with their full vocabulary.
#
# Logits of both sides arrive piece by piece, are reduced to the exact metrics of each
# position (the joint columns) while both are in memory, and are never stored.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.model import BEST_ONLY, Path
from servanda.engines.base import Engine
from servanda.errors import ContractError, MeasurementError, Where
from servanda.judgement.admission import path_of
from servanda.judgement.clauses.calibration import COLUMNS
from servanda.judgement.evidence import GoldenRun
from servanda.judgement.schedule import NOISE_STRIDE
from servanda.runner.golden_intervals import BOUNDED, TAIL, bounded
from servanda.runner.run_directory import RunDirectory
from servanda.theory.divergence.base import DIVERGENCES, LogitRows, exact
from servanda.theory.sampling import entropy_nats
from servanda.traces.trace import Batch, Trace, TracePair

if TYPE_CHECKING:
    from servanda.judgement.plan import Plan

Pieces = Iterator[NDArray[np.floating]]
_JOINT = "joint."
EXACT = frozenset(n for n, metric in DIVERGENCES.items() if "logits" in metric.forms) | {*COLUMNS}
ENDS = frozenset({TAIL, *(f"{name}.{end}" for name in BOUNDED for end in ("low", "high"))})


def measure_golden(
    plan: Plan,
    run: RunDirectory,
    engines: Mapping[str, Engine],
    ids: Sequence[tuple[int, ...]],
    watch: Callable[[int, int], None],
) -> GoldenRun:
    """Every golden text on both kernels, and a tenth of them on each kernel twice."""
    assert plan.golden is not None and plan.contract.golden is not None
    for row, tokens in enumerate(ids):
        if len(tokens) < 2:
            raise ContractError(
                "a golden text needs at least two tokens: the first is only context",
                where=Where(plan.golden.file, plan.golden.prompts[row].line, 1),
            )
    kernels = plan.contract.kernels
    paths: dict[str, Path] = {"train": "prefill", "infer": plan.contract.golden.path}
    told = engines["infer"].describe()
    best = 0 if told.full_logits else told.top
    if best and kernels.infer.engine not in BEST_ONLY:
        raise MeasurementError(
            f"the infer engine {kernels.infer.engine!r} answers golden texts with their {best} "
            "likeliest tokens alone, and facts between two ends are judged of a pack and of "
            "openai_http",
            hint="leave out `golden:` and the numerical section, or judge them where the kernel "
            "runs: a recording of a server has no more than the server told",
        )
    if best:  # whoever has no full logits here drew, and train re-scores as it is declared to
        paths["train"] = path_of(kernels.train, "train")
    sides = ("train",) if best else ("train", "infer")
    for side in sides:
        engine = engines[side]
        if not engine.describe().full_logits:
            raise MeasurementError(
                f"the {side} engine cannot give full logits, which `numerical` needs",
                hint="leave out `golden:` and the numerical section for this kernel",
            )
    # texts of like length share a batch; facts do not depend on the order
    order = sorted(range(len(ids)), key=lambda row: (len(ids[row]), row))
    size = (kernels.train if best else kernels.infer).batch_size
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    # a text alone has no other composition; of few texts the most unlike two are taken
    again = order[::NOISE_STRIDE] if len(order) > NOISE_STRIDE else order[:: len(order) - 1 or 1]
    sides = sides if len(again) > 1 else ()
    measured, names = (_bounded, ENDS) if best else (both, EXACT)
    total = len(batches) + len(sides)

    traces = []
    for number, rows in enumerate(batches):
        watch(number, total)
        make = partial(measured, dict.fromkeys(paths, _batch(rows, ids)), engines, paths)
        traces.append(kept(run, f"golden/{number:06d}", make, names))
    selves = []
    for number, side in enumerate(sides):
        watch(len(batches) + number, total)
        make = partial(against_itself, _batch(again, ids), engines[side], paths[side])
        selves.append(kept(run, f"golden/self_{side}", make))
    watch(total, total)
    return _run(Trace.join(traces), selves)


def kept(
    run: RunDirectory, name: str, make: Callable[[], Trace], names: frozenset[str] = EXACT
) -> Trace:
    """The trace on disk, or a new one: also where a version that knew fewer metrics wrote it.

    The texts are fixed, so measuring them again draws nothing a second time.
    """
    if run.has(name):
        trace = run.read(name)
        if names <= {name.removeprefix(_JOINT) for name in trace.columns}:
            return trace
    trace = make()
    run.write(name, trace)
    return trace


def read_golden(run: RunDirectory) -> GoldenRun | None:
    """The golden texts of a finished run; no engine is needed.  None where it has none."""
    traces = []
    while run.has(name := f"golden/{len(traces):06d}"):
        traces.append(run.read(name))
    if not traces:
        return None
    names = [f"golden/self_{side}" for side in ("train", "infer")]
    selves = [run.read(name) for name in names if run.has(name)]
    return _run(Trace.join(traces), selves)


def _run(whole: Trace, selves: Sequence[Trace]) -> GoldenRun:
    return GoldenRun(
        rows=tuple(whole.sequence_S.tolist()),
        pair=_pair(whole),
        exact=exact_columns(whole),
        self_rows=tuple(selves[0].sequence_S.tolist()) if selves else (),
        self_pairs=tuple(_pair(t) for t in selves),
        self_exact=tuple(exact_columns(t) for t in selves),
    )


def _batch(rows: Sequence[int], ids: Sequence[tuple[int, ...]]) -> Batch:
    texts = [ids[row] for row in rows]
    return Batch(
        sequence_S=tuple(rows),
        prompts=tuple(t[:1] for t in texts),
        width=max(len(t) for t in texts) - 1,
        continuations=tuple(t[1:] for t in texts),
    )


def both(
    batches: Mapping[str, Batch], engines: Mapping[str, Engine], paths: Mapping[str, Path]
) -> Trace:
    """Both kernels on the same tokens; a side's batch says how many of them run at once."""
    train, infer = (engines[side].logits(batches[side], paths[side]) for side in ("train", "infer"))
    return _joint(batches["infer"], train, infer)


def _bounded(
    batches: Mapping[str, Batch], engines: Mapping[str, Engine], paths: Mapping[str, Path]
) -> Trace:
    """Full logits of train against the likeliest tokens of infer."""
    infer = engines["infer"]
    train = engines["train"].logits(batches["train"], paths["train"])
    far = infer.top(batches["infer"], paths["infer"])
    # a server does not tell the size of its vocabulary, and both sides have one
    size = infer.describe().vocab_size or engines["train"].describe().vocab_size
    return bounded(train, far, size)


def against_itself(batch: Batch, engine: Engine, path: Path) -> Trace:
    """One side alone: the texts in two batches of their own widths, and all in one."""
    half = len(batch) // 2
    parts = [batch.take(rows) for rows in (range(half), range(half, len(batch))) if rows]
    apart = chain.from_iterable(
        engine.logits(replace(part, width=max(map(len, part.continuations))), path)
        for part in parts
    )
    # all of the first before the second: an engine answers one question at a time
    return _joint(batch, iter(list(apart)), engine.logits(batch, path))


def _joint(batch: Batch, train: Pieces, infer: Pieces) -> Trace:
    """The exact metrics of each position, reduced piece by piece."""
    token_N = np.array([t for tokens in batch.continuations for t in tokens], dtype=np.int64)
    parts: list[dict[str, NDArray[Any]]] = []
    at = 0
    for train_RV, infer_RV in _lockstep(train, infer):
        rows = LogitRows(train_RV, infer_RV)
        tokens_R = token_N[at : at + len(train_RV)]
        at += len(train_RV)
        parts.append(reduced(rows, tokens_R))
    if at != len(token_N):
        raise MeasurementError(f"{at} rows of logits for {len(token_N)} golden tokens")
    return Trace(
        sequence_S=np.array(batch.sequence_S, dtype=np.int64),
        length_S=np.array([len(c) for c in batch.continuations], dtype=np.int64),
        lost_S=np.zeros(len(batch), dtype=bool),
        # the prompt of a golden text is the whole text
        prompt_tokens_S=np.array([len(c) + 1 for c in batch.continuations], dtype=np.int64),
        token_N=token_N,
        columns={name: np.concatenate([p[name] for p in parts]) for name in parts[0]},
    )


def reduced(rows: LogitRows, tokens_R: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    at_R = np.arange(len(tokens_R))
    with np.errstate(invalid="ignore", divide="ignore"):
        infer_logp_RV = rows.infer_logp_RV
        columns = {
            "logp": infer_logp_RV[at_R, tokens_R],
            "logp_train": rows.train_logp_RV[at_R, tokens_R],
            "entropy_nats": entropy_nats(infer_logp_RV),
            "p_max": np.exp(infer_logp_RV.max(axis=-1)),
        }
    for name, metric in DIVERGENCES.items():
        if "logits" in metric.forms:
            columns[_JOINT + name] = exact(name, rows)
    # for calibration: what each side is surest of, and whether that is the golden token
    for side, logp_RV in (("train", rows.train_logp_RV), ("infer", infer_logp_RV)):
        best_R = logp_RV.argmax(axis=-1)
        hit_R = np.where(rows.usable_R, best_R == tokens_R, np.nan)
        conf_R = np.where(rows.usable_R, np.exp(logp_RV[at_R, best_R]), np.nan)
        columns |= {f"{_JOINT}conf_{side}": conf_R, f"{_JOINT}hit_{side}": hit_R}
    return columns


def _lockstep(a: Pieces, b: Pieces) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Pieces of equally many rows from two streams that are cut at other places."""
    left: list[NDArray[Any] | None] = [None, None]
    streams = (a, b)
    while True:
        for i, stream in enumerate(streams):
            while left[i] is None or not len(left[i]):  # type: ignore[arg-type]
                left[i] = next(stream, None)
                if left[i] is None:
                    break
        x, y = left
        if x is None and y is None:
            return
        if x is None or y is None:
            raise MeasurementError("the two kernels returned logits for unequal numbers of rows")
        n = min(len(x), len(y))
        yield x[:n], y[:n]
        left = [x[n:], y[n:]]


def _pair(trace: Trace) -> TracePair:
    columns = dict(trace.columns)
    logp_train = columns.pop("logp_train")
    own = {n: c for n, c in columns.items() if not n.startswith(_JOINT)}

    def side(side_columns: dict[str, NDArray[Any]]) -> Trace:
        return Trace(
            trace.sequence_S,
            trace.length_S,
            trace.lost_S,
            trace.prompt_tokens_S,
            trace.token_N,
            side_columns,
            trace.about,
        )

    return TracePair(infer=side(own), train=side({"logp": logp_train}))


def exact_columns(trace: Trace) -> dict[str, NDArray[Any]]:
    """The joint columns, by metric."""
    names = [n for n in trace.columns if n.startswith(_JOINT)]
    return {n.removeprefix(_JOINT): trace.columns[n] for n in names}
