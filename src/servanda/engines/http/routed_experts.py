# Routed experts in replies of servers: how each encodes them, and as columns of a trace.
#
# A server records one row for each token that it was fed, in order: P of a prompt and n of an
# answer are P + n - 1 rows, for the last token was fed to nothing.  The row that predicted token i
# of the answer is row P - 1 + i.  Layers without a router have zeros.
# Axes: R rows, N tokens of all answers, W = L x K numbers of a row, L layers, K experts of a token.

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.engines.http.responses import Part
from servanda.errors import MeasurementError
from servanda.traces.expert_columns import route_column

Array = NDArray[Any]

_KINDS = ("int32", "int16", "uint16", "uint8")
_LEAST = 1e-9  # most probability that a wrong number of experts a token looks right
_HINT = "look at the version of the server, and at its option to return routed experts"
_ODD = f"the dialect reads another encoding; {_HINT}"


def as_npy(part: Part) -> Array:
    """Base64 of the bytes of numpy.save, [R, L, K]: what vLLM returns.

    Raises:
        MeasurementError: the bytes are no such array.
    """
    try:
        route = np.load(io.BytesIO(_bytes(part)), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise part.refuse(f"{part.place} is no array of NumPy ({error})", _ODD) from None
    if route.ndim != 3 or route.dtype.kind not in "iu" or not all(route.shape[1:]):
        found = f"of {route.dtype} and shape {list(route.shape)}"
        raise part.refuse(f"{part.place} is {found}, not of whole numbers, [R, L, K]", _ODD)
    return route.astype(np.int64)


def as_numbers(part: Part, kind: Part | None, rows: int, experts: int = 1) -> Array:
    """Base64 of numbers one after another, [R, L, K]: what SGLang returns.

    Args:
        kind: the type that the reply names; None: int32.
        rows: R; a server that was fed the last token, too, has one more, which is left out.
        experts: K.

    Raises:
        MeasurementError: they are of another type, or no whole number of rows.
    """
    name = "int32" if kind is None else kind.text()
    if name not in _KINDS:
        raise part.refuse(f"{part.place} is said to be of {name!r}", _ODD)
    data = _bytes(part)
    if len(data) % np.dtype(name).itemsize:
        raise part.refuse(f"{part.place} has {len(data)} bytes, which are no {name}", _ODD)
    flat = np.frombuffer(data, np.dtype(name).newbyteorder("<")).astype(np.int64)
    for count in (rows, rows + 1):
        if rows > 0 and len(flat) and len(flat) % (count * experts) == 0:
            return flat.reshape(count, -1, experts)[:rows]
    raise part.refuse(
        f"{part.place} has {len(flat)} numbers for the {rows} tokens that were fed", _HINT
    )


def answered(route: Array, part: Part, prompt: int, tokens: int, fed: int) -> Array:
    """The rows that predicted the tokens of an answer, [tokens, ...].

    Args:
        route: one row for each of the `fed` tokens.
        prompt: tokens before the answer.
    """
    if len(route) != fed:
        raise part.refuse(
            f"{part.place} has {len(route)} rows for the {fed} tokens that were fed: rows of the "
            "prompt are left out, or those of other tokens added",
            _HINT,
        )
    return route[prompt - 1 : prompt - 1 + tokens]


def columns(routes: Sequence[Array | None], lengths: Sequence[int]) -> dict[str, Array]:
    """The routes of some answers as columns of a trace, [N] each; NaN where there are none.

    Raises:
        MeasurementError: the answers are of models of other sizes.
    """
    known = [route for route in routes if route is not None and len(route)]
    if not known:
        return {}
    shapes = {route.shape[1:] for route in known}
    if len(shapes) > 1:
        sizes = " and ".join(sorted(str(list(shape)) for shape in shapes))
        raise MeasurementError(
            f"the server's routed experts are of sizes {sizes}, so of more than one model",
            hint="ask each model by its own name: served=",
        )
    route_NLK = np.concatenate(known)
    filled_L = (route_NLK != 0).any(axis=(0, 2)) | (route_NLK.shape[2] == 1)
    route_NLK = np.sort(route_NLK[:, filled_L], axis=-1).astype(np.float64)
    route_NLK[(route_NLK < 0).any(axis=(1, 2))] = np.nan
    whole = np.full((sum(lengths), *route_NLK.shape[1:]), np.nan)
    has_S = [route is not None and len(route) > 0 for route in routes]
    whole[np.repeat(has_S, lengths)] = route_NLK
    layers, experts = route_NLK.shape[1:]
    pairs = ((layer, k) for layer in range(layers) for k in range(experts))
    return {route_column(layer, k): whole[:, layer, k] for layer, k in pairs}


def experts_of_token(route_RW: Array) -> int | None:
    """K, of rows of a server that does not tell it; None if there are too few rows.

    A router picks no expert twice, so K is the largest number whose pieces of a row repeat none.
    Layers that are taken for one would have to pick no common expert in any row: the probability of
    that is that of independent picks among as many experts as were seen.
    """
    rows, width = route_RW.shape
    sizes = [k for k in range(width, 0, -1) if width % k == 0]
    experts = next(k for k in sizes if k == 1 or not _repeats(route_RW.reshape(rows, -1, k)))
    seen = int(route_RW.max(initial=0)) + 1
    pieces = int((route_RW.reshape(rows, -1, experts) != 0).any(axis=-1).sum())
    for layers in (n for n in range(2, experts + 1) if experts % n == 0):
        picked = experts // layers  # K, if a piece were that many layers
        free = [1 - min(at * picked / seen, 1 - 1e-12) for at in range(1, layers)]
        if pieces * picked * sum(map(math.log, free)) > math.log(_LEAST):
            return None
    return experts


def _repeats(route_NLK: Array) -> bool:
    """Whether a layer of a token has one expert twice; layers of zeros have no router."""
    sorted_NLK = np.sort(route_NLK, axis=-1)
    twice_NL = (sorted_NLK[..., 1:] == sorted_NLK[..., :-1]).any(axis=-1)
    return bool((twice_NL & (route_NLK != 0).any(axis=-1)).any())


def _bytes(part: Part) -> bytes:
    try:
        return base64.b64decode(part.text(), validate=True)
    except (binascii.Error, ValueError):
        raise part.refuse(f"{part.place} is no base64", _ODD) from None
