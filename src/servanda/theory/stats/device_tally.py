# The histogram of a step on the device of its tensors: only counts of bins are copied.
#
# The same integer operations as `histogram.bin_of` and `tally.tally`, in
# torch; a test holds one against the other bit by bit.
#
# Axes: B sequences, T tokens, A atoms, N tokens, K bins.

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.theory.stats import tally as in_numpy
from servanda.theory.stats.histogram import BINS, LARGEST, SIGNIFICAND_BITS, SMALLEST, ZERO
from servanda.theory.stats.tally import hosted, is_tensor, moved


def bin_of(log_ratio_N: Any) -> Any:
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


def tally(
    logp_train_BT: Any, logp_infer_BT: Any, mask_BT: Any, atom_BT: Any, atoms: int
) -> NDArray[np.int64]:
    """Count the trained tokens of each atom by bin, where the arrays are.

    Args:
        logp_train_BT, logp_infer_BT: [B, T], nats; tensors are float32 or float64.
        mask_BT: bool; atom_BT: 0..atoms - 1.

    Returns:
        [atoms, BINS + 1], on the host; see `tally.tally`.
    """
    if not is_tensor(logp_train_BT):
        return in_numpy.tally(logp_train_BT, logp_infer_BT, mask_BT, atom_BT, atoms)
    ratio_BT = logp_train_BT - logp_infer_BT
    bin_BT = bin_of(ratio_BT)
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
