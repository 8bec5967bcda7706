# miles: train_data/<rollout>_<rank>.pt, one file of columns per rank.
#
# Ranks hold the same samples in several ways.  Tensor-parallel ranks write copies; only the last
# stage of a pipeline has what the trainer computed; context-parallel ranks hold parts of the
# columns of a response, in which each owns two of 2 C chunks of the sequence, rank r the chunks
# r and 2 C - 1 - r (miles, training_utils/cp_utils.py).  Tokens and masks are whole everywhere.
#
# Axes: R tokens of a response.

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from servanda.errors import MeasurementError
from servanda.rl.dumps.formats import base
from servanda.rl.dumps.formats.json_arrays import Unusable, require
from servanda.rl.dumps.formats.padding import plain
from servanda.traces.rollouts import Array

_MOST_RANKS = 1 << 16
_PARTS = ("log_probs", "rollout_log_probs", "advantages", "entropy")  # columns that may be parts
Samples = Sequence[Mapping[str, Any]]


def numbers_of(value: Any, name: str) -> Array:
    """A column as NumPy's array.

    Raises:
        Unusable: it cannot be one.
    """
    try:
        return plain(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise Unusable(f"{name} are not numbers") from None


def samples_of(payload: Mapping[str, Any], file: base.File) -> Samples:
    """The samples of a rank's file, each with the rank's place among the context-parallel ones.

    Raises:
        MeasurementError: it has no columns.
    """
    columns = payload.get("rollout_data")
    if not isinstance(columns, dict) or not isinstance(columns.get("tokens"), list):
        raise MeasurementError(
            f"{file.name} has neither samples nor rollout_data",
            hint="write it by --dump-details",
        )
    count = len(columns["tokens"])
    own = {str(k): v for k, v in columns.items() if isinstance(v, list) and len(v) == count}
    own["sample_index"] = own.get("sample_indices", [None] * count)
    raw, place = columns.get("raw_reward"), own.get("partition", [])
    if isinstance(raw, list) and place and all(at in range(len(raw)) for at in place):
        own["raw_reward"] = [raw[at] for at in place]  # those of the whole rollout
    rank, size = payload.get("cp_rank") or 0, payload.get("cp_size") or 1
    if not (isinstance(rank, int) and isinstance(size, int) and 0 <= rank < size <= _MOST_RANKS):
        raise MeasurementError(
            f"{file.name} is of context-parallel rank {rank!r} of {size!r}",
            hint="it is cut off or changed: copy it again",
        )
    shard = {"cp_rank": rank, "cp_size": size, "qkv_format": payload.get("qkv_format") or "thd"}
    return [{**{key: column[at] for key, column in own.items()}, **shard} for at in range(count)]


def joined(
    files: Sequence[tuple[base.File, Samples]], refused: base.Refused
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each sample of a step once, with its place: what several ranks hold of it is put together.

    A sample that occurs twice in one file stays twice.
    """
    held: dict[Any, list[tuple[str, Mapping[str, Any]]]] = {}
    for file, samples in files:
        seen: Counter[Any] = Counter()
        for at, sample in enumerate(samples):
            place = f"{file.name}:{at + 1}"
            identity = _identity(sample) or place
            held.setdefault((identity, seen[identity]), []).append((place, sample))
            seen[identity] += 1
    for parts in held.values():
        place, first = parts[0]
        try:
            yield place, {**first, **_columns([sample for _, sample in parts])}
        except Unusable as unusable:
            refused.add(str(unusable), place)


def _identity(sample: Mapping[str, Any]) -> Any:
    """What the copies and parts of one sample have in common; None if it is not known.

    Without a number it is the sampler's column, which only copies share.
    """
    number = sample.get("sample_index")
    digest = hashlib.blake2b(digest_size=16)
    for name in ("tokens", *(("rollout_log_probs",) if number is None else ())):
        try:
            digest.update(numbers_of(sample.get(name), name).tobytes())
        except Unusable:
            return None
    return str(number), digest.digest()


def _columns(copies: Samples) -> dict[str, Any]:
    """The columns of a response, whole.

    Raises:
        Unusable: a part is missing or has another length, or copies differ.
    """
    columns: dict[str, Any] = {}
    for name in _PARTS:
        part: dict[int, Array] = {}  # of each context-parallel rank
        for sample in copies:
            if sample.get(name) is None:
                continue
            own = numbers_of(sample[name], name)
            known = part.setdefault(sample["cp_rank"], own)
            if known is not own and known.tobytes() != own.tobytes():
                raise Unusable(f"{name} of one sample differ between ranks that hold copies of it")
        if part:
            columns[name] = _whole(part, copies[0], name)
    return columns


def _whole(part: Mapping[int, Array], sample: Mapping[str, Any], name: str) -> Array:
    size = sample["cp_size"]
    if size == 1:
        return next(iter(part.values()))
    owner_R = _owner_R(sample, size)
    whole_R = np.full(len(owner_R), np.nan)
    for rank in range(size):
        mine_R = owner_R == rank
        if rank not in part:
            raise Unusable(
                f"{name} are held in parts, and that of context-parallel rank {rank} of {size} is "
                "missing: copy the files of all ranks into the folder"
            )
        if len(part[rank]) != mine_R.sum():
            raise Unusable(
                f"{name} of context-parallel rank {rank} are {len(part[rank])} numbers, and its "
                f"chunks have {mine_R.sum()} tokens"
            )
        whole_R[mine_R] = part[rank]
    return whole_R


def _owner_R(sample: Mapping[str, Any], size: int) -> Array:
    """Which context-parallel rank scored each token of a response, [R]."""
    require(sample, ("tokens", "loss_masks"))
    total, response = (numbers_of(sample[name], name).size for name in ("tokens", "loss_masks"))
    padded = max(total, 1)
    if sample["qkv_format"] != "thd":
        padded = sample.get("max_seq_lens")
        if not isinstance(padded, int) or padded < total:
            raise Unusable(f"max_seq_lens is {padded!r}, which no sequence of {total} tokens has")
    chunk = -(-padded // (2 * size))
    # a token is scored where the one before it is fed
    chunk_R = np.arange(total - response - 1, total - 1) // chunk
    return np.minimum(chunk_R, 2 * size - 1 - chunk_R)
