# The precision ladder of a run: the reference model in standard formats, on the same fixed texts.
#
# Every rung is the train kernel with other keys, as a server of that format runs: activations and
# head in bfloat16.  The candidate is measured on the same texts, so that one axis holds them all.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np

from servanda.contract.model import Contract, Kernel
from servanda.engines.base import Engine
from servanda.errors import MeasurementError
from servanda.judgement.breakdown import Rung
from servanda.judgement.plan import Plan
from servanda.runner.golden import both, by_length, exact_columns, text_batch
from servanda.runner.measurement import Open, Progress, Watch
from servanda.runner.probe import encoded
from servanda.traces.trace import Trace

TEXTS = 32  # texts that are used at most
_COARSE: dict[str, Any] = {"dtype": "bfloat16"}
# what no rung has of train
_PLAIN = dict.fromkeys(("quantization", "kv_cache", "head_dtype", "routes", "fault"))
RUNGS: Mapping[str, dict[str, Any]] = {
    "bfloat16": _COARSE,
    "bfloat16, head in float32": {**_COARSE, "head_dtype": "float32"},
    **{
        name: {**_COARSE, "quantization": name}
        for name in ("int8_weight_only", "w8a8", "fp8_channel", "mxfp8", "int4_g32", "nvfp4")
    },
    "bfloat16, fp8_e4m3 cache": {**_COARSE, "kv_cache": "fp8_e4m3"},
}


def refuse_ladder(contract: Contract) -> None:
    """Refuse a contract that has no ladder, before anything is measured.

    Raises:
        MeasurementError: train is not of engine `transformers`, which emulates the formats.
    """
    train = contract.kernels.train
    if train.engine != "transformers":
        raise MeasurementError(
            f"the precision ladder emulates formats in the engine transformers, and train runs in "
            f"{train.engine}",
            hint="leave out --ladder, or let train be the transformers kernel of the same weights",
        )


def measured_ladder(plan: Plan, open_: Open, watch: Watch) -> tuple[Rung, ...]:
    """Every rung that the reference model has, and the candidate.

    Raises:
        MeasurementError: there are no texts.
    """
    train = plan.contract.kernels.train
    with closing(open_(train, "train")) as reference:
        texts = _texts(plan, reference)
        infer = plan.contract.kernels.infer
        rungs = [_rung(str(infer), infer, open_, reference, texts, candidate=True)]
        for number, (name, keys) in enumerate(RUNGS.items()):
            watch(Progress("precision ladder", number, len(RUNGS)))
            kernel = train.model_copy(update={**_PLAIN, "title": "", **keys})
            rungs.append(_rung(name, kernel, open_, reference, texts))
        watch(Progress("precision ladder", len(RUNGS), len(RUNGS)))
    return tuple(rungs)


def _texts(plan: Plan, reference: Engine) -> list[tuple[int, ...]]:
    """Token ids of the golden texts, otherwise of the prompts of the first workload."""
    corpus = plan.golden or next(iter(plan.corpora.values()), None)
    ids = [text for text in encoded(corpus, reference) if len(text) > 1] if corpus else []
    if not ids:
        raise MeasurementError(
            "the precision ladder needs texts of two tokens or more",
            hint="write golden: {prompts: data/golden.jsonl} into the contract",
        )
    return ids[:TEXTS]


def _rung(
    name: str,
    kernel: Kernel,
    open_: Open,
    reference: Engine,
    texts: list[tuple[int, ...]],
    *,
    candidate: bool = False,
) -> Rung:
    """The distance of a kernel; a format that cannot hold this model says so."""
    try:
        with closing(open_(kernel, "infer")) as engine:
            if not engine.describe().full_logits:
                raise MeasurementError(f"engine {kernel.engine!r} gives no full logits")
            columns = exact_columns(Trace.join([*_pieces(kernel, reference, engine, texts)]))
    except MeasurementError as error:
        reason = error.problems[0].message.removeprefix("infer: ")
        return Rung(name, candidate=candidate, missing=reason)
    tv_N = columns["tv"]
    flips = float(np.nanmean(columns["top1_flip"]))
    return Rung(name, float(np.nanmean(tv_N)), flips, int(np.isfinite(tv_N).sum()), candidate)


def _pieces(
    kernel: Kernel, reference: Engine, engine: Engine, texts: list[tuple[int, ...]]
) -> Iterator[Trace]:
    order = by_length(texts)
    for start in range(0, len(order), kernel.batch_size):
        batch = text_batch(order[start : start + kernel.batch_size], texts)
        pair = {"train": reference, "infer": engine}
        yield both(dict.fromkeys(pair, batch), pair, dict.fromkeys(pair, "prefill"))
