# Pairing: arrays of a trainer, a dump or a gateway -> a TracePair of the tokens that are trained.
#
# Axes: B sequences of T columns (padded), or N tokens of all sequences one after another;
# K trained tokens of all sequences, which are what the pair holds.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servanda.errors import EvidenceError
from servanda.trace import Trace, TracePair, align

Array = NDArray[Any]


def pair(
    logp_train: ArrayLike,
    logp_infer: ArrayLike,
    mask: ArrayLike,
    *,
    groups: Sequence[str] | None = None,
    labels: Mapping[str, Sequence[str]] | None = None,
    tokens: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    per_token: Mapping[str, ArrayLike] | None = None,
    first: int = 0,
) -> TracePair:
    """Two kernels on the tokens that a trainer learns from.

    The pair knows of each token which turn it is in (a stretch of the mask), how far into it,
    and how many tokens came before: slices are cut by them.

    Args:
        logp_train, logp_infer: [B, T], nats; or [N] where `lengths` is given.  NaN where there
            is none: it counts as missing, and never as 0.
        mask: of the same shape; whether the trainer learns from the token.  What comes before
            a sequence's first is its prompt, what lies between stretches is a tool's.
        groups: the prompt group of each sequence, [B]; default each its own.
        labels: name -> text of each sequence, [B], such as {"env": [...]}.
        tokens: token ids, of the same shape; default unknown (-1).
        lengths: tokens of each sequence, [B], its prompt included.
        per_token: name -> number of each token, of the same shape: "staleness", "entropy_nats".
        first: launch index of the first sequence.

    Raises:
        EvidenceError: shapes differ, or the lengths do not add up.

    >>> pair([[0.0, -1.0, -0.5]], [[0.0, -1.1, -0.5]], [[0, 1, 1]]).infer.length_S.tolist()
    [2]
    """
    mask_A = np.asarray(mask)
    length_B = _lengths(mask_A, lengths)
    flat = {
        "logp_train": _flat("logp_train", logp_train, mask_A),
        "logp_infer": _flat("logp_infer", logp_infer, mask_A),
        **{name: _flat(name, values, mask_A) for name, values in (per_token or {}).items()},
    }
    token_N = np.full(mask_A.size, -1) if tokens is None else _flat("tokens", tokens, mask_A)
    mask_N, size = mask_A.astype(bool).ravel(), len(length_B)
    for name, column in {"groups": groups, **(labels or {})}.items():
        if column is not None and len(column) != size:
            raise EvidenceError(f"{size} sequences have {len(column)} values of {name}")
    sequence_N = np.repeat(np.arange(size), length_B)
    trained_B = np.bincount(sequence_N[mask_N], minlength=size)
    index_N = np.arange(len(mask_N)) - np.repeat(np.cumsum(length_B) - length_B, length_B)
    prompt_B = np.full(size, np.iinfo(np.int64).max)
    np.minimum.at(prompt_B, sequence_N[mask_N], index_N[mask_N])
    columns = {n: v[mask_N] for n, v in flat.items() if not n.startswith("logp_")}
    columns |= _context(mask_N, index_N, sequence_N)

    def trace(side: str) -> Trace:
        return Trace(
            sequence_S=np.arange(first, first + size),
            length_S=trained_B,
            lost_S=np.zeros(size, dtype=bool),
            prompt_tokens_S=np.where(trained_B > 0, prompt_B, length_B),
            token_N=token_N[mask_N].astype(np.int64),
            columns={"logp": flat[f"logp_{side}"][mask_N], **(columns if side == "infer" else {})},
        )

    aligned = align(trace("train"), trace("infer"))
    own = tuple(str(first + b) for b in range(size))
    return TracePair(
        aligned.infer,
        aligned.train,
        own if groups is None else tuple(groups),
        {name: tuple(values) for name, values in (labels or {}).items()},
    )


def _context(mask_N: Array, index_N: Array, sequence_N: Array) -> dict[str, Array]:
    """What is known before each trained token is drawn: length, turn, turn_position, [K] each."""
    before_N = np.r_[False, mask_N][:-1] & (index_N > 0)
    begins_N = mask_N & ~before_N
    turns_N = np.cumsum(begins_N)  # of all sequences so far
    earlier_B = np.r_[0, np.bincount(sequence_N[begins_N], minlength=1).cumsum()]
    turn_K = turns_N[mask_N] - earlier_B[sequence_N[mask_N]]
    began_N = np.flatnonzero(begins_N)
    turn_position_K = np.flatnonzero(mask_N) - began_N[turns_N[mask_N] - 1]
    found = {"length": index_N[mask_N], "turn": turn_K, "turn_position": turn_position_K}
    return {name: column.astype(np.float64) for name, column in found.items()}


def _lengths(mask_A: Array, lengths: ArrayLike | None) -> Array:
    if lengths is None:
        if mask_A.ndim != 2:
            raise EvidenceError(
                f"a mask of shape {mask_A.shape} does not say where sequences end",
                hint="give [sequences, tokens], or lengths=",
            )
        return np.full(mask_A.shape[0], mask_A.shape[1])
    length_B = np.asarray(lengths, dtype=np.int64)
    if mask_A.ndim != 1 or int(length_B.sum()) != mask_A.size:
        raise EvidenceError(
            f"the lengths add up to {int(length_B.sum())} tokens, and the mask has shape "
            f"{mask_A.shape}"
        )
    return length_B


def _flat(name: str, values: ArrayLike, mask_A: Array) -> Array:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != mask_A.shape:
        raise EvidenceError(f"{name} has shape {array.shape}, and the mask {mask_A.shape}")
    return array.ravel()
