# llama.cpp's comparison of a kernel with a base file: its statistics, and total variation too.
#
# Axes: C texts, T tokens of a text, R scored positions of a text, V vocabulary, N all positions.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from servanda.engines.base import Engine
from servanda.engines.kld_file import KldFile, scored_positions, write_kld
from servanda.errors import MeasurementError
from servanda.theory.sampling import log_softmax
from servanda.traces.trace import Batch

_LEAST = -16.0  # nats: llama.cpp sums over tokens that the base gives more than this
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True)
class KldReport:
    """The distance of a kernel from a base file.

    Args:
        positions: N; texts: C.
        kld_nats: mean KL(base || kernel), summed as llama.cpp does; kld_error_nats: its standard
            error, of positions taken as independent; kld_quantiles: by probability; kld_max.
        tv: mean total variation, of the rows as they were stored.
        same_top: share of positions with the same most likely token.
        log_ppl_ratio_nats: mean of base logprob minus kernel logprob, of the next token.
    """

    positions: int
    texts: int
    kld_nats: float
    kld_error_nats: float
    kld_quantiles: dict[float, float]
    kld_max: float
    tv: float
    same_top: float
    log_ppl_ratio_nats: float


def compared_kld(base: KldFile, engine: Engine, *, bos: int | None, batch_size: int) -> KldReport:
    """Score the texts of a base file with a kernel.

    Args:
        bos: the token that llama.cpp feeds in the place of each text's first one; None: it feeds
            the text as it is, which it does for models without add_bos_token.

    Raises:
        MeasurementError: another vocabulary, no full logits, or texts that are too long.
    """
    vocabulary = engine.describe().vocab_size
    if vocabulary != base.vocabulary:
        raise MeasurementError(
            f"{base.path} has a vocabulary of {base.vocabulary}, and the kernel has {vocabulary}",
            hint="compare kernels of one model",
        )
    parts = []
    scored = zip(base.rows(), _rows(engine, base.token_CT, bos, batch_size), strict=True)
    for text, (base_RV, logits_RV) in enumerate(scored):
        next_R = base.token_CT[text, -base.scored :]
        parts.append(_distances(base_RV, log_softmax(logits_RV), next_R))
    kld_N, tv_N, same_N, ratio_N = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    error = float(kld_N.std(ddof=1) / np.sqrt(len(kld_N))) if len(kld_N) > 1 else float("nan")
    return KldReport(
        positions=len(kld_N),
        texts=len(base.token_CT),
        kld_nats=float(kld_N.mean()),
        kld_error_nats=error,
        kld_quantiles={q: float(np.quantile(kld_N, q)) for q in QUANTILES},
        kld_max=float(kld_N.max()),
        tv=float(tv_N.mean()),
        same_top=float(same_N.mean()),
        log_ppl_ratio_nats=float(ratio_N.mean()),
    )


def written_kld(
    path: Path,
    engine: Engine,
    texts: Sequence[Sequence[int]],
    *,
    width: int,
    bos: int | None,
    batch_size: int,
) -> int:
    """Write a base file of a kernel; returns the number of texts.

    Args:
        texts: token ids, which are joined and cut into texts of `width` tokens.

    Raises:
        MeasurementError: fewer tokens than one text has.
    """
    token_N = np.array([token for text in texts for token in text], dtype=np.int32)
    count = len(token_N) // width
    if width < 4 or not count:
        raise MeasurementError(
            f"the texts have {len(token_N)} tokens, and a base file needs {max(width, 4)} or more",
            hint="give longer texts, or a smaller --context",
        )
    token_CT = token_N[: count * width].reshape(count, width)
    write_kld(path, token_CT, _rows(engine, token_CT, bos, batch_size))
    return count


def _rows(
    engine: Engine, token_CT: NDArray[np.int32], bos: int | None, batch_size: int
) -> Iterator[NDArray[np.float32]]:
    """Logits [R, V] of each text."""
    if not engine.describe().full_logits:
        raise MeasurementError(
            "this kernel gives no full logits, of which a base file has all",
            hint="run its model in the engine llamacpp, transformers, onnxruntime or vllm",
        )
    width = token_CT.shape[1]
    scored = scored_positions(width)
    for start in range(0, len(token_CT), batch_size):
        texts = [list(map(int, text)) for text in token_CT[start : start + batch_size]]
        if bos is not None:
            texts = [[bos, *text[1:]] for text in texts]
        batch = Batch(
            sequence_S=tuple(range(start, start + len(texts))),
            prompts=tuple(tuple(text[:-scored]) for text in texts),
            width=scored,
            continuations=tuple(tuple(text[-scored:]) for text in texts),
        )
        yield from _cut(engine.logits(batch, "prefill"), scored)


def _cut(pieces: Iterable[NDArray[np.float32]], size: int) -> Iterator[NDArray[np.float32]]:
    """Pieces of rows as pieces of one size."""
    left: NDArray[np.float32] | None = None
    for piece in pieces:
        left = piece if left is None or not len(left) else np.concatenate([left, piece])
        while len(left) >= size:
            yield left[:size]
            left = left[size:]


def _distances(
    base_RV: NDArray[np.float64], logp_RV: NDArray[np.float64], next_R: NDArray[np.int32]
) -> tuple[NDArray[np.float64], ...]:
    """KL(base || kernel), total variation, same top token, and log ratio, [R] each."""
    p_RV = np.exp(base_RV)
    kept_RV = np.where(base_RV > _LEAST, p_RV, 0.0)
    kld_R = (kept_RV * (base_RV - logp_RV)).sum(axis=-1)
    tv_R = 0.5 * np.abs(p_RV - np.exp(logp_RV)).sum(axis=-1)
    same_R = base_RV.argmax(axis=-1) == logp_RV.argmax(axis=-1)
    row_R = np.arange(len(next_R))
    return kld_R, tv_R, same_R, base_RV[row_R, next_R] - logp_RV[row_R, next_R]
