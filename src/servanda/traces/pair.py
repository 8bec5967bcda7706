# Pairing: arrays of a trainer, a dump or a gateway -> a TracePair of the trained tokens.
#
# Axes: B sequences of T columns (padded), or N tokens of all sequences, concatenated.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servanda.errors import EvidenceError
from servanda.traces.rollouts import Rollouts
from servanda.traces.trace import Trace, TracePair

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

    The pair contains for each token its turn (a stretch of the mask), its position in the turn, and
    the number of earlier tokens, for slices.

    Args:
        logp_train, logp_infer: [B, T], nats; or [N] if `lengths` is given.  NaN if missing: it
            counts as missing, never as 0.
        mask: of the same shape; whether the trainer learns from the token.  Tokens before a
            sequence's first trained one are its prompt, tokens between stretches are a tool's.
        groups: the prompt group of each sequence, [B]; default: each a separate group.
        labels: name -> text of each sequence, [B], such as {"env": [...]}.
        tokens: token ids, of the same shape; default unknown (-1).
        lengths: tokens of each sequence, [B], including its prompt.
        per_token: name -> number of each token, of the same shape: "staleness", "entropy_nats".
        first: launch index of the first sequence.

    Raises:
        EvidenceError: shapes differ, or the lengths do not add up.

    Examples:
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
    size, mask_N = len(length_B), mask_A.astype(bool).ravel()
    for name, column in {"groups": groups, **(labels or {})}.items():
        if column is not None and len(column) != size:
            raise EvidenceError(f"{size} sequences have {len(column)} values of {name}")
    own = tuple(str(first + b) for b in range(size))
    train_N, infer_N = flat.pop("logp_train"), flat.pop("logp_infer")
    named = {name: tuple(values) for name, values in (labels or {}).items()}
    group_S = own if groups is None else tuple(groups)
    rollouts = Rollouts(0, length_B, token_N, mask_N, train_N, infer_N, group_S, own, named)
    return pair_of(rollouts, flat, first=first)


def pair_of(rollouts: Rollouts, per_token: Mapping[str, Array], *, first: int = 0) -> TracePair:
    """Two kernels on the trained tokens of a step; the same as `pair` of its columns.

    Args:
        per_token: name -> number of each token, [N], for slices; instead of those of the rollouts.
        first: launch index of the first sequence.
    """
    mask_N, size = rollouts.mask_N, len(rollouts)
    index_N = np.arange(len(mask_N)) - np.repeat(rollouts.start_S, rollouts.length_S)
    context = {"length": index_N, "turn": rollouts.turn_N, "turn_position": rollouts.turn_token_N}
    columns = {name: column[mask_N] for name, column in per_token.items()}
    columns |= {name: column[mask_N].astype(np.float64) for name, column in context.items()}
    shape = {
        "sequence_S": np.arange(first, first + size),
        "length_S": np.bincount(rollouts.sequence_N[mask_N], minlength=size),
        "lost_S": np.zeros(size, dtype=bool),
        "prompt_tokens_S": rollouts.prompt_tokens_S,
        "token_N": rollouts.token_N[mask_N].astype(np.int64),
    }
    infer = Trace(**shape, columns={"logp": rollouts.logp_infer_N[mask_N], **columns})
    train = Trace(**shape, columns={"logp": rollouts.logp_train_N[mask_N]})
    return TracePair(infer, train, rollouts.group_S, rollouts.labels)


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
