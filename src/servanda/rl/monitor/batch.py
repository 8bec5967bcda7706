# A batch: the arrays of one training step, read once and validated.
#
# Axes: B sequences of this rank, T columns.  Arrays are NumPy's, torch's, or lists of lists; torch
# is never imported.  Tensors of an accelerator stay there: see DeviceBatch.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.errors import EvidenceError
from servanda.judgement.slices.atoms import Classes
from servanda.rl.dumps.checks.columns import FAR_NATS
from servanda.theory.bounds.importance_weights import Psi
from servanda.theory.stats import tally as arrays
from servanda.theory.stats.agreement import Agreement
from servanda.theory.stats.tally import classes, hosted, is_tensor, mixed, moved, take, usable

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
        if given_BT.dtype != bool and (odd_BT := learns_BT & (given_BT != 1)).any():
            raise EvidenceError(
                f"the mask is {given_BT[odd_BT].flat[0]:g} in places",
                hint="1 for a trained token, else 0; a weight of the loss goes to loss_weights=",
            )
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


# The fields of a batch's tokens for slices.  Numbers that count columns of one turn are looked up
# by row, without work per token.
#
# Axes: B sequences, T tokens.


@dataclass(frozen=True)
class BatchFields:
    """The `TokenFields` of a batch."""

    batch: Batch

    @property
    def shape(self) -> tuple[int, ...]:
        return self.batch.mask_BT.shape

    def labels(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        none = ("",) * self.batch.sequences
        return [*zip(*(self.batch.labels.get(name, none) for name in names), strict=True)]

    def of_sequences(self, code_S: Array) -> Array:
        return arrays.moved(code_S[:, None], self.batch.mask_BT)

    def codes(self, field: str, classes: Classes) -> tuple[Array, int]:
        batch, size = self.batch, len(classes)
        table = classes.of_counts(batch.mask_BT.shape[1])
        if field in _FROM_START and batch.one_turn:
            code_BT = arrays.moved(_shifted(table, batch), batch.mask_BT)
            return code_BT, size - 1  # never unknown, the last class
        values = COLUMNS[field](batch)
        if values is None:
            unknown = np.full((1, 1), size - 1, dtype=np.int32)
            return arrays.moved(unknown, batch.mask_BT), size
        values = arrays.moved(values, batch.mask_BT)
        if arrays.is_whole(values):
            return arrays.take(table, values), size - 1
        return classes.of_values(values), size


def _shifted(table: Array, batch: Batch) -> Array:
    """A table read from the first trained column of each row on, [B, T] or [1, T].

    For numbers that count the columns of one turn, rows are copied as a whole.
    """
    width = batch.mask_BT.shape[1]
    start_B = batch.start_B[batch.start_B < width]
    if not len(start_B) or (start_B == start_B[0]).all():
        at_T = np.arange(width) - (start_B[0] if len(start_B) else 0)
        return table.take(at_T, mode="clip")[None]
    padded = np.concatenate([np.repeat(table[:1], width), table])
    if arrays.is_tensor(batch.mask_BT):
        first_B, column_T = (
            arrays.moved(at, batch.mask_BT) for at in (width - batch.start_B, np.arange(width))
        )
        return arrays.take(padded, first_B[:, None] + column_T)
    return np.lib.stride_tricks.sliding_window_view(padded, width)[width - batch.start_B]


def _before(batch: Batch) -> Array:
    """Number of earlier trained tokens of the sequence, [B, T]; valid for trained tokens."""
    return arrays.running_count(batch.mask_BT) - 1


def _starts(batch: Batch) -> Array:
    """Mask of the beginnings of turns, [B, T]."""
    starts_BT = batch.mask_BT & True  # a copy
    starts_BT[:, 1:] &= ~batch.mask_BT[:, :-1]
    return starts_BT


def _turn(batch: Batch) -> Array:
    if batch.one_turn:
        return np.ones((1, 1), dtype=np.int32)
    return arrays.running_count(_starts(batch))


def _in_turn(batch: Batch) -> Array:
    before_BT = _before(batch)
    return before_BT - arrays.running_most(before_BT * _starts(batch))


# in a sequence of one turn, these count its columns from the first trained one
_FROM_START = ("context.position", "context.turn_position")
# the fields of a trainer's tokens, [B, 1], [1, T] or [B, T]; None: missing in this step
COLUMNS: dict[str, Callable[[Batch], Array | None]] = {
    "request.prompt_tokens": lambda batch: batch.start_B.astype(np.int32)[:, None],
    "context.position": _before,
    "context.length": lambda batch: np.arange(batch.mask_BT.shape[1], dtype=np.int32)[None],
    "context.turn": _turn,
    "context.turn_position": _in_turn,
    "outcome.staleness": lambda batch: batch.staleness_BT,
}


# A trainer's arrays as NumPy's, with their shapes checked.
#
# Axes: B sequences of this rank, T columns.  Arrays are NumPy's, torch's, or lists of lists; torch
# is never imported.


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


LEAST_ROWS = 8  # and columns, of a batch that may be transposed


def turned(batch: Batch) -> str:
    """A note where the mask looks like one of [tokens, sequences]; "" where it does not.

    The trained tokens of a sequence are in few runs, and the next sequence has other ones.  So a
    mask that changes far more often along its rows than along its columns has sequences in these.
    """
    size, width = batch.learns_BT.shape
    if min(size, width) < LEAST_ROWS:
        return ""
    mask_BT = batch.learns_BT
    along = int((mask_BT[:, 1:] != mask_BT[:, :-1]).sum()) / size
    across = int((mask_BT[1:] != mask_BT[:-1]).sum()) / width
    whole = not along and bool(mask_BT.all()) and size > width and batch.group_B is None
    often = along / (width - 1) > 3 * across / (size - 1)
    if whole or (often and along >= 4 and across >= 0.5):
        return (
            f"the mask has shape [{size}, {width}], read as {size} sequences of {width} tokens: is "
            "it transposed? pass [sequences, tokens]"
        )
    return ""


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


# A batch on an accelerator: its arrays stay there, and are reduced there.
#
# Copied to the host are counts of bins, and a few numbers per sequence, [B].  Whole arrays, [B, T],
# are copied only for what is rare or asked for: see DeviceBatch.on_host.
#
# Axes: B sequences of this rank, T columns, U tokens that are used.


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
    if mask.ndim != 2 or mask.is_complex() or ((mask != 0) & (mask != 1)).any():
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
        "one_array": one or _one_tensor(train_BT, infer_BT),
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


def _one_tensor(train_BT: Any, infer_BT: Any) -> bool:
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
