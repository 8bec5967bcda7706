# Token table: the tokens of both kernels side by side, with all that may tell them apart.
#
# Axes: K usable tokens; G prompt groups, the units that are independent; Q sequences.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.judgement.slices.columns import columns
from servanda.judgement.slices.rules import LABEL
from servanda.traces.corpus import Prompt
from servanda.traces.trace import TracePair

Array = NDArray[Any]

# those that a record may have; what is never known is left out of a table
NUMBERS = (
    "request.prompt_tokens",
    "context.position",
    "context.length",
    "context.turn",
    "context.turn_position",
    "context.row",
    "outcome.from_end",
    "outcome.token_id",
    "outcome.staleness",
)
VERSION = "weight_version"  # label: the updates that the engine's weights have
STEP = "step"  # the training step, which is no field of a contract
_EDGES_NATS = (0.003, 0.03, 0.1, 0.3, 0.7, 1.5, 3.0, 5.0, 8.0)  # of bins of -log p
_PRIOR = 2.0  # tokens of the mean gap that a bin is thought to have
_SMALLEST = 1e-12  # expected gap of sides that agree


def gap(log_ratio_K: Array) -> Array:
    """|p - q| / (p + q) of log p - log q: a token that gains mass has one, as one that loses it."""
    return np.abs(np.tanh(log_ratio_K / 2))


@dataclass(frozen=True)
class TokenTable:
    """The usable tokens of some steps.

    Args:
        step_K: training step; sequence_K, group_K: index of the sequence and of its prompt group.
        train_K, infer_K: logprobs, nats; train may be -inf.
        token_K: ids, -1 if unknown.
        numbers: name of a field, or STEP -> its value, [K]; NaN if unknown.
        labels: name of a label -> its texts, and the index of each token's.
        repeated_K: whether the sequence has sampled the same token before.
    """

    step_K: Array
    sequence_K: Array
    group_K: Array
    train_K: Array
    infer_K: Array
    token_K: Array
    numbers: Mapping[str, Array]
    labels: Mapping[str, tuple[tuple[str, ...], Array]]
    repeated_K: Array
    source_Q: tuple[str, ...] = field(default=())

    @classmethod
    def of(cls, steps: Iterable[tuple[int, TracePair, Sequence[str]]]) -> TokenTable | None:
        """The table of some pairs, each with its step and the places of its sequences.

        None without a usable token.
        """
        parts: list[dict[str, Array]] = []
        sources: list[str] = []
        groups: dict[tuple[int, str], int] = {}
        texts: dict[str, dict[str, int]] = {}
        for step, pair, source_S in steps:
            parts.append(_part(step, pair, len(sources), groups, texts))
            sources += source_S
        parts = [part for part in parts if len(part["token"])]
        if not parts:
            return None
        names = dict.fromkeys(name for part in parts for name in part)
        joined = {
            name: np.concatenate(
                [part.get(name, np.full(len(part["token"]), np.nan)) for part in parts]
            )
            for name in names
        }
        numbers = {n: joined[n] for n in NUMBERS if n in joined and not np.isnan(joined[n]).all()}
        numbers[STEP] = joined["step"].astype(np.float64)
        labels = {
            name: (tuple(values), np.nan_to_num(joined[LABEL + name], nan=0).astype(np.int64))
            for name, values in texts.items()
            if LABEL + name in joined
        }
        age_K = _age(labels, joined["step"])
        if age_K is not None:
            numbers.setdefault("outcome.staleness", age_K)
        return cls(
            joined["step"],
            joined["sequence"].astype(np.int64),
            joined["group"].astype(np.int64),
            joined["train"],
            joined["infer"],
            joined["token"].astype(np.int64),
            numbers,
            labels,
            joined["repeated"].astype(bool),
            tuple(sources),
        )

    def __len__(self) -> int:
        return len(self.token_K)

    @cached_property
    def log_ratio_K(self) -> Array:
        """log p_train - log p_infer, nats."""
        return self.train_K - self.infer_K

    @cached_property
    def gap_K(self) -> Array:
        return gap(self.log_ratio_K)

    @cached_property
    def bin_K(self) -> Array:
        return np.searchsorted(_EDGES_NATS, -self.infer_K)

    def expected(self, of_K: Array) -> Array:
        """The gap of each token if it were that of some tokens with about its logprob, [K].

        Args:
            of_K: mask of the tokens to learn from.
        """
        size = len(_EDGES_NATS) + 1
        n_B = np.bincount(self.bin_K[of_K], minlength=size)
        sum_B = np.bincount(self.bin_K[of_K], self.gap_K[of_K], minlength=size)
        mean = float(sum_B.sum() / max(n_B.sum(), 1))
        return np.maximum((sum_B + _PRIOR * mean) / (n_B + _PRIOR), _SMALLEST)[self.bin_K]

    def taken(self, keep_K: Array) -> TokenTable:
        """The table of some of the tokens."""
        return TokenTable(
            self.step_K[keep_K],
            self.sequence_K[keep_K],
            self.group_K[keep_K],
            self.train_K[keep_K],
            self.infer_K[keep_K],
            self.token_K[keep_K],
            {name: column[keep_K] for name, column in self.numbers.items()},
            {name: (texts, code[keep_K]) for name, (texts, code) in self.labels.items()},
            self.repeated_K[keep_K],
            self.source_Q,
        )


def _age(labels: Mapping[str, tuple[tuple[str, ...], Array]], step_K: Array) -> Array | None:
    """Updates since the recorded version of each token's weights; the newest have 0.

    None where a step has one version, whose age tells no tokens apart that the step does not.
    """
    texts, code_K = labels.get(VERSION, ((), None))
    if code_K is None or not all(text.isdecimal() for text in texts[1:]):
        return None
    version_K = np.array([float(text or "nan") for text in texts])[code_K]
    known_K = ~np.isnan(version_K)
    both = np.unique(np.stack([step_K, code_K])[:, known_K], axis=1)
    if both.shape[1] == len(np.unique(both[0])):
        return None
    age_K: Array = step_K - version_K
    return age_K - age_K[known_K].min()


def _part(
    step: int,
    pair: TracePair,
    first: int,
    groups: dict[tuple[int, str], int],
    texts: dict[str, dict[str, int]],
) -> dict[str, Array]:
    """The columns of one pair; new groups and texts are added to the known ones."""
    trace, usable_N = pair.infer, pair.usable_N
    length_S = trace.length_S
    size = len(length_S)
    names = pair.group_S or tuple(str(s) for s in trace.sequence_S.tolist())
    group_S = np.array([groups.setdefault((step, name), len(groups)) for name in names])
    of_S = {"sequence": first + np.arange(size), "group": group_S}
    for name, values in pair.labels.items():
        known = texts.setdefault(name, {"": 0})
        of_S[LABEL + name] = np.array([known.setdefault(v, len(known)) for v in values])
    part = {name: np.repeat(column, length_S)[usable_N] for name, column in of_S.items()}
    recorded = columns(pair, (Prompt(1),) * size, NUMBERS)
    part |= {name: column[usable_N] for name, column in recorded.items()}
    # whether the sequence has sampled each token before
    sequence_N, repeated_N = np.repeat(of_S["sequence"], length_S), trace.token_N >= 0
    _, first_N = np.unique(np.stack([sequence_N, trace.token_N]), axis=1, return_index=True)
    repeated_N[first_N] = False
    part |= {
        "step": np.full(int(usable_N.sum()), step),
        "train": pair.train.columns["logp"][usable_N],
        "infer": trace.columns["logp"][usable_N],
        "token": trace.token_N[usable_N],
        "repeated": repeated_N[usable_N],
    }
    return part
