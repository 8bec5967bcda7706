# Base files of llama.cpp: tokens, and log probabilities of the whole vocabulary after each token of
# the second half of every text, in 16 bits.
#
# "_logits_", then int32: n_ctx, n_vocab, n_chunk, and the tokens [C, T].  Then for each of the
# R = T - 1 - T // 2 scored positions of each text: scale and least log probability in float32, and
# a uint16 for each token of the vocabulary, padded to an even number.  A log probability is scale x
# code + least; what lies 16 nats below the largest has code 0.  Little-endian.
# Source: tools/perplexity/perplexity.cpp of llama.cpp.
# Axes: C texts, T tokens of a text, R scored positions of a text, V vocabulary.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from servanda.engines.safe_file import whole_file
from servanda.errors import MeasurementError
from servanda.theory.sampling import log_softmax

MAGIC = b"_logits_"
_HEADER = len(MAGIC) + 3 * 4
_SPAN = 16.0  # nats below the largest logit that a row keeps
_CODES = 65535
_WHERE = (
    "write it with llama-perplexity --kl-divergence-base FILE, or servanda tools kld --save-base "
    "FILE"
)


@dataclass(frozen=True)
class KldFile:
    """A base file.

    Args:
        token_CT: the texts; the first token of each stands where llama.cpp feeds the token that
            begins a text, if the model has one.
        vocabulary: V.
    """

    path: Path
    token_CT: NDArray[np.int32]
    vocabulary: int

    @property
    def scored(self) -> int:
        """R: the positions of a text that have a row."""
        return scored_positions(self.token_CT.shape[1])

    def rows(self) -> Iterator[NDArray[np.float64]]:
        """Log probabilities [R, V] of each text, as they were rounded: a row may sum to less."""
        dtype, texts = _row_dtype(self.vocabulary), len(self.token_CT)
        start = _HEADER + self.token_CT.nbytes
        stored = np.memmap(self.path, dtype, "r", start, (texts, self.scored))
        for row_R in stored:
            codes_RV = row_R["codes"][:, : self.vocabulary].astype(np.float64)
            yield codes_RV * row_R["scale"][:, None] + row_R["least"][:, None]


def scored_positions(tokens: int) -> int:
    """How many positions of a text are scored: those of its second half that have a next token."""
    return tokens - 1 - tokens // 2


def read_kld(path: Path) -> KldFile:
    """A base file; its rows are read when they are asked for.

    Raises:
        MeasurementError: another kind of file, or one that is cut off.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise MeasurementError(f"{path} is no base file of llama.cpp", hint=_WHERE)
            sizes = file.read(12)
            head = np.frombuffer(sizes.ljust(12, b"\0"), dtype="<i4")
            if (head <= 0).any():
                raise MeasurementError(f"{path} ends, or is damaged, in its header", hint=_WHERE)
            width, vocabulary, texts = (int(n) for n in head)
            whole = _HEADER + 4 * texts * width
            whole += texts * scored_positions(width) * _row_dtype(vocabulary).itemsize
            if size != whole:
                raise MeasurementError(
                    f"{path} has {size:,} bytes, and {texts} texts of {width} tokens with a "
                    f"vocabulary of {vocabulary} take {whole:,}",
                    hint=f"it was cut off, or is of another version: {_WHERE}",
                )
            token_N = np.frombuffer(file.read(4 * texts * width), dtype="<i4")
    except OSError as error:
        raise MeasurementError(f"{path} cannot be read: {error.strerror}", hint=_WHERE) from None
    odd_N = token_N[(token_N < 0) | (token_N >= vocabulary)]
    if len(odd_N):
        raise MeasurementError(
            f"{path} has the token {odd_N[0]}, and a vocabulary of {vocabulary}", hint=_WHERE
        )
    return KldFile(path, token_N.reshape(texts, width), vocabulary)


def write_kld(
    path: Path, token_CT: NDArray[np.integer], rows: Iterable[NDArray[np.floating]]
) -> None:
    """Write a base file, which llama-perplexity reads; it is there once all of it is written.

    Args:
        rows: logits [R, V] of each text.

    Raises:
        MeasurementError: it cannot be written.
    """
    texts, width = token_CT.shape
    vocabulary = None
    with whole_file(path) as made, made.open("wb") as file:
        for logits_RV in rows:
            if vocabulary is None:
                vocabulary = logits_RV.shape[1]
                file.write(MAGIC + np.array([width, vocabulary, texts], dtype="<i4").tobytes())
                file.write(token_CT.astype("<i4").tobytes())
            file.write(_coded(logits_RV, vocabulary).tobytes())


def _coded(logits_RV: NDArray[np.floating], vocabulary: int) -> NDArray[np.void]:
    logits_RV = logits_RV.astype(np.float32)
    logp_RV = log_softmax(logits_RV)
    most_R = logits_RV.max(axis=-1).astype(np.float64)
    least_R = np.maximum(logits_RV.min(axis=-1), most_R - _SPAN)
    scale_R = ((most_R - least_R) / _CODES).astype(np.float32)
    coded_R = np.zeros(len(logits_RV), dtype=_row_dtype(vocabulary))
    coded_R["scale"] = scale_R
    coded_R["least"] = least_R + (logp_RV - logits_RV)[:, 0]
    above_RV = np.maximum(logits_RV - least_R[:, None], 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        code_RV = np.rint(above_RV / scale_R[:, None])
    code_RV[scale_R == 0] = 0  # all logits are equal
    coded_R["codes"][:, :vocabulary] = np.minimum(code_RV, _CODES)
    return coded_R


def _row_dtype(vocabulary: int) -> np.dtype[np.void]:
    even = vocabulary + vocabulary % 2
    return np.dtype([("scale", "<f4"), ("least", "<f4"), ("codes", "<u2", (even,))])
