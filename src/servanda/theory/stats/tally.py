# The tally of some tokens: histograms of their log ratios per atom.
#
# Contains all data for their certificates, at the cost of a subtraction and a count per
# token.  An atom is one combination of slices, so that every slice is a sum of atoms.  Tallies of
# parts of a step, or of ranks, are added with +.
#
# Axes: B sequences, T tokens, A atoms, N tokens of a block.

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servanda.errors import EvidenceError
from servanda.theory.stats.histogram import BINS, LARGEST, SIGNIFICAND_BITS, SMALLEST, ZERO, bin_of

Array = NDArray[Any]

# intermediate arrays of a block fit in a core's cache; counts span all bins, so blocks have many
# tokens
_BLOCK_BYTES = 1 << 18
_COUNT = 1 << 19


def tally(
    logp_train_BT: ArrayLike,
    logp_infer_BT: ArrayLike,
    mask_BT: ArrayLike,
    atom_BT: ArrayLike | None = None,
    atoms: int = 1,
) -> NDArray[np.int64]:
    """Count the trained tokens of each atom by the bin of their log ratio.

    float32 logprobs are subtracted in float32, which `stats.histogram.edges` takes into account;
    all others in float64.  Tokens outside the mask are not read and may have any value.

    Args:
        logp_train_BT, logp_infer_BT: [B, T], nats; float32 and float64 are not copied.
        mask_BT: of the same shape; whether the trainer learns from the token.
        atom_BT: of the same shape, 0..atoms - 1; default all in one.

    Returns:
        [atoms, BINS + 1].  The last column counts tokens without a usable ratio: a NaN or
        +inf on either side, or -inf on infer.  -inf on train alone is evidence, in bin 0.

    Raises:
        EvidenceError: shapes differ, or a trained token has an invalid atom.

    >>> count = tally([[-1.0, -2.0, 0.0]], [[-1.0, float("nan"), 0.0]], [[1, 1, 0]])
    >>> int(count.sum()), int(count[0, BINS])
    (2, 1)
    """
    train, infer = _floats(logp_train_BT), _floats(logp_infer_BT)
    given = {"logp_infer": infer, "mask": np.asarray(mask_BT)}
    if atom_BT is not None:
        given["atom"] = np.asarray(atom_BT)
    for name, array in given.items():
        if array.shape != train.shape:
            raise EvidenceError(f"{name} has shape {array.shape}, and logp_train {train.shape}")
    train_N, infer_N = train.reshape(-1), infer.reshape(-1)
    mask_N = given["mask"].reshape(-1)
    atom_N = given["atom"].reshape(-1) if atom_BT is not None else None
    wide = BINS + 1
    out = atoms * wide  # bin of tokens outside the mask
    count_W = np.zeros(out + 1, dtype=np.int64)
    place_N = np.empty(min(_COUNT, train_N.size), dtype=np.int64)
    step = _BLOCK_BYTES // train_N.itemsize
    for begin in range(0, train_N.size, _COUNT):
        end = min(begin + _COUNT, train_N.size)
        for first in range(begin, end, step):
            block = slice(first, min(first + step, end))
            left_out_N = ~mask_N[block].astype(bool, copy=False)
            at_N = place_N[first - begin : block.stop - begin]
            at_N[:] = _bins(train_N[block], infer_N[block], left_out_N)
            if atom_N is not None:
                at_N += _starts(atom_N[block], left_out_N, atoms)
            np.copyto(at_N, out, where=left_out_N)
        count_W += np.bincount(place_N[: end - begin], minlength=out + 1)
    return count_W[:out].reshape(atoms, wide)


def _floats(values: ArrayLike) -> Array:
    array = np.asarray(values)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)


def _bins(train_N: Array, infer_N: Array, left_out_N: Array) -> Array:
    """The bin of each token; arbitrary outside the mask."""
    with np.errstate(invalid="ignore", over="ignore"):
        bin_N = bin_of(train_N - infer_N)
    odd_N = (bin_N == 0) | (bin_N == BINS)
    odd_N &= ~left_out_N
    if odd_N.any():
        # -inf of train gives -inf, and a difference may exceed the range of float32
        train_N, infer_N = (of_N[odd_N].astype(np.float64) for of_N in (train_N, infer_N))
        usable_N = np.isfinite(infer_N) & (train_N < np.inf)
        with np.errstate(invalid="ignore", over="ignore"):
            bin_N[odd_N] = bin_of(np.where(usable_N, train_N - infer_N, np.nan))
    return bin_N


def _starts(atom_N: Array, left_out_N: Array, atoms: int) -> NDArray[np.int64]:
    """The offset of each token's atom in the counts; arbitrary outside the mask."""
    if atom_N.size and not (atom_N.min() >= 0 and atom_N.max() < atoms):
        wrong_N = atom_N[~((atom_N >= 0) & (atom_N < atoms)) & ~left_out_N]
        if wrong_N.size:
            raise EvidenceError(f"a token lies in atom {wrong_N[0]}, and there are {atoms} from 0")
        atom_N = np.where(left_out_N, 0, atom_N)
    return np.multiply(atom_N, BINS + 1, dtype=np.int64, casting="unsafe")


# Array operations that NumPy and torch spell differently, for arrays that stay where they are.
#
# torch itself is never imported: a tensor has all that is needed.


_MIXED = (-7046029254386353131, -4417276706812531889)  # odd


def is_tensor(values: object) -> bool:
    return hasattr(values, "detach")


def is_whole(values: Any) -> bool:
    """Whether the numbers are whole."""
    return not values.is_floating_point() if is_tensor(values) else values.dtype.kind == "i"


def moved(values: Any, like: Any) -> Any:
    """An array, on the device of `like`."""
    if is_tensor(values) or not is_tensor(like):
        return values
    empty = like.new_empty(0)
    kind = {"f": empty.double, "b": empty.bool}.get(values.dtype.kind, empty.long)
    return like.new_tensor(np.ascontiguousarray(values), dtype=kind().dtype)


def hosted(values: Any) -> Array:
    """As a NumPy array."""
    return values.cpu().numpy() if is_tensor(values) else values


def take(table: Array, at: Any) -> Any:
    """table[at], with indexes clipped to the table."""
    if not is_tensor(at):
        return table.take(at, mode="clip")
    return moved(table, at)[at.long().clamp(0, len(table) - 1)]


def running_count(mask_BT: Any) -> Any:
    """Trained tokens of the sequence up to and including each, [B, T], int32."""
    if not is_tensor(mask_BT):
        return np.cumsum(mask_BT, axis=1, dtype=np.int32)
    return mask_BT.int().cumsum(dim=1).int()


def running_most(values_BT: Any) -> Any:
    """The largest value up to and including each, [B, T]."""
    if not is_tensor(values_BT):
        return np.maximum.accumulate(values_BT, axis=1)
    return values_BT.cummax(dim=1).values


def count(code: Any, size: int) -> Array:
    """How often each code of 0..size - 1 occurs; [size] on the host."""
    if not is_tensor(code):
        return np.bincount(code.ravel(), minlength=size)
    return hosted(code.flatten().bincount(minlength=size))


def classes(values: Any, edges: Array) -> Any:
    """The class of each number: below the first edge 0, on it 1, up to the next 2, ..., NaN."""
    if not is_tensor(values):
        at = np.searchsorted(edges, values, "left") + np.searchsorted(edges, values, "right")
        if values.dtype.kind == "f":
            at = np.where(np.isnan(values), 2 * len(edges) + 1, at)
        return at.astype(np.int32)
    wide = values.double()
    at = wide.new_zeros(wide.shape).int()
    for edge in edges.tolist():  # few
        at += (wide > edge).int() + (wide >= edge).int()
    return at.masked_fill(wide.isnan(), 2 * len(edges) + 1)


def mixed(whole: Any) -> Any:
    """Whole numbers of a tensor, int64, mixed so that sums of different ones differ."""
    once = whole * _MIXED[0]
    return (once ^ (once >> 29)) * _MIXED[1]


def spread(values: Any, shape: tuple[int, ...]) -> Any:
    """Broadcast to a shape."""
    return values.expand(shape) if is_tensor(values) else np.broadcast_to(values, shape)


# The histogram of a step on the device of its tensors: only counts of bins are copied.
#
# The same integer operations as `histogram.bin_of` and `tally`, in torch; a test holds one against
# the other bit by bit.
#
# Axes: B sequences, T tokens, A atoms, N tokens, K bins.


def tensor_bins(log_ratio_N: Any) -> Any:
    """The bin of each log ratio of a tensor, as `histogram.bin_of`.

    Args:
        log_ratio_N: float32 or float64, of any shape.
    """
    short, empty = log_ratio_N.element_size() == 4, log_ratio_N.new_empty(0)
    real, whole, bits, significand = (
        (np.float32, np.int32, 32, 23) if short else (np.float64, np.int64, 64, 52)
    )
    shift = significand - SIGNIFICAND_BITS
    base = (int(real(SMALLEST).view(whole)) >> shift) - 1
    far = int(real(LARGEST).view(whole)) + 1
    raw_N = log_ratio_N.contiguous().view((empty.int() if short else empty.long()).dtype)
    size_N = raw_N & np.iinfo(whole).max
    bin_N = ((size_N.clamp(max=far) + ((1 << shift) - 1)) >> shift) - base
    bin_N = bin_N.maximum(size_N.clamp(max=1))  # values near 0 are in bin 1
    sign_N = raw_N >> (bits - 1)  # 0 or -1
    bin_N = (bin_N ^ sign_N) - sign_N + ZERO
    return bin_N.masked_fill(log_ratio_N.isnan() | log_ratio_N.isposinf(), BINS)


def tally_of(
    logp_train_BT: Any, logp_infer_BT: Any, mask_BT: Any, atom_BT: Any, atoms: int
) -> NDArray[np.int64]:
    """Count the trained tokens of each atom by bin, where the arrays are.

    Args:
        logp_train_BT, logp_infer_BT: [B, T], nats; tensors are float32 or float64.
        mask_BT: bool; atom_BT: 0..atoms - 1.

    Returns:
        [atoms, BINS + 1], on the host; see `tally`.
    """
    if not is_tensor(logp_train_BT):
        return tally(logp_train_BT, logp_infer_BT, mask_BT, atom_BT, atoms)
    ratio_BT = logp_train_BT - logp_infer_BT
    bin_BT = tensor_bins(ratio_BT)
    if ratio_BT.element_size() == 4:  # a difference may exceed its range
        bin_BT = bin_BT.masked_fill(ratio_BT.isposinf(), BINS - 1)
    bin_BT = bin_BT.masked_fill(~usable(logp_train_BT, logp_infer_BT), BINS)
    wide = BINS + 1
    atom_BT = moved(atom_BT, mask_BT)
    place_BT = (atom_BT.long() * wide + bin_BT).masked_fill(~mask_BT, atoms * wide)
    count_AW = place_BT.flatten().bincount(minlength=atoms * wide + 1)[:-1].view(atoms, wide)
    used = count_AW.any(dim=0).nonzero().flatten()  # few of all bins: only these are copied
    found_AW = np.zeros((atoms, wide), dtype=np.int64)
    found_AW[:, hosted(used)] = hosted(count_AW[:, used])
    return found_AW


def usable(logp_train_BT: Any, logp_infer_BT: Any) -> Any:
    """Whether a token has both logprobs; NaN compares false."""
    return logp_infer_BT.isfinite() & (logp_train_BT < float("inf"))
