# The exact metrics of torch tensors where they are: Triton kernels on a GPU, eager torch elsewhere.
#
# The sums are those of theory/divergence/row_sums.py, so each metric keeps its one formula.  They
# are taken in two steps, because the total variation has a kink where p = q: before the
# normalisers of the whole row are known, no sum over a part of the vocabulary can tell on which
# side of it a token lies.  A first step gives the normalisers of each vocabulary shard, which add
# up (`Normaliser`); a second one the sums, which are then plain sums over shards.
#
# Axes: R rows (positions), V vocabulary (of this shard), K shards or spans, D hidden size.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from servanda.errors import EvidenceError
from servanda.theory.divergence.base import OF_SUMS, of_sums
from servanda.theory.divergence.row_sums import RowSums

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

try:
    from servanda.engines import triton_kernels
except ImportError:  # no Triton: eager torch computes the same sums
    triton_kernels = None

# the columns of the second step, in the order of the kernel
SUMS = (
    *("entropy", "tv", "kl", "kl_reverse", "chi2", "le_cam"),
    *("hellinger2", "js", "entropy_gap", "only_train", "excess", "ahead"),
)
# without Triton, logits that are worked at a time in float64: in a cache, or worth a launch
_CACHED, _LAUNCHED = 1 << 18, 1 << 22


@dataclass(frozen=True)
class Normaliser:
    """What a vocabulary shard adds to the normalisers of R rows; shards add up by `+`.

    The order of the shards does not matter but for rounding.

    Args:
        columns_CR: float64, [8, R]: largest logit, sum of exp(logit - largest) and token id of the
            largest (lowest of equals), each of train and of infer; largest and smallest difference
            of logits, train - infer.
    """

    columns_CR: Tensor

    def __add__(self, other: Normaliser) -> Normaliser:
        return Normaliser(_added(torch.stack([self.columns_CR, other.columns_CR])))

    @property
    def log_z(self) -> Tensor:
        """Log normalisers of train and of infer, [2, R], nats."""
        return self.columns_CR[0:2] + self.columns_CR[2:4].log()

    @property
    def shift(self) -> Tensor:
        """log_z of train - log_z of infer, [R], nats, to a rounding that `finished` takes back."""
        top_train, top_infer, total_train, total_infer = self.columns_CR[:4]
        return (top_train - top_infer) + (total_train / total_infer).log()

    @property
    def usable(self) -> Tensor:
        """Rows without NaN or +inf, and with some mass on both sides, [R]."""
        return self.log_z.isfinite().all(dim=0)


def _added(columns_KCR: Tensor) -> Tensor:
    top_KSR, total_KSR, best_KSR = columns_KCR[:, 0:2], columns_KCR[:, 2:4], columns_KCR[:, 4:6]
    top_SR = top_KSR.amax(dim=0)
    anchor_SR = top_SR.where(top_SR.isfinite(), 0.0)
    total_SR = (total_KSR * (top_KSR - anchor_SR).exp()).sum(dim=0)
    best_SR = best_KSR.where(top_KSR == top_SR, torch.inf).amin(dim=0)
    high_R, low_R = columns_KCR[:, 6].amax(dim=0), columns_KCR[:, 7].amin(dim=0)
    return torch.cat([top_SR, total_SR, best_SR, torch.stack([high_R, low_R])])


def normaliser_of(train_RV: Tensor, infer_RV: Tensor, *, start: int = 0) -> Normaliser:
    """The first step on one vocabulary shard.

    Args:
        train_RV, infer_RV: raw logits, [R, V], of any floating type; -inf marks a token without
            mass.
        start: id of the shard's first token.

    Raises:
        EvidenceError: the two shapes differ.
    """
    train_RV, infer_RV = _checked(train_RV, infer_RV)
    if _by_triton(train_RV):
        assert triton_kernels is not None
        columns_CR = _added(triton_kernels.first(train_RV, infer_RV))
    else:
        columns_CR = torch.cat([_eager_first(*pair) for pair in _pieces(train_RV, infer_RV)], dim=1)
    columns_CR[4:6] += start
    return Normaliser(columns_CR)


def partial_sums(train_RV: Tensor, infer_RV: Tensor, whole: Normaliser) -> Tensor:
    """The second step on one vocabulary shard: float64, [12, R]; shards add up by `+`.

    Args:
        whole: the normaliser of the whole vocabulary, all shards added up.
    """
    train_RV, infer_RV = _checked(train_RV, infer_RV)
    normalisers_3R = torch.stack([*whole.log_z, whole.shift])
    if _by_triton(train_RV):
        assert triton_kernels is not None
        return triton_kernels.second(train_RV, infer_RV, normalisers_3R).sum(dim=0)
    pieces = _pieces(train_RV, infer_RV, *normalisers_3R)
    return torch.cat([_eager_second(*piece) for piece in pieces], dim=1)


def row_sums_of(
    train_RV: Tensor,
    infer_RV: Tensor,
    token_R: Tensor | None = None,
    *,
    start: int = 0,
    group: ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """The sums of each row, from which `metrics_of` has every exact metric.

    Args:
        train_RV, infer_RV: raw logits, [R, V], float16, bfloat16, float32 or float64; they stay on
            their device.
        token_R: ids of the sampled tokens, [R]; adds their logprobs, logp_train and logp_infer.
        start: id of the first token of this rank's shard.
        group: the tensor-parallel ranks, each with its shard of the same rows; every rank has the
            sums of the whole vocabulary.

    Returns:
        The fields of RowSums, float64 tensors [R] on the device of the logits; NaN for unusable
        rows (NaN, +inf, or no mass on a side).

    Raises:
        EvidenceError: shapes differ.
    """
    train_RV, infer_RV = _checked(train_RV, infer_RV)
    whole = normaliser_of(train_RV, infer_RV, start=start)
    if group is not None:
        ranks = [torch.empty_like(whole.columns_CR) for _ in range(group.size())]
        distributed.all_gather(ranks, whole.columns_CR, group=group)
        whole = Normaliser(_added(torch.stack(ranks)))
    sums_CR = partial_sums(train_RV, infer_RV, whole)
    if token_R is not None:
        sums_CR = torch.cat([sums_CR, _logits_of(token_R - start, train_RV, infer_RV)])
    if group is not None:
        distributed.all_reduce(sums_CR, group=group)
    return finished(sums_CR, whole)


def row_sums_of_hidden(
    hidden_train_RD: Tensor,
    head_train_VD: Tensor,
    hidden_infer_RD: Tensor,
    head_infer_VD: Tensor,
    token_R: Tensor | None = None,
    *,
    chunk: int = 512,
    start: int = 0,
    group: ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """`row_sums_of` logits that never exist as a whole: hidden states times the output embedding.

    Each block of rows is multiplied once, so the two steps read the same logits and no product is
    computed twice, as it would be in blocks of the vocabulary.

    Args:
        hidden_train_RD, hidden_infer_RD: last hidden states, [R, D] each with its own D.
        head_train_VD, head_infer_VD: weights of the output embeddings (lm_head), [V, D], or the
            rows of this rank's shard.
        chunk: rows whose logits exist at a time; the same on all ranks.
        token_R, start, group: see `row_sums_of`.
    """
    blocks = [
        row_sums_of(
            hidden_train_RD[at] @ head_train_VD.T,
            hidden_infer_RD[at] @ head_infer_VD.T,
            None if token_R is None else token_R[at],
            start=start,
            group=group,
        )
        for at in (slice(i, i + chunk) for i in range(0, max(1, len(hidden_train_RD)), chunk))
    ]
    return {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}


def finished(sums_CR: Tensor, whole: Normaliser) -> dict[str, Tensor]:
    """The sums by name, from those of all shards added up; see `row_sums_of`."""
    log_z_train_R, log_z_R = whole.log_z
    best_train_R, best_infer_R, high_R, low_R = whole.columns_CR[4:]
    named = dict(zip(SUMS, sums_CR, strict=False))
    # the sum of p - q is 0 but for the rounding of the shift, which moves terms of first order
    rest_R = named.pop("excess").log1p()
    gap_R = named["entropy_gap"]
    named["entropy_gap"] = (gap_R - rest_R * (gap_R - named["entropy"] + 1)).abs()
    named["tv"] = named["tv"] - rest_R * (named.pop("ahead") - 0.5)
    named |= {"log_z": log_z_R, "shift": whole.shift + rest_R, "high": high_R, "low": low_R}
    named["flip"] = (best_train_R != best_infer_R).double()
    if len(sums_CR) > len(SUMS):
        train_R, infer_R = sums_CR[len(SUMS) :]
        named |= {"logp_train": train_R - log_z_train_R, "logp_infer": infer_R - log_z_R}
    return {name: value_R.where(whole.usable, torch.nan) for name, value_R in named.items()}


def metrics_of(sums: Mapping[str, Tensor]) -> dict[str, NDArray[np.float64]]:
    """Every exact metric of each row, [R], by its name in a contract; NaN for unusable rows."""
    rows = RowSums(**{each.name: sums[each.name].cpu().numpy() for each in fields(RowSums)})
    with np.errstate(invalid="ignore"):
        return {name: of_sums(name, rows) for name in OF_SUMS}


def _checked(*sides: Tensor) -> tuple[Tensor, Tensor]:
    train_RV, infer_RV = sides
    if train_RV.shape != infer_RV.shape or train_RV.ndim != 2:
        raise EvidenceError(
            f"{tuple(train_RV.shape)} train logits for {tuple(infer_RV.shape)} infer logits",
            hint="both sides are [rows, vocabulary], of the same tokens",
        )
    if train_RV.device != infer_RV.device:
        raise EvidenceError(
            f"train logits on {train_RV.device}, infer logits on {infer_RV.device}",
            hint="move one side to the device of the other",
        )
    # gradients would keep every temporary; only the last axis need be contiguous
    a, b = (side.detach() for side in sides)
    return (a if a.stride(1) == 1 else a.contiguous()), (b if b.stride(1) == 1 else b.contiguous())


def _by_triton(logits: Tensor) -> bool:
    return triton_kernels is not None and (
        logits.device.type != "cpu" or triton_kernels.INTERPRETED
    )


def _logits_of(token_R: Tensor, *sides: Tensor) -> Tensor:
    """The logits of one token of each row on both sides, [2, R]; 0 for tokens of other shards."""
    inside_R = (token_R >= 0) & (token_R < sides[0].shape[1])
    at_R1 = token_R.where(inside_R, 0)[:, None]
    return torch.stack(
        [side_RV.gather(1, at_R1)[:, 0].double().where(inside_R, 0.0) for side_RV in sides]
    )


def _pieces(train_RV: Tensor, infer_RV: Tensor, *columns_R: Tensor) -> Iterator[list[Tensor]]:
    """Some rows of each, the logits in float64, small enough for a cache."""
    size = _CACHED if train_RV.device.type == "cpu" else _LAUNCHED
    rows = max(1, size // max(1, train_RV.shape[1]))
    for i in range(0, max(1, len(train_RV)), rows):
        at = slice(i, i + rows)
        columns = (column_R[at, None] for column_R in columns_R)
        yield [train_RV[at].double(), infer_RV[at].double(), *columns]


def _eager_first(train_RV: Tensor, infer_RV: Tensor) -> Tensor:
    neither_RV = train_RV.isneginf() & infer_RV.isneginf()
    drift_RV = train_RV - infer_RV
    high_R = drift_RV.masked_fill(neither_RV, -torch.inf).amax(dim=1)
    low_R = drift_RV.masked_fill(neither_RV, torch.inf).amin(dim=1)
    sides_SRV = torch.stack([train_RV, infer_RV])
    top_SR, best_SR = sides_SRV.max(dim=2)
    anchor_SR = top_SR.where(top_SR.isfinite(), 0.0)
    total_SR = (sides_SRV - anchor_SR[..., None]).exp_().sum(dim=2)
    return torch.cat([top_SR, total_SR, best_SR.double(), torch.stack([high_R, low_R])])


def _eager_second(
    train_RV: Tensor, infer_RV: Tensor, log_z_train: Tensor, log_z_infer: Tensor, shift: Tensor
) -> Tensor:
    """The terms of triton_kernels._reduce, whose comments say why each has its form."""
    neither_RV = train_RV.isneginf() & infer_RV.isneginf()
    log_p, log_q = train_RV - log_z_train, infer_RV - log_z_infer
    x = log_p - log_q
    far = x.abs() > 1
    x = x.where(far, train_RV - infer_RV - shift).masked_fill_(neither_RV, 0.0)
    more = x > 0
    larger = log_p.where(more, log_q).exp()
    apart = -x.abs()
    near = apart.clamp(min=-1400.0)
    root, half = (near / 2).expm1(), (near / 2).exp()
    fall = root * (root + 2)
    smaller = larger * half * half
    p, q = larger.where(more, smaller), smaller.where(more, larger)
    log_p, log_q = log_p.clamp(min=-770.0), log_q.clamp(min=-770.0)
    alone = more & apart.isneginf()
    square = larger * fall * fall
    up = larger * (near * fall - (fall - near))
    down = (larger * (fall - apart)).masked_fill_(apart.isneginf(), torch.inf)
    middle = (1 + fall / 2) * (fall / 2).log1p() - fall / 2
    difference = larger.where(~more, -larger) * fall
    terms = (
        -q * log_q,
        -larger * fall / 2,
        up.masked_fill(alone, 0.0).where(more, down),
        down.where(more, up),
        ((square / half) / half).where(more, square).masked_fill_(alone, torch.inf),
        square / (2 + fall) / 2,
        larger * root * root / 2,
        up / 2 - larger * middle,
        (p * log_p - q * log_q).where(far, difference * log_q + p * x),
        p.masked_fill(~alone, 0.0),
        difference,
        p.masked_fill(~more, 0.0),
    )
    return torch.stack([term.sum(dim=1) for term in terms])
