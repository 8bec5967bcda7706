# A trainer's arrays as NumPy's, with their shapes checked.
#
# Axes: B sequences of this rank, T columns.  Arrays are NumPy's, torch's, or lists of lists; torch
# is never imported.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.errors import EvidenceError

Array = NDArray[Any]

_OF_TORCH = ("bfloat16", "float16")  # formats converted to float32, which represents them exactly


def array(name: str, values: object) -> Array:
    """Any array-like as a NumPy array; torch tensors are copied to the host.

    Raises:
        EvidenceError: not a rectangular array of numbers.
    """
    if hasattr(values, "detach"):
        tensor: Any = values
        tensor = tensor.detach()
        if any(kind in str(tensor.dtype) for kind in _OF_TORCH):
            tensor = tensor.float()
        return tensor.cpu().numpy()
    try:
        numbers = np.asarray(values)
        if numbers.dtype == object:
            numbers = numbers.astype(np.float64)  # None, which JSON has for NaN, is NaN
    except (TypeError, ValueError):
        numbers = np.zeros((), dtype=object)
    if numbers.dtype.kind not in "biuf":
        raise EvidenceError(
            f"{name} is not a rectangular array of numbers",
            hint="pad rows to one length, and leave the padding out of the mask",
        )
    return numbers


def numbers_of(name: str, values: object, shapes: Sequence[tuple[int, ...]]) -> Array:
    if values is None:
        raise EvidenceError(f"{name} is missing", hint="use NaN for a token without one")
    numbers = array(name, values)
    if numbers.shape not in shapes:
        fitting = " or ".join(map(str, dict.fromkeys(shapes)))
        turned = ": is one of them transposed?" if numbers.shape == shapes[-1][::-1] else ""
        raise EvidenceError(
            f"{name} has shape {numbers.shape}, and the mask {shapes[-1]}",
            hint=f"{name} of the tokens of the mask, {fitting}{turned}",
        )
    exact = numbers.dtype in (np.float32, np.float64)
    small = numbers.dtype.kind == "f" and numbers.dtype.itemsize < 4
    return numbers if exact else numbers.astype(np.float32 if small else np.float64)


def beside_of(name: str, values: object, size: int, width: int) -> Array | None:
    """Numbers per sequence or per token, [B, 1] or [B, T]; None if missing."""
    if values is None:
        return None
    numbers = numbers_of(name, values, [(size,), (size, 1), (size, width)])
    return numbers.reshape(size, 1) if numbers.ndim == 1 else numbers


def staleness_of(
    staleness: object, versions: object, step: int, size: int, width: int
) -> Array | None:
    """Updates between sampling and training, given or from the versions that sampled."""
    stale_BT = beside_of("staleness", staleness, size, width)
    version_BT = beside_of("versions", versions, size, width)
    if version_BT is not None:
        own_BT = step - version_BT.astype(np.float64)
        if stale_BT is not None and (np.abs(stale_BT - own_BT) > 0).any():
            raise EvidenceError(
                f"staleness and versions disagree at step {step}",
                hint="staleness = weights - versions; pass one of them",
            )
        stale_BT = own_BT
    if stale_BT is not None and (stale_BT < 0).any():
        raise EvidenceError(
            f"a token is {stale_BT[stale_BT < 0].flat[0]:g} updates old",
            hint="staleness = updates of the trainer minus updates of the weights that sampled",
        )
    return stale_BT


def columns_of_loss(
    size: int,
    width: int,
    weights: object,
    mask: object,
    versions: object,
    older: Mapping[int, object] | None,
) -> dict[str, Any]:
    """What the loss used, the versions, and earlier ones' logprobs, as fields of a batch.

    Raises:
        EvidenceError: a shape differs, or a key of `older` is no number of updates.
    """
    for back in older or {}:
        if isinstance(back, bool) or not isinstance(back, int) or back < 1:
            raise EvidenceError(
                f"older has the key {back!r}",
                hint="updates before the trainer's current weights: {1: logprobs, ...}",
            )
    shapes = [(size, width)]
    mask_BT = None if mask is None else numbers_of("loss_mask", mask, shapes)
    return {
        "loss_weight_BT": beside_of("loss_weights", weights, size, width),
        "loss_mask_BT": mask_BT,
        "version_BT": beside_of("versions", versions, size, width),
        "older": {n: numbers_of(f"older[{n}]", logp, shapes) for n, logp in (older or {}).items()},
    }


def texts_of(name: str, values: Sequence[object], size: int) -> tuple[str, ...]:
    if hasattr(values, "tolist"):
        values = array(name, values).tolist() if hasattr(values, "detach") else values.tolist()  # type: ignore[attr-defined]
    hint = f"one value of {name} for each sequence, in their order"
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise EvidenceError(f"{name} is a {type(values).__name__}", hint=hint)
    texts = [*values]
    for value in texts:
        if isinstance(value, list | tuple | dict):
            raise EvidenceError(f"a value of {name} is a {type(value).__name__}", hint=hint)
    if len(texts) != size:
        raise EvidenceError(f"{size} sequences have {len(texts)} values of {name}", hint=hint)
    return tuple("" if value is None else str(value) for value in texts)


def ids_of(values: object, size: int, width: int) -> Array:
    ids = array("tokens", values)
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise EvidenceError(
            f"tokens are {ids.dtype} of shape {ids.shape}", hint="ids, [sequences, tokens]"
        )
    if len(ids) != size or ids.shape[1] < width:
        raise EvidenceError(f"tokens have shape {ids.shape}, and the mask {(size, width)}")
    return ids
