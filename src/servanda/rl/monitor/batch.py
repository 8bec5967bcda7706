# A batch: the arrays of one training step, read once and validated.
#
# Axes: B sequences of this rank, T columns.  Arrays are NumPy's, torch's, or lists of lists; torch
# is never imported.  Tensors of an accelerator stay there: see device_batch.py.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.errors import EvidenceError
from servanda.rl.monitor.trainer_arrays import (
    array,
    beside_of,
    columns_of_loss,
    ids_of,
    numbers_of,
    staleness_of,
    texts_of,
)

Array = NDArray[Any]


# The default share of sequences that a trainer's hook scores in a forward pass of its own.  Such a
# pass over all takes a third of an update's forward and backward pass, and less of a whole step:
# over this share, at most 2 % of it.
SHARE = 0.06


@dataclass(frozen=True)
class Batch:
    """A trainer's data about the tokens of its next update.

    Args:
        weights: number of updates of the trainer; its step number.
        logp_train_BT, logp_infer_BT: nats, float32 or float64; NaN if missing.
        mask_BT: whether the token is judged: the trainer learns from it, in a selected sequence.
        learns_BT: whether the trainer learns from the token.
        selected_B: whether a sequence was selected before scoring; offered: from how many.
        group_B: prompt group of each sequence; None: each is a separate group.
        labels: name -> text of each sequence.
        staleness_BT: updates between sampling and training, [B, 1] or [B, T]; NaN: unknown.
        advantage_BT: [B, 1] or [B, T].
        token_BT: ids, [B, T] or wider: then the last T columns are those of the mask.
        one_array: whether both logprobs share memory.
        loss_weight_BT: the weight of each token in the loss, [B, 1] or [B, T]; NaN if missing.
        loss_mask_BT: 1 for a token that the loss used, [B, T].
        version_BT: the weight version that sampled each token, [B, 1] or [B, T]; NaN: unknown.
        older: updates back -> the trainer's logprobs under that earlier version, [B, T], nats.
    """

    weights: int
    logp_train_BT: Array
    logp_infer_BT: Array
    mask_BT: Array
    learns_BT: Array
    selected_B: Array
    offered: int
    group_B: tuple[str, ...] | None = None
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    staleness_BT: Array | None = None
    advantage_BT: Array | None = None
    token_BT: Array | None = None
    one_array: bool = False
    loss_weight_BT: Array | None = None
    loss_mask_BT: Array | None = None
    version_BT: Array | None = None
    older: Mapping[int, Array] = field(default_factory=dict)

    @property
    def sequences(self) -> int:
        return len(self.mask_BT)

    @cached_property
    def selected(self) -> int:
        """The number of selected sequences."""
        return int(np.count_nonzero(self.selected_B))

    @cached_property
    def on_host(self) -> Batch:
        """The batch with NumPy's arrays."""
        return self

    @cached_property
    def tokens(self) -> int:
        """The number of judged tokens."""
        return int(np.count_nonzero(self.mask_BT))

    @cached_property
    def start_B(self) -> Array:
        """Column of the first trained token of each sequence; T if there is none."""
        size, width = self.mask_BT.shape
        start_B = self.mask_BT.argmax(axis=1) if width else np.zeros(size, dtype=np.int64)
        return np.where(self.mask_BT.any(axis=1), start_B, width)

    @cached_property
    def one_turn(self) -> bool:
        """Whether every sequence has at most one stretch of trained tokens."""
        inner = np.count_nonzero(self.mask_BT[:, 1:] > self.mask_BT[:, :-1])
        first = np.count_nonzero(self.mask_BT[:, :1])
        return inner + first == np.count_nonzero(self.start_B < self.mask_BT.shape[1])

    @property
    def has_prompts(self) -> bool:
        """Whether the columns begin before the first trained token of some sequence."""
        return bool((self.start_B > 0).any())

    @property
    def staleness(self) -> tuple[float, int, float]:
        """Sum, count and maximum of the known staleness of trained tokens."""
        if self.staleness_BT is None:
            return 0.0, 0, 0.0
        if self.staleness_BT.shape[1] == 1:  # one number per sequence
            values_N, n_N = self.staleness_BT[:, 0], np.count_nonzero(self.mask_BT, axis=1)
        else:
            values_N = self.staleness_BT[self.mask_BT]
            n_N = np.ones(len(values_N), dtype=np.int64)
        known_N = ~np.isnan(values_N) & (n_N > 0)
        values_N, n_N = values_N[known_N].astype(np.float64), n_N[known_N]
        return float(values_N @ n_N), int(n_N.sum()), float(values_N.max(initial=0.0))

    @classmethod
    def of(
        cls,
        logp_train: object,
        logp_infer: object,
        mask: object,
        *,
        groups: Sequence[object] | None = None,
        labels: Mapping[str, Sequence[object]] | None = None,
        advantages: object = None,
        weights: object = None,
        staleness: object = None,
        tokens: object = None,
        selected: object = None,
        selected_from: int | None = None,
        loss_weights: object = None,
        loss_mask: object = None,
        versions: object = None,
        older: Mapping[int, object] | None = None,
    ) -> Batch:
        """Validate a trainer's arguments; see Monitor.observe.

        Raises:
            EvidenceError: the mask is missing, a shape differs, or a step is no whole number.
        """
        step = _step(weights)
        if mask is None:
            raise EvidenceError(
                f"step {step} has no mask, so the trained tokens are unknown",
                hint="pass the loss mask, [sequences, tokens]",
            )
        given_BT = array("mask", mask)
        if given_BT.ndim != 2:
            raise EvidenceError(
                f"the mask has shape {given_BT.shape}", hint="pass [sequences, tokens]"
            )
        if given_BT.dtype.kind == "f" and np.isnan(given_BT).any():
            raise EvidenceError("the mask is NaN in places", hint="1 for a trained token, else 0")
        if given_BT.dtype.kind in "if" and (given_BT < 0).any():
            raise EvidenceError(
                f"the mask is {given_BT[given_BT < 0].flat[0]:g} in places",
                hint="1 for a trained token, else 0; of a trainer's labels: labels != -100",
            )
        learns_BT = given_BT if given_BT.dtype == bool else given_BT != 0
        size, width = learns_BT.shape
        selected_B = _selected(selected, size)
        mask_BT = learns_BT if selected_B.all() else learns_BT & selected_B[:, None]
        train_BT = numbers_of("logp_train", logp_train, [(size, width)])
        infer_BT = numbers_of("logp_infer", logp_infer, [(size, width)])
        stale_BT = staleness_of(staleness, versions, step, size, width)
        advantage_BT = beside_of("advantages", advantages, size, width)
        if not isinstance(labels, Mapping | None):
            raise EvidenceError(
                f"labels are a {type(labels).__name__}",
                hint='name -> text of each sequence, such as {"env": [...]}',
            )
        texts = {str(name): texts_of(name, values, size) for name, values in (labels or {}).items()}
        return cls(
            step,
            train_BT,
            infer_BT,
            mask_BT,
            learns_BT,
            selected_B,
            _offered(selected_from, size),
            None if groups is None else texts_of("groups", groups, size),
            texts,
            stale_BT,
            advantage_BT,
            None if tokens is None else ids_of(tokens, size, width),
            logp_train is logp_infer or _one_array(train_BT, infer_BT),
            **columns_of_loss(size, width, loss_weights, loss_mask, versions, older),
        )


def _step(weights: object) -> int:
    try:
        step = -1 if isinstance(weights, bool) else index(weights)  # type: ignore[arg-type]
    except TypeError:
        step = -1
    if step < 0:
        number = isinstance(weights, int | float)
        raise EvidenceError(
            f"weights is {repr(weights) if number else f'a {type(weights).__name__}'}",
            hint="pass the number of updates so far, a whole number from 0 on",
        )
    return step


def _selected(values: object, size: int) -> Array:
    if values is None:
        return np.ones(size, dtype=bool)
    selected_B = array("selected", values)
    if selected_B.shape != (size,) or selected_B.dtype != bool:
        raise EvidenceError(
            f"selected is {selected_B.dtype} of shape {selected_B.shape}",
            hint=f"whether each of the {size} sequences was selected before scoring, as bools",
        )
    return selected_B


def _offered(number: int | None, size: int) -> int:
    if number is None:
        return size
    if isinstance(number, bool) or not isinstance(number, int) or number < size:
        raise EvidenceError(
            f"selected_from is {number!r}, and {size} sequences are here",
            hint="the number of sequences from which these were selected",
        )
    return number


def _one_array(train: Array, infer: Array) -> bool:
    """Whether two arrays have the same memory and strides."""
    same = train.ctypes.data == infer.ctypes.data and train.strides == infer.strides
    return same and train.size > 0
