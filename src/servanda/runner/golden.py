# The golden texts: fixed tokens that both kernels score with their full vocabulary.
#
# Logits of both sides arrive piece by piece, are reduced to the exact metrics of each
# position (the joint columns) while both are in memory, and are never stored.  Where infer gives
# only its top-k tokens, each position has a lower and an upper end of every metric that top k
# bounds, as joint columns NAME.low and NAME.high, and the mass that infer left out, as `tail`.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.model import BEST_ONLY, Path
from servanda.engines.base import Engine
from servanda.errors import ContractError, MeasurementError, Where
from servanda.judgement.admission import path_of
from servanda.judgement.evidence import GoldenRun
from servanda.judgement.plan import Plan
from servanda.judgement.schedule import NOISE_STRIDE
from servanda.runner.run_directory import RunDirectory
from servanda.theory.divergence.base import DIVERGENCES, LogitRows, exact
from servanda.theory.divergence.topk import interval
from servanda.theory.divergence.topk_rows import TopK, TopRows
from servanda.theory.sampling import log_softmax
from servanda.traces.corpus import Corpus
from servanda.traces.trace import Batch, Trace, TracePair

Pieces = Iterator[NDArray[np.floating]]
_JOINT = "joint."
TAIL = "tail"
_NEAR = 1024  # top-k tokens of the side with full logits; more only cost time
_SLACK = 1e-6  # the logprobs of infer were stored in float32


# a metric of an installed package is registered when a contract is read, so this is a function
def bounded_names() -> tuple[str, ...]:
    """The metrics that top-k tokens bound."""
    return tuple(name for name, metric in DIVERGENCES.items() if "topk" in metric.forms)


def measure_golden(
    plan: Plan,
    run: RunDirectory,
    engines: Mapping[str, Engine],
    ids: Sequence[tuple[int, ...]],
    watch: Callable[[int, int], None],
) -> GoldenRun:
    """Every golden text on both kernels, and 10 % of them twice on each kernel."""
    assert plan.golden is not None and plan.contract.golden is not None
    refuse_short(plan.golden, ids)
    kernels = plan.contract.kernels
    paths: dict[str, Path] = {"train": "prefill", "infer": plan.contract.golden.path}
    description = engines["infer"].describe()
    best = 0 if description.full_logits else description.top
    if best and kernels.infer.engine not in BEST_ONLY:
        raise MeasurementError(
            f"the infer engine {kernels.infer.engine!r} answers golden texts with their {best} "
            "likeliest tokens alone, and facts between two ends are judged of a pack and of "
            "openai_http",
            hint="leave out `golden:` and the numerical section, or judge them where the kernel "
            "runs: a recording of a server has no more than the server told",
        )
    if best:  # the side without full logits sampled, and train scores by its declared path
        paths["train"] = path_of(kernels.train, "train")
    sides = ("train",) if best else ("train", "infer")
    for side in sides:
        engine = engines[side]
        if not engine.describe().full_logits:
            raise MeasurementError(
                f"the {side} engine cannot give full logits, which `numerical` needs",
                hint="leave out `golden:` and the numerical section for this kernel",
            )
    order = by_length(ids)
    size = (kernels.train if best else kernels.infer).batch_size
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    # a single text has no other composition; of few texts the two most different are used
    again = order[::NOISE_STRIDE] if len(order) > NOISE_STRIDE else order[:: len(order) - 1 or 1]
    sides = sides if len(again) > 1 else ()
    measured = _bounded if best else both
    total = len(batches) + len(sides)

    traces = []
    for number, rows in enumerate(batches):
        watch(number, total)
        make = partial(measured, dict.fromkeys(paths, text_batch(rows, ids)), engines, paths)
        traces.append(run.cached(f"golden/{number:06d}", make))
    selves = []
    for number, side in enumerate(sides):
        watch(len(batches) + number, total)
        make = partial(against_itself, text_batch(again, ids), engines[side], paths[side])
        selves.append(run.cached(f"golden/self_{side}", make))
    watch(total, total)
    return _run(Trace.join(traces), selves)


def read_golden(run: RunDirectory) -> GoldenRun | None:
    """The golden texts of a finished run; no engine is needed.  None if it has none."""
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


def refuse_short(golden: Corpus, ids: Sequence[Sequence[int]]) -> None:
    for prompt, tokens in zip(golden.prompts, ids, strict=True):
        if len(tokens) < 2:
            raise ContractError(
                "a golden text needs at least two tokens: the first is only context",
                where=Where(golden.file, prompt.line, 1),
            )


def by_length(ids: Sequence[Sequence[int]]) -> list[int]:
    """Rows ordered so that texts of similar length share a batch; no result depends on it."""
    return sorted(range(len(ids)), key=lambda row: (len(ids[row]), row))


def text_batch(rows: Sequence[int], ids: Sequence[tuple[int, ...]]) -> Batch:
    """Golden texts as given tokens after their first one."""
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
    """Both kernels on the same tokens; each side's batch defines its batch size."""
    train, infer = (engines[side].logits(batches[side], paths[side]) for side in ("train", "infer"))
    return _joint(batches["infer"], train, infer)


def _bounded(
    batches: Mapping[str, Batch], engines: Mapping[str, Engine], paths: Mapping[str, Path]
) -> Trace:
    """Full logits of train against the top-k tokens of infer."""
    infer = engines["infer"]
    train = engines["train"].logits(batches["train"], paths["train"])
    likeliest = infer.top(batches["infer"], paths["infer"])
    # a server does not report the size of its vocabulary, which both sides share
    size = infer.describe().vocab_size or engines["train"].describe().vocab_size
    return bounded(train, likeliest, size)


def bounded(train: Iterable[NDArray[np.floating]], infer: Trace, vocabulary: int) -> Trace:
    """The trace of infer (see `Engine.top`) with an interval at each of its positions.

    Args:
        train: full logits [R, V] at the same positions, in pieces of rows.
        vocabulary: V of infer.

    Raises:
        MeasurementError: different numbers of rows or tokens.
    """
    assert infer.best is not None  # requires `Engine.top`
    best_ids_NK, best_logp_NK = infer.best
    parts: list[dict[str, NDArray[np.float64]]] = []
    at = 0
    for logits_RV in train:
        rows = slice(at, at + len(logits_RV))
        at = rows.stop
        if logits_RV.shape[1] != vocabulary or at > len(infer.token_N):
            raise MeasurementError(
                f"{at} rows of {logits_RV.shape[1]} logits for {len(infer.token_N)} golden tokens "
                f"of a vocabulary of {vocabulary}"
            )
        with np.errstate(invalid="ignore"):
            logp_RV = log_softmax(logits_RV)
        pair = TopRows(
            _near(logp_RV, vocabulary),
            TopK(best_ids_NK[rows], best_logp_NK[rows], vocabulary, slack=_SLACK),
        )
        columns = {_JOINT + TAIL: np.where(pair.usable_R, pair.infer.tail_R, np.nan)}
        for name in bounded_names():
            low, high = f"{_JOINT}{name}.low", f"{_JOINT}{name}.high"
            columns[low], columns[high] = interval(name, pair).T
        token_R = infer.token_N[rows]
        parts.append({"logp_train": logp_RV[np.arange(len(token_R)), token_R], **columns})
    own = {"logp": infer.columns["logp"], "p_max": np.exp(best_logp_NK[:, 0])}
    return replace(
        infer,
        prompt_tokens_S=infer.length_S + 1,  # the prompt of a golden text is the whole text
        columns=own | _concatenated(parts, at, len(infer.token_N)),
    )


def _near(logp_RV: NDArray[np.float64], vocabulary: int) -> TopK:
    """The top-k tokens of whole rows; a row with NaN has none."""
    most = min(_NEAR, vocabulary)
    ids_RK = np.argpartition(-logp_RV, most - 1, axis=-1)[:, :most]
    return TopK(ids_RK, np.take_along_axis(logp_RV, ids_RK, axis=-1), vocabulary)


def _concatenated(
    parts: Sequence[Mapping[str, NDArray[Any]]], rows: int, tokens: int
) -> dict[str, NDArray[Any]]:
    """The columns of all pieces, one row per token."""
    if rows != tokens:
        raise MeasurementError(f"{rows} rows of logits for {tokens} golden tokens")
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def against_itself(batch: Batch, engine: Engine, path: Path) -> Trace:
    """One side alone: the texts in two batches of their own widths, and all in one."""
    half = len(batch) // 2
    parts = [batch.take(rows) for rows in (range(half), range(half, len(batch))) if rows]
    apart = chain.from_iterable(
        engine.logits(replace(part, width=max(map(len, part.continuations))), path)
        for part in parts
    )
    # all of the first before the second: an engine handles one request at a time
    return _joint(batch, iter(list(apart)), engine.logits(batch, path))


def _joint(batch: Batch, train: Pieces, infer: Pieces) -> Trace:
    """The exact metrics of each position, reduced piece by piece."""
    token_N = np.array([t for tokens in batch.continuations for t in tokens], dtype=np.int64)
    parts: list[dict[str, NDArray[Any]]] = []
    at = 0
    for train_RV, infer_RV in _lockstep(train, infer):
        tokens_R = token_N[at : at + len(train_RV)]
        at += len(train_RV)
        parts.append(reduced(LogitRows(train_RV, infer_RV), tokens_R))
    return Trace(
        sequence_S=np.array(batch.sequence_S, dtype=np.int64),
        length_S=np.array([len(c) for c in batch.continuations], dtype=np.int64),
        lost_S=np.zeros(len(batch), dtype=bool),
        # the prompt of a golden text is the whole text
        prompt_tokens_S=np.array([len(c) + 1 for c in batch.continuations], dtype=np.int64),
        token_N=token_N,
        columns=_concatenated(parts, at, len(token_N)),
    )


def reduced(rows: LogitRows, tokens_R: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """The columns of golden texts that need both rows of logits, [R] each."""
    with np.errstate(invalid="ignore", divide="ignore"):
        logp_train_R, logp_infer_R = rows.logp(tokens_R)
        conf = {
            side: np.exp(rows.logp(best_R)[i])
            for i, (side, best_R) in enumerate(zip(("train", "infer"), rows.best_R, strict=True))
        }
        columns = {
            "logp": logp_infer_R,
            "logp_train": logp_train_R,
            "entropy_nats": rows.infer_entropy_R,
            "p_max": conf["infer"],
        }
    for name, metric in DIVERGENCES.items():
        if "logits" in metric.forms:
            columns[_JOINT + name] = exact(name, rows)
    # for calibration: top-1 confidence of each side, and whether it is the golden token
    for (side, conf_R), best_R in zip(conf.items(), rows.best_R, strict=True):
        for name, values_R in (("conf", conf_R), ("hit", best_R == tokens_R)):
            columns[f"{_JOINT}{name}_{side}"] = np.where(rows.usable_R, values_R, np.nan)
    return columns


def _lockstep(a: Pieces, b: Pieces) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Pieces of equal size from two streams with different cuts."""
    x = y = None
    with ThreadPoolExecutor(1) as pool:  # the kernels work at the same time
        while True:
            ahead = pool.submit(_piece, a, x)
            y = _piece(b, y)
            x = ahead.result()
            if x is None and y is None:
                return
            if x is None or y is None:
                message = "the two kernels returned logits for unequal numbers of rows"
                raise MeasurementError(message)
            n = min(len(x), len(y))
            yield x[:n], y[:n]
            x, y = x[n:], y[n:]


def _piece(pieces: Pieces, left: NDArray[Any] | None) -> NDArray[Any] | None:
    """What is left of a piece, or the next one with rows; None after the last."""
    while left is None or not len(left):
        left = next(pieces, None)
        if left is None:
            return None
    return left


def _pair(trace: Trace) -> TracePair:
    columns = dict(trace.columns)
    logp_train = columns.pop("logp_train")
    own = {n: c for n, c in columns.items() if not n.startswith(_JOINT)}
    return TracePair(
        infer=replace(trace, columns=own), train=replace(trace, columns={"logp": logp_train})
    )


def exact_columns(trace: Trace) -> dict[str, NDArray[Any]]:
    """The joint columns, by metric."""
    names = [n for n in trace.columns if n.startswith(_JOINT)]
    return {n.removeprefix(_JOINT): trace.columns[n] for n in names}
