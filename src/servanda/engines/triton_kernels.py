# The two Triton kernels of tensor_sums.py: one program reduces one span of one row.
#
# Under TRITON_INTERPRET=1 the same code runs on a CPU.  All arithmetic is float64.  The terms are
# those of theory/divergence/pairs.py: made of the larger of p and q and of the relative difference
# of the other, so that two nearly equal rows keep their digits and no term overflows early.

from __future__ import annotations

import os

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

SPAN = 1 << 14  # logits of one program; fixed, so that a row has the same bits in any company
BLOCK, WARPS = 256, 4  # two pairs of logits a thread: more of them spill registers
FIRST, SECOND = 8, 12  # columns of the two kernels, in the order of tensor_sums.py

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_INF = tl.constexpr(float("inf"))
_LOWEST = tl.constexpr(-700.0)  # exp of it is 1e-304
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN2_HIGH = tl.constexpr(6.93147180369123816490e-01)
_LN2_LOW = tl.constexpr(1.90821492927058770002e-10)
_TO_INTEGER = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52: the sum keeps the integer part
_ONE = tl.constexpr(0x3FF0000000000000)  # the bits of 1.0
_LAST = tl.constexpr(2**31 - 1)


def first(train_RV: Tensor, infer_RV: Tensor) -> Tensor:
    """The columns of `Normaliser` of each span, [K, FIRST, R]."""
    return _launched(_normalise, FIRST, train_RV, infer_RV)


def second(train_RV: Tensor, infer_RV: Tensor, normalisers_3R: Tensor) -> Tensor:
    """The sums of each span, [K, SECOND, R]; log_z of train, of infer, and the shift."""
    return _launched(_reduce, SECOND, train_RV, infer_RV, normalisers_3R)


def _launched(
    kernel: triton.JITFunction, columns: int, train_RV: Tensor, infer_RV: Tensor, *more: Tensor
) -> Tensor:
    rows, vocabulary = train_RV.shape
    spans = -(-vocabulary // SPAN)
    out_KCR = torch.empty((spans, columns, rows), dtype=torch.float64, device=train_RV.device)
    sizes = train_RV.stride(0), infer_RV.stride(0), vocabulary, SPAN, BLOCK
    with torch.cuda.device_of(train_RV):  # Triton launches on the current one
        kernel[rows, spans](train_RV, infer_RV, *more, out_KCR, *sizes, num_warps=WARPS)
    return out_KCR


@triton.jit
def _load(side, at, stop):
    return tl.load(side + at, mask=at < stop, other=-_INF).to(tl.float64)


@triton.jit
def _one_more(x, at, top, total, best):
    """Of each lane the largest logit, the sum of exp(logit - largest), and where it was."""
    # equal infinities differ by 0; a lane that has met only -inf holds a sum of weight 0
    scale = tl.exp(tl.where(x == top, 0.0, -tl.abs(x - top)))
    more = x > top
    total = tl.where(more, total * scale + 1.0, total + scale)
    return tl.where(more, x, top), total, tl.where(more, at, best)


@triton.jit
def _store_side(out, rows, top, total, best):
    """Columns 0, 2 and 4 of one side, from its lanes."""
    highest = tl.max(top, axis=0)
    anchor = tl.where(tl.abs(highest) == _INF, 0.0, highest)
    tl.store(out, highest)
    tl.store(out + 2 * rows, tl.sum(total * tl.exp(top - anchor), axis=0))
    tl.store(out + 4 * rows, tl.min(tl.where(top == highest, best, _LAST), axis=0).to(tl.float64))


@triton.jit
def _normalise(
    train,
    infer,
    out,
    stride_train,
    stride_infer,
    vocabulary,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = tl.num_programs(0)
    train += row * stride_train
    infer += row * stride_infer
    stop = tl.minimum((part + 1) * SPAN, vocabulary)
    lowest = tl.full((BLOCK,), -_INF, tl.float64)
    nothing = tl.zeros((BLOCK,), tl.float64)
    top_train, total_train, best_train = lowest, nothing, tl.zeros((BLOCK,), tl.int32)
    top_infer, total_infer, best_infer = lowest, nothing, tl.zeros((BLOCK,), tl.int32)
    high, low = lowest, -lowest
    for start in range(part * SPAN, stop, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a, b = _load(train, at, stop), _load(infer, at, stop)
        neither = (a == -_INF) & (b == -_INF)
        drift = a - b
        high = tl.maximum(high, tl.where(neither, -_INF, drift))
        low = tl.minimum(low, tl.where(neither, _INF, drift))
        top_train, total_train, best_train = _one_more(a, at, top_train, total_train, best_train)
        top_infer, total_infer, best_infer = _one_more(b, at, top_infer, total_infer, best_infer)
    out += part.to(tl.int64) * 8 * rows + row
    _store_side(out, rows, top_train, total_train, best_train)
    _store_side(out + rows, rows, top_infer, total_infer, best_infer)
    tl.store(out + 6 * rows, tl.max(high, axis=0))
    tl.store(out + 7 * rows, tl.min(low, axis=0))


@triton.jit
def _expm1(x):
    """exp(x) - 1 and exp(x) of x from -700 to 0: exp(x) = 2^k exp(r) with |r| <= log(2) / 2."""
    shifted = x * _LOG2_E + _TO_INTEGER
    k = shifted - _TO_INTEGER
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    p = r * (1 / 6227020800) + 1 / 479001600  # the series to r^13 / 13!
    p = p * r + 1 / 39916800
    p = p * r + 1 / 3628800
    p = p * r + 1 / 362880
    p = p * r + 1 / 40320
    p = p * r + 1 / 5040
    p = p * r + 1 / 720
    p = p * r + 1 / 120
    p = p * r + 1 / 24
    p = p * r + 1 / 6
    p = p * r + 1 / 2
    rest = r + r * r * p
    power = ((shifted.to(tl.int64, bitcast=True) << 52) + _ONE).to(tl.float64, bitcast=True)
    return power * rest + (power - 1.0), power * rest + power


@triton.jit
def _atanh(x):
    """The inverse hyperbolic tangent of x from -1/3 to 0, by its series to x^33 / 33."""
    square = x * x
    p = square * (1 / 33)
    for k in tl.static_range(15):  # type: ignore[attr-defined]
        p = (p + 1 / (31 - 2 * k)) * square
    return x + x * p


@triton.jit
def _reduce(
    train,
    infer,
    normalisers,
    out,
    stride_train,
    stride_infer,
    vocabulary,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = tl.num_programs(0)
    train += row * stride_train
    infer += row * stride_infer
    log_z_train = tl.load(normalisers + row)
    log_z_infer = tl.load(normalisers + rows + row)
    shift = tl.load(normalisers + 2 * rows + row)
    stop = tl.minimum((part + 1) * SPAN, vocabulary)
    nothing = tl.zeros((BLOCK,), tl.float64)
    entropy, tv, kl, kl_reverse, chi2 = nothing, nothing, nothing, nothing, nothing
    le_cam, hellinger2, js, gap, only_train = nothing, nothing, nothing, nothing, nothing
    excess, ahead = nothing, nothing
    for start in range(part * SPAN, stop, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a, b = _load(train, at, stop), _load(infer, at, stop)
        log_p, log_q = a - log_z_train, b - log_z_infer
        x = log_p - log_q  # log(p / q); where that is small, by the difference of the logits
        far = tl.abs(x) > 1.0
        x = tl.where(far, x, (a - b) - shift)
        x = tl.where((a == -_INF) & (b == -_INF), 0.0, x)
        more = x > 0
        larger = tl.exp(tl.where(more, log_p, log_q))
        apart = -tl.abs(x)
        near = tl.maximum(apart, 2 * _LOWEST)
        root, half = _expm1(near / 2)
        fall = root * (root + 2.0)  # min / max - 1
        smaller = larger * half * half
        p, q = tl.where(more, larger, smaller), tl.where(more, smaller, larger)
        log_p, log_q = tl.maximum(log_p, 1.1 * _LOWEST), tl.maximum(log_q, 1.1 * _LOWEST)
        one_sided = apart == -_INF
        alone = more & one_sided
        square = larger * fall * fall
        up = larger * (near * fall - (fall - near))
        down = tl.where(one_sided, _INF, larger * (fall - apart))
        inverse = 1.0 / ((2.0 + fall) * (4.0 + fall))
        # m log m - m + 1 of m = 1 + fall / 2
        middle = (2.0 + fall) * _atanh(fall * (2.0 + fall) * inverse) - fall / 2
        back = 1.0 / half
        entropy -= q * log_q
        tv -= larger * fall / 2
        kl += tl.where(more, tl.where(alone, 0.0, up), down)
        kl_reverse += tl.where(more, down, up)
        chi2 += tl.where(alone, _INF, tl.where(more, square * back * back, square))
        le_cam += square * (4.0 + fall) * inverse / 2
        hellinger2 += larger * root * root / 2
        js += up / 2 - larger * middle
        difference = tl.where(more, -larger, larger) * fall  # p - q
        gap += tl.where(far, p * log_p - q * log_q, difference * log_q + p * x)
        only_train += tl.where(alone, p, 0.0)
        excess += difference
        ahead += tl.where(more, p, 0.0)
    out += part.to(tl.int64) * 12 * rows + row
    tl.store(out, tl.sum(entropy, axis=0))
    tl.store(out + rows, tl.sum(tv, axis=0))
    tl.store(out + 2 * rows, tl.sum(kl, axis=0))
    tl.store(out + 3 * rows, tl.sum(kl_reverse, axis=0))
    tl.store(out + 4 * rows, tl.sum(chi2, axis=0))
    tl.store(out + 5 * rows, tl.sum(le_cam, axis=0))
    tl.store(out + 6 * rows, tl.sum(hellinger2, axis=0))
    tl.store(out + 7 * rows, tl.sum(js, axis=0))
    tl.store(out + 8 * rows, tl.sum(gap, axis=0))
    tl.store(out + 9 * rows, tl.sum(only_train, axis=0))
    tl.store(out + 10 * rows, tl.sum(excess, axis=0))
    tl.store(out + 11 * rows, tl.sum(ahead, axis=0))
