# A batch on an accelerator: its arrays stay there, and are reduced there.
#
# Copied to the host are counts of bins, and a few numbers per sequence, [B].  Whole arrays, [B, T],
# are copied only for what is rare or asked for: see DeviceBatch.on_host.
#
# Axes: B sequences of this rank, T columns, U tokens that are used.

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.rl.dumps.checks.columns import FAR_NATS
from servanda.rl.monitor.batch import Batch, array, columns_of_loss, staleness_of
from servanda.theory.bounds.importance_weights import Psi
from servanda.theory.stats.agreement import Agreement
from servanda.theory.stats.device_tally import usable
from servanda.theory.stats.tally import classes, hosted, is_tensor, mixed, moved, take

Array = NDArray[Any]

_HOSTS = ("cpu",)  # whose tensors are NumPy views


class DeviceBatch(Batch):
    """A batch whose arrays are torch's: logprobs float32 or float64, the mask bool."""

    logp_train_BT: Any
    logp_infer_BT: Any
    mask_BT: Any
    staleness_BT: Any
    advantage_BT: Any

    @cached_property
    def on_host(self) -> Batch:
        """A copy in NumPy: for the slices at the first step, `dump=`, actions on tokens, the
        tokens that violated slices share, and data that may be unsound.
        """
        copied = {n: array(n, v) for n, v in _fields(self).items() if is_tensor(v)}
        return Batch(**{**_fields(self), **copied})

    @cached_property
    def tokens(self) -> int:
        return int(self.mask_BT.sum())

    @cached_property
    def start_B(self) -> Array:
        width = self.mask_BT.shape[1]
        first_B = self.mask_BT.byte().argmax(dim=1) if width else self.mask_BT.sum(dim=1)
        return hosted(first_B.masked_fill(~self.mask_BT.any(dim=1), width))

    @cached_property
    def one_turn(self) -> bool:
        mask_BT = self.mask_BT
        turns = (mask_BT[:, 1:] & ~mask_BT[:, :-1]).sum() + mask_BT[:, :1].sum()
        return int(turns) == np.count_nonzero(self.start_B < mask_BT.shape[1])

    @property
    def staleness(self) -> tuple[float, int, float]:
        if self.staleness_BT is None or not self.tokens:
            return 0.0, 0, 0.0
        per_sequence = self.staleness_BT.shape[1] == 1
        n_BT = self.mask_BT.sum(dim=1, keepdim=True) if per_sequence else self.mask_BT.long()
        n_BT = n_BT.masked_fill(self.staleness_BT.isnan(), 0)
        known_BT = self.staleness_BT.double().masked_fill(n_BT == 0, 0.0)
        return float((known_BT * n_BT).sum()), int(n_BT.sum()), float(known_BT.max())


def _fields(batch: Batch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in Batch.__dataclass_fields__}


def batch_of(logp_train: Any, logp_infer: Any, mask: Any, **given: Any) -> Batch:
    """A trainer's arguments as a batch: on their device if that is an accelerator, else NumPy's.

    Args:
        given: as of `Batch.of`.

    Raises:
        EvidenceError: as `Batch.of`.
    """
    arrays = (logp_train, logp_infer, mask)
    if all(is_tensor(values) and values.device.type not in _HOSTS for values in arrays):
        batch = on_device(logp_train, logp_infer, mask, **given)
        if batch is not None:
            return batch
    return Batch.of(logp_train, logp_infer, mask, **given)


def on_device(logp_train: Any, logp_infer: Any, mask: Any, **given: Any) -> DeviceBatch | None:
    """A batch of tensors, all on one device; None if something is wrong with them.

    `Batch.of` finds the words for it.
    """
    mask = mask.detach()
    if mask.ndim != 2 or mask.is_complex() or (mask < 0).any() or mask.isnan().any():
        return None
    shape, one = mask.shape, logp_train is logp_infer
    train_BT, infer_BT = (_floats(values, mask, (shape,)) for values in (logp_train, logp_infer))
    token_BT = given.pop("tokens", None)
    if token_BT is not None and not _are_ids(token_BT, shape):
        return None
    names = ("loss_weights", "loss_mask", "versions", "older")
    *_, versions, _ = loss = [given.pop(name, None) for name in names]
    if versions is not None:
        own = staleness_of(given.get("staleness"), versions, int(given["weights"]), *shape)
        given["staleness"] = own
    beside = [given.pop(name, None) for name in ("staleness", "advantages")]
    stale_BT, advantage_BT = (
        None if values is None else _floats(values, mask, (shape[:1], (shape[0], 1), shape))
        for values in beside
    )
    wrong = (
        train_BT is None
        or infer_BT is None
        or [v is None for v in beside] != [v is None for v in (stale_BT, advantage_BT)]
        or (stale_BT is not None and (stale_BT < 0).any())
    )
    if wrong:
        return None
    # texts, numbers and ids are those of a batch without columns
    none_BT = np.zeros((shape[0], 0), dtype=bool)
    rest = _fields(Batch.of(none_BT, none_BT, none_BT, **given))
    learns_BT = mask != 0
    selected_B = moved(rest["selected_B"], mask)
    own = {
        "logp_train_BT": train_BT,
        "logp_infer_BT": infer_BT,
        "learns_BT": learns_BT,
        "mask_BT": learns_BT & selected_B[:, None],
        "staleness_BT": None if stale_BT is None else stale_BT.reshape(shape[0], -1),
        "advantage_BT": None if advantage_BT is None else advantage_BT.reshape(shape[0], -1),
        "token_BT": token_BT,
        "one_array": one or _one_array(train_BT, infer_BT),
        **columns_of_loss(*shape, *loss),  # on the host, which alone examines them
    }
    return DeviceBatch(**{**rest, **own})


def _floats(values: Any, like: Any, shapes: tuple[Any, ...]) -> Any:
    """Numbers of one of the shapes on the device of `like`, float32 or float64; None if not."""
    import torch

    if not is_tensor(values):
        values = torch.as_tensor(np.asarray(values, dtype=np.float64), device=like.device)
    values = values.detach()
    if values.shape not in shapes or values.device != like.device or values.is_complex():
        return None
    if values.dtype in (torch.float32, torch.float64):
        return values
    # half formats, which float32 represents exactly; whole numbers
    return values.float() if values.is_floating_point() else values.double()


def _are_ids(values: Any, shape: Any) -> bool:
    ids = values if is_tensor(values) else array("tokens", values)
    fits = ids.ndim == 2 and len(ids) == shape[0] and ids.shape[1] >= shape[1]
    return fits and str(ids.dtype).removeprefix("torch.").startswith(("int", "uint"))


def _one_array(train_BT: Any, infer_BT: Any) -> bool:
    same = train_BT.data_ptr() == infer_BT.data_ptr() and train_BT.stride() == infer_BT.stride()
    return same and train_BT.numel() > 0


def by_sequence(batch: DeviceBatch) -> tuple[Array, Array]:
    """Per sequence, the sum of |log ratio| over its usable tokens, and their number, [B]."""
    import torch

    drift_BT = (batch.logp_train_BT - batch.logp_infer_BT).abs()
    # a token without mass under train is evidence, but has no finite value
    used_BT = batch.mask_BT & usable(batch.logp_train_BT, batch.logp_infer_BT)
    used_BT &= drift_BT < float("inf")
    sum_B = drift_BT.masked_fill(~used_BT, 0.0).sum(dim=1, dtype=torch.float64)
    return hosted(sum_B), hosted(used_BT.sum(dim=1))


def contributions(batch: DeviceBatch, psi: Psi) -> tuple[float, float, int]:
    """The excess weight in the loss, as `statistics.contributions`."""
    advantage_BT = batch.advantage_BT.expand(batch.mask_BT.shape)
    used_BT = batch.mask_BT & usable(batch.logp_train_BT, batch.logp_infer_BT)
    used_BT &= advantage_BT.isfinite()
    advantage_U = advantage_BT[used_BT]
    w_U = (batch.logp_train_BT[used_BT].double() - batch.logp_infer_BT[used_BT]).exp()
    gap_U = (weights(psi, w_U) - w_U) * advantage_U
    above, below = (float(gap_U[side].sum()) for side in (advantage_U > 0, advantage_U < 0))
    return above, below, len(gap_U)


def weights(psi: Psi, w_U: Any) -> Any:
    """psi of importance weights, a tensor: between its bends it is a straight line."""
    edges = np.array(sorted({bend for bend in psi.bends if bend > 0}))
    ends = np.r_[0.0, edges, 2 * max(edges, default=1.0)]
    low, high = ends[:-1] + np.diff(ends) / 4, ends[1:] - np.diff(ends) / 4
    # pieces and bends alternate, as in `classes`
    slope, start = np.zeros((2, 2 * len(edges) + 1))
    slope[::2] = (psi.weight(high) - psi.weight(low)) / (high - low)
    start[::2] = psi.weight(low) - slope[::2] * low
    start[1::2] = psi.weight(edges)
    at_U = classes(w_U, edges)
    slope_U = take(slope, at_U)
    return take(start, at_U) + (slope_U * w_U).masked_fill(slope_U == 0, 0.0)


def agreement(batch: Batch) -> Agreement:
    """Whether the two columns could have disagreed; see `Agreement.of_rows`.

    The arrays are copied only if there are few sequences, or some seem copied.
    """
    if isinstance(batch, DeviceBatch):
        found = Agreement.of_distant(batch.logp_train_BT, batch.logp_infer_BT, batch.mask_BT)
        if found is not None:
            return found
        batch = batch.on_host
    return Agreement.of_rows(batch.logp_train_BT, batch.logp_infer_BT, batch.mask_BT)


def is_clean(batch: DeviceBatch, rare_nats: float) -> bool:
    """Whether neither positive nor filled logprobs are in a batch, nor repeated responses.

    Args:
        rare_nats: a response with a lower logprob is not sampled twice.
    """
    import torch

    if not batch.tokens:
        return True
    train_BT, infer_BT = batch.logp_train_BT, batch.logp_infer_BT
    for own, other in ((train_BT, infer_BT), (infer_BT, train_BT)):
        if ((own > 0) | ((own == 0) & (other < FAR_NATS))).any():
            return False
    sum_B = infer_BT.masked_fill(~batch.mask_BT, 0.0).sum(dim=1, dtype=torch.float64)
    rare_B = (sum_B < rare_nats) & sum_B.isfinite()
    # equal responses have equal sums of mixed bits, at any column and in any order of addition
    short = infer_BT.dtype == torch.float32
    bits_BT = infer_BT.contiguous().view(torch.int32 if short else torch.int64).long()
    key_R = mixed(bits_BT).masked_fill(~batch.mask_BT, 0).sum(dim=1)[rare_B]
    return len(key_R.unique()) == len(key_R)
