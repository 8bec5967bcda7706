# Blocks: a dump in canonical pieces, so that results do not depend on the chunks of a reader.
#
# A block ends with its step, or with the sequence that brings it to BLOCK_TOKENS tokens, in the
# order of the dump, independent of any outcome.

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from servanda.errors import EvidenceError
from servanda.traces.rollouts import (
    LOSS_MASK,
    LOSS_WEIGHT,
    REMOVED,
    ROUTE,
    ROUTE_TRAIN,
    UNROUTED,
    Array,
    Rollouts,
)
from servanda.traces.trace import TracePair, pair_of

# labels that trainers' hooks and formats fill; a contract may slice by them
FILLED = ("rank", "engine", "weight_version", "cached_tokens")

BLOCK_TOKENS = 262_144  # prompts included
_COLUMNS = (
    "staleness",
    "entropy_nats",
    LOSS_WEIGHT,
    LOSS_MASK,
)  # of tokens, for slices and clauses


def blocks(chunks: Iterable[Rollouts], tokens: int = BLOCK_TOKENS) -> Iterator[Rollouts]:
    """The same sequences in the same order, in blocks of one step each."""
    parts: list[Rollouts] = []
    room = tokens
    for chunk in chunks:
        at = 0
        if parts and parts[0].step != chunk.step:
            yield joined(parts)
            parts, room = [], tokens
        while at < len(chunk):
            ends = np.flatnonzero(chunk.length_S[at:].cumsum() >= room)
            end = at + int(ends[0]) + 1 if len(ends) else len(chunk)
            part = taken(chunk, at, end)
            parts.append(part)
            room -= int(part.length_S.sum())
            at = end
            if room <= 0:
                yield joined(parts)
                parts, room = [], tokens
    if parts:
        yield joined(parts)


def taken(chunk: Rollouts, first: int, end: int) -> Rollouts:
    """Sequences first..end-1 of a chunk."""
    starts = np.r_[0, chunk.length_S.cumsum()]
    span = slice(int(starts[first]), int(starts[end]))
    return Rollouts(
        chunk.step,
        chunk.length_S[first:end],
        chunk.token_N[span],
        chunk.mask_N[span],
        chunk.logp_train_N[span],
        chunk.logp_infer_N[span],
        chunk.group_S[first:end],
        chunk.source_S[first:end],
        {name: values[first:end] for name, values in chunk.labels.items()},
        {name: values[first:end] for name, values in chunk.per_sequence.items()},
        {name: values[span] for name, values in chunk.per_token.items()},
    )


def joined(parts: Sequence[Rollouts]) -> Rollouts:
    """Parts of one step as one.

    A column that a part lacks is NaN there, "" for a label, and UNROUTED for a route.

    Raises:
        EvidenceError: the routes of the parts are of models with other layers or experts.
    """
    if len(parts) == 1:
        return parts[0]

    def all_of(name: str) -> Array:
        return np.concatenate([getattr(p, name) for p in parts])

    labels, per_sequence, per_token = (
        {name: column for p in parts for name, column in getattr(p, of).items()}
        for of in ("labels", "per_sequence", "per_token")
    )
    return Rollouts(
        parts[0].step,
        all_of("length_S"),
        all_of("token_N"),
        all_of("mask_N"),
        all_of("logp_train_N"),
        all_of("logp_infer_N"),
        tuple(group for p in parts for group in p.group_S),
        tuple(source for p in parts for source in p.source_S),
        {n: tuple(v for p in parts for v in p.labels.get(n, ("",) * len(p))) for n in labels},
        {
            n: np.concatenate([_known(p.per_sequence, n, len(p), like) for p in parts])
            for n, like in per_sequence.items()
        },
        {
            n: np.concatenate([_known(p.per_token, n, len(p.token_N), like) for p in parts])
            for n, like in per_token.items()
        },
    )


def _known(columns: Mapping[str, Array], name: str, size: int, like: Array) -> Array:
    """A column, or its missing values, of which each is shaped as in `like`."""
    if name in columns:
        if (found := columns[name].shape[1:]) != like.shape[1:]:
            raise EvidenceError(
                f"{name} has {_sizes(found)} in one part of a step, and {_sizes(like.shape[1:])} "
                "in another",
                hint="a dump holds the experts of one model: write the other one to its own folder",
            )
        return columns[name]
    if like.ndim > 1:
        return np.full((size, *like.shape[1:]), UNROUTED, like.dtype)
    return np.full(size, np.nan)


def _sizes(shape: tuple[int, ...]) -> str:
    layers, experts = shape
    return f"{layers} layers of {experts} experts a token"


def paired(block: Rollouts, first: int, *, filtered: bool = True) -> TracePair:
    """Both kernels on the trained tokens of a block.

    Args:
        first: dispatch index of its first sequence.
        filtered: False: include tokens that a filter of the trainer removed.
    """
    removed_N = block.removed_N
    columns = {n: v for n, v in block.per_token.items() if n in _COLUMNS}
    if removed_N is None:
        columns[REMOVED] = np.zeros(len(block.mask_N))
    else:
        columns[REMOVED] = removed_N.astype(np.float64)
    train_NLK, infer_NLK = block.per_token.get(ROUTE_TRAIN), block.per_token.get(ROUTE)
    if train_NLK is not None and infer_NLK is not None and train_NLK.shape == infer_NLK.shape:
        columns["flipped_layers"] = _flipped(train_NLK, infer_NLK)
    if filtered or removed_N is None:
        return pair_of(block, columns, first=first)
    return pair_of(replace(block, mask_N=block.mask_N | removed_N), columns, first=first)


def _flipped(train_NLK: Array, infer_NLK: Array) -> Array:
    """Layers whose experts differ, [N]; NaN where a side has none."""
    known_N = ((train_NLK != UNROUTED) & (infer_NLK != UNROUTED)).all(axis=(1, 2))
    differ_NL = (np.sort(train_NLK) != np.sort(infer_NLK)).any(axis=-1)
    return np.where(known_N, differ_NL.sum(axis=1), np.nan)


class ContentDigest:
    """The digest of all data of a step that a verdict uses, block by block."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, block: Rollouts) -> None:
        # an empty column may be present or not, depending on the reader's chunks
        # labels that formats fill do not count
        named = ((n, values) for n, values in sorted(block.labels.items()) if n not in FILLED)
        labels = [(name, values) for name, values in named if any(values)]
        texts = [block.step, block.group_S, labels]
        self._hash.update(repr(texts).encode("utf-8", "surrogatepass"))
        columns = {
            "length": block.length_S.astype(np.int64),
            "token": block.token_N.astype(np.int64),
            "mask": block.mask_N.astype(bool),
            "train": block.logp_train_N.astype(np.float64),
            "infer": block.logp_infer_N.astype(np.float64),
            **{
                f"per_token {name}": values.astype(np.float64 if values.ndim == 1 else np.int32)
                for name, values in sorted(block.per_token.items())
                if not np.isnan(values).all()
            },
        }
        for name, column in columns.items():
            self._hash.update(name.encode())
            self._hash.update(np.ascontiguousarray(column).tobytes())

    @property
    def value(self) -> str:
        return self._hash.hexdigest()
