# Converts a trainer's padded or ragged arrays to one array per sequence.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from servanda.errors import EvidenceError
from servanda.traces.rollouts import UNROUTED, Array


def plain(value: Any) -> Array:
    """NumPy's view of an array, or of a tensor of torch, which need not be installed."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":  # numpy has none
            value = value.float()
        return value.numpy()
    return np.asarray(value)


def split(values: Any, name: str) -> list[Array]:
    """A column as one array per sequence."""
    sequences = _parts(values, name)
    if any(part.ndim != 1 for part in sequences):
        raise EvidenceError(f"{name} is neither [S, T] nor one list a sequence")
    return sequences


def _parts(values: Any, name: str) -> list[Array]:
    parts = values if isinstance(values, list | tuple) else plain(values)
    if not isinstance(parts, list | tuple) and parts.ndim == 0:
        raise EvidenceError(f"{name} is neither [S, T] nor one list a sequence")
    return [plain(part) for part in parts]


def cells(token_S: list[Array], lengths: Any, present: Any) -> list[Array]:
    """The cells of each sequence that contain a token."""
    for token_T in token_S:
        if len(token_T) and token_T.dtype.kind not in "iu":
            raise EvidenceError("token_ids are not integers")
    if lengths is not None and present is not None:
        raise EvidenceError("lengths and present say the same", hint="give one of them")
    if present is not None:
        cells_S = [flags(part) for part in split(present, "present")]
    elif lengths is not None:
        length_S = plain(lengths).reshape(-1).tolist()
        _same("lengths", length_S, len(token_S))
        for at, (token_T, length) in enumerate(zip(token_S, length_S, strict=True)):
            if not 0 <= length <= len(token_T):
                raise EvidenceError(f"lengths[{at}] is {length}, of {len(token_T)} tokens")
        cells_S = [np.arange(len(t)) < length for t, length in zip(token_S, length_S, strict=True)]
    else:
        cells_S = [np.ones(len(token_T), dtype=bool) for token_T in token_S]
    _same("present", cells_S, len(token_S))
    for token_T, cells_T in zip(token_S, cells_S, strict=True):
        if len(token_T) != len(cells_T):
            raise EvidenceError(f"present has {len(cells_T)} cells of {len(token_T)} tokens")
        if len(token_T) and token_T[cells_T].min(initial=0) < 0:
            raise EvidenceError("a token id is negative", hint="say which cells are `present`")
    return cells_S


def aligned(name: str, values: Any, token_S: list[Array]) -> list[Array]:
    """A column over all tokens of each sequence, filled with NaN or False."""
    sequences = _parts(values, name)
    _same(name, sequences, len(token_S))
    aligned = []
    for at, (part, token_T) in enumerate(zip(sequences, token_S, strict=True)):
        if part.ndim == 0 and name.startswith("token."):
            aligned.append(np.full(len(token_T), float(part)))
            continue
        if part.ndim != 1 or len(part) > len(token_T):
            raise EvidenceError(
                f"{name} of sequence {at} has shape {list(part.shape)}, and the sequence "
                f"{len(token_T)} tokens"
            )
        absent = 0.0 if name == "mask" else np.nan
        # float32 stays as it is, in half of the space
        whole = np.full(len(token_T), absent, np.float32 if part.dtype == np.float32 else None)
        try:
            whole[len(token_T) - len(part) :] = part
        except (TypeError, ValueError):
            raise EvidenceError(f"{name} of sequence {at} holds what is no number") from None
        aligned.append(whole)
    return aligned


def aligned_routes(
    name: str, values: Any, token_S: list[Array], cells_S: list[Array]
) -> list[Array]:
    """Experts of the tokens of each sequence, [T, L, K] each, int16, filled with UNROUTED.

    Of rows that are fewer than the tokens, the first token of a sequence has none: behind padding,
    the row before it is of the padding.
    """
    parts = _parts(values, name)
    _same(name, parts, len(token_S))
    shapes = {part.shape[1:] for part in parts}
    whole = []
    of_each = zip(parts, token_S, cells_S, strict=True)
    for at, (part, token_T, cells_T) in enumerate(of_each):
        if part.ndim != 3 or part.dtype.kind not in "iu" or not all(part.shape[1:]):
            raise EvidenceError(
                f"{name} of sequence {at} has shape {list(part.shape)} and type {part.dtype}",
                hint="whole numbers, [tokens, layers, experts]",
            )
        if len(part) > len(token_T):
            raise EvidenceError(
                f"{name} of sequence {at} has {len(part)} rows, and the sequence {len(token_T)} "
                "tokens"
            )
        if len(shapes) > 1:
            raise EvidenceError(f"{name} has sequences of {len(shapes)} shapes: of one model?")
        low, high = int(part.min(initial=0)), int(part.max(initial=0))
        if low < UNROUTED or high > np.iinfo(np.int16).max:
            odd = low if low < UNROUTED else high
            raise EvidenceError(f"{name} of sequence {at} names expert {odd}")
        filled = np.full((len(token_T), *part.shape[1:]), UNROUTED, np.int16)
        filled[len(token_T) - len(part) :] = part
        own = filled[cells_T]
        if len(part) < len(token_T):
            own[:1] = UNROUTED
        whole.append(own)
    return whole


def _same(name: str, column: Sequence[Any], sequences: int) -> None:
    if len(column) != sequences:
        raise EvidenceError(f"{sequences} sequences, and {len(column)} of {name}")


def flags(values: Array) -> Array:
    if not np.isin(values, (0, 1)).all():
        raise EvidenceError("a mask is neither 0 nor 1 everywhere")
    return values.astype(bool)


def texts(name: str, values: Any, sequences: int) -> list[str]:
    """A text for each sequence; tensors are converted from their numbers."""
    if values is None:
        return [""] * sequences
    values = plain(values).tolist() if hasattr(values, "detach") else values
    texts = [str(value.item() if hasattr(value, "detach") else value) for value in values]
    _same(name, texts, sequences)
    return texts
