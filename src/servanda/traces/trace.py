# The record of one kernel (Trace), of two kernels on the same tokens (TracePair), and align().
#
# One sign convention: log_ratio = logp_train - logp_infer; the tokens come from infer.
# Axes: S sequences in dispatch order, N tokens of all sequences, concatenated.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servanda.errors import EvidenceError
from servanda.traces import expert_columns
from servanda.traces.rollouts import Rollouts

Array = NDArray[Any]

# values of each expert of each token, and what a message calls them
_OF_EXPERTS = {"routes": "routes of experts", "gates": "weights of experts"}


@dataclass(frozen=True)
class Batch:
    """Sequences for an engine: launch indexes, prompts, and given continuations if any.

    `width` new tokens are reserved for every sequence, so that the shape of a kernel's run is fixed
    at dispatch and does not depend on the lengths of responses.  `together` sequences run at once;
    None: the kernel's batch_size.

    Sequences of one salt may share cached prefixes, and those of other salts may not; without
    `salts` it is the engine's own affair.  `warm`: what is cached may be read; an engine whose
    caches know no salts computes everything anew without it.

    `routes`: of each continuation, the experts that an engine that scores it has to use, whole
    numbers, [tokens, L, K] as `Trace.routes` has them; without them, the engine routes by itself.
    """

    sequence_S: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    width: int
    continuations: tuple[tuple[int, ...], ...] = ()
    together: int | None = None
    salts: tuple[str, ...] = ()
    warm: bool = False
    routes: tuple[Array, ...] = ()

    def __len__(self) -> int:
        return len(self.sequence_S)

    def take(self, rows: Sequence[int]) -> Batch:
        """The same sequences in another composition."""
        return replace(
            self,
            sequence_S=tuple(self.sequence_S[r] for r in rows),
            prompts=tuple(self.prompts[r] for r in rows),
            continuations=tuple(self.continuations[r] for r in rows) if self.continuations else (),
            salts=tuple(self.salts[r] for r in rows) if self.salts else (),
            routes=tuple(self.routes[r] for r in rows) if self.routes else (),
        )

    def chunks(self, size: int) -> list[Batch]:
        """The batches that run at once: of `together`, otherwise of `size` sequences."""
        size = self.together or size
        return [self.take(range(i, min(i + size, len(self)))) for i in range(0, len(self), size)]


@dataclass(frozen=True)
class Trace:
    """One kernel's record of a batch; columns are [N], float64 but for the token ids.

    Args:
        sequence_S: launch indexes, strictly increasing.
        length_S: tokens of each sequence; 0 if it was lost.
        lost_S: dispatched, but no value came back.
        prompt_tokens_S: length of each prompt.
        token_N: token ids.
        columns: "logp" and the kernel's further records (see sampling.observe).
        about: path, batch size, sampling: the conditions of the numbers (law 7); and, if the engine
            reports it, capture: the precision of the logprobs.
    """

    sequence_S: Array
    length_S: Array
    lost_S: Array
    prompt_tokens_S: Array
    token_N: Array
    columns: Mapping[str, Array] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if int(self.length_S.sum()) != len(self.token_N):
            raise EvidenceError(
                f"a trace of {len(self.token_N)} tokens says its sequences have "
                f"{int(self.length_S.sum())}"
            )
        for name, column in self.columns.items():
            if len(column) != len(self.token_N):
                raise EvidenceError(
                    f"column {name!r} has {len(column)} values for {len(self.token_N)} tokens"
                )

    @property
    def continuations(self) -> tuple[tuple[int, ...], ...]:
        parts = np.split(self.token_N, np.cumsum(self.length_S)[:-1])
        return tuple(tuple(int(t) for t in part) for part in parts)

    @property
    def best(self) -> tuple[Array, Array] | None:
        """Ids and logprobs of the top-k tokens, [N, K] each; None if not recorded.

        Columns "id.0", "logp.0", "id.1", ..., as in `Engine.top`.  The ids must be fixed before
        sampling: an id that was added because it was sampled makes a correct report look wrong.
        """
        k = sum(name.startswith("id.") for name in self.columns)
        if not k:
            return None
        ids_NK = np.stack([self.columns[f"id.{i}"] for i in range(k)], axis=-1)
        logp_NK = np.stack([self.columns[f"logp.{i}"] for i in range(k)], axis=-1)
        return np.where(np.isnan(ids_NK), -1, ids_NK).astype(np.int64), logp_NK

    def values(self, name: str) -> Array | None:
        """A column, [N], the "routes", [N, L, K], or the "gates", [N, L, K, 2]; None without."""
        return getattr(self, name) if name in _OF_EXPERTS else self.columns.get(name)

    def recorded(self, name: str, side: str) -> Array:
        """The same, of the trace of a side.

        Raises:
            EvidenceError: it was not recorded.
        """
        if (found := self.values(name)) is not None:
            return found
        what = _OF_EXPERTS.get(name, name)
        raise EvidenceError(
            f"{side} recorded no {what}",
            hint="remove the clauses that need them, or let engine transformers run the model, "
            "which has routes only as a mixture of experts",
        )

    @property
    def routes_S(self) -> tuple[Array, ...] | None:
        """Routes of each sequence, for `Batch.routes`; -1 where unknown, None if not recorded."""
        route_NLK = self.routes
        if route_NLK is None:
            return None
        ends_S = np.cumsum(self.length_S)[:-1]
        whole_NLK = np.nan_to_num(route_NLK, nan=-1).astype(np.int16)
        return tuple(np.split(whole_NLK, ends_S))

    @property
    def routes(self) -> Array | None:
        """The experts that each token was routed to, [N, L, K]; None if not recorded.

        L layers with a router, K experts, in columns "route.0.0", "route.0.1", ...  They are those
        of the position whose logits predict the token, sorted in each layer.
        """
        return expert_columns.routes(self.columns)

    @property
    def gates(self) -> Array | None:
        """Each expert of `routes` and its weight in the router, [N, L, K, 2]; None likewise."""
        return expert_columns.gates(self.columns)

    @classmethod
    def of(
        cls,
        batch: Batch,
        length_S: ArrayLike,
        token_N: ArrayLike,
        columns: Mapping[str, Array],
        about: Mapping[str, str] | None = None,
        lost_S: ArrayLike | None = None,
    ) -> Trace:
        """The record of a batch; without `lost_S` no sequence was lost."""
        return cls(
            sequence_S=np.array(batch.sequence_S, dtype=np.int64),
            length_S=np.array(length_S, dtype=np.int64),
            lost_S=np.zeros(len(batch), dtype=bool) if lost_S is None else np.array(lost_S, bool),
            prompt_tokens_S=np.array([len(prompt) for prompt in batch.prompts], dtype=np.int64),
            token_N=np.array(token_N, dtype=np.int64),
            columns=columns,
            about=about or {},
        )

    @classmethod
    def join(cls, traces: Sequence[Trace]) -> Trace:
        """Traces of consecutive batches as one."""
        first = traces[0]
        return cls(
            *(
                np.concatenate([getattr(t, name) for t in traces])
                for name in ("sequence_S", "length_S", "lost_S", "prompt_tokens_S", "token_N")
            ),
            columns={c: np.concatenate([t.columns[c] for t in traces]) for c in first.columns},
            about=first.about,
        )


def answered(trace: Trace, batch: Batch) -> Trace:
    """Scores of a batch in which a lost sequence has its given tokens, with NaN logprobs.

    So its tokens count as missing (law 1); two traces of unequal lengths would not align.
    """
    if not trace.lost_S.any():
        return trace
    length_S = np.array([len(given) for given in batch.continuations], dtype=np.int64)
    there_N = ~np.repeat(trace.lost_S, length_S)
    columns = {name: np.full(len(there_N), np.nan) for name in {"logp", *trace.columns}}
    for name, values in trace.columns.items():
        columns[name][there_N] = values
    return replace(
        trace,
        length_S=length_S,
        lost_S=np.zeros(len(batch), dtype=bool),
        token_N=np.array([t for given in batch.continuations for t in given], dtype=np.int64),
        columns=columns,
    )


def with_ends(trace: Trace, width: int, ends: Sequence[int]) -> Trace:
    """A trace in which each response that stops early has an end token.

    A response that an engine cut or aborted has none.  The model would have continued with an
    unknown token, so one without a logprob is added: it counts as missing (law 1).

    Args:
        width: most tokens of a response.
        ends: ids that end a response; without any, the end cannot be determined.
    """
    if not ends:
        return trace
    after_S = np.cumsum(trace.length_S)
    drawn_S = trace.length_S > 0
    last_S = trace.token_N[after_S[drawn_S] - 1]
    cut_S = drawn_S & (trace.length_S < width)
    cut_S[drawn_S] &= ~np.isin(last_S, list(ends))
    if not cut_S.any():
        return trace
    at = after_S[cut_S]
    return replace(
        trace,
        length_S=trace.length_S + cut_S,
        token_N=np.insert(trace.token_N, at, ends[0]),
        columns={name: np.insert(values, at, np.nan) for name, values in trace.columns.items()},
    )


def without_mass_beyond(
    trace: Trace, ends: Sequence[int], others: Sequence[int], width: int
) -> Trace:
    """Scores in which a token that their kernel does not draw there has the logprob -inf.

    That is one after the first end of a response, and one that ends a response of the kernel that
    drew it although this kernel goes on after it.

    Args:
        ends: ids at which the kernel that scores ends a response; others: those of the kernel that
            drew; both () if unknown.
        width: most tokens of a response.
    """
    if not ends:
        return trace
    sequence_N = np.repeat(np.arange(len(trace.length_S)), trace.length_S)
    end_N = np.isin(trace.token_N, list(ends))
    before_N = np.cumsum(end_N) - end_N
    start_S = np.cumsum(trace.length_S) - trace.length_S
    beyond_N = before_N > before_N[start_S[sequence_N]]
    last_S = (start_S + trace.length_S - 1)[(trace.length_S > 0) & (trace.length_S < width)]
    beyond_N[last_S] |= np.isin(trace.token_N[last_S], [*{*others} - {*ends}])
    logp_N = trace.columns["logp"]
    known_N = beyond_N & ~np.isnan(logp_N)
    if not known_N.any():
        return trace
    return replace(trace, columns={**trace.columns, "logp": np.where(known_N, -np.inf, logp_N)})


def unended(trace: Trace) -> int:
    """Responses whose last token has no logprob, as added by `with_ends`."""
    last_S = np.cumsum(trace.length_S)[trace.length_S > 0] - 1
    return int(np.isnan(trace.columns["logp"][last_S]).sum())


def some(trace: Trace, sequences: Sequence[int]) -> Trace:
    """The given sequences of a trace, in the given order."""
    starts = np.cumsum(trace.length_S) - trace.length_S
    row_of = {int(s): row for row, s in enumerate(trace.sequence_S)}
    rows = [row_of[s] for s in sequences]
    spans = [np.arange(starts[r], starts[r] + trace.length_S[r]) for r in rows]
    at = np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)
    return replace(
        trace,
        sequence_S=trace.sequence_S[rows],
        length_S=trace.length_S[rows],
        lost_S=trace.lost_S[rows],
        prompt_tokens_S=trace.prompt_tokens_S[rows],
        token_N=trace.token_N[at],
        columns={name: column[at] for name, column in trace.columns.items()},
    )


@dataclass(frozen=True)
class TracePair:
    """Two kernels on the same tokens: sampled by `infer`, scored by `train`.

    Args:
        group_S: the prompt group of each sequence, if known.
        labels: name -> text of each sequence, if known; "" if it has none.
    """

    infer: Trace
    train: Trace
    group_S: tuple[str, ...] = ()
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def position_N(self) -> Array:
        """0-based index of each token among its sequence's new tokens."""
        length_S = self.infer.length_S
        starts_S = np.cumsum(length_S) - length_S
        return np.arange(len(self.infer.token_N)) - np.repeat(starts_S, length_S)

    @property
    def usable_N(self) -> Array:
        """The mask of tokens that are evidence (law 1).

        A train logprob of -inf is (the weight is 0); an infer logprob of -inf, a NaN or a
        +inf on either side is not, and counts as missing.
        """
        logp_train_N, logp_infer_N = self.train.columns["logp"], self.infer.columns["logp"]
        return np.isfinite(logp_infer_N) & ~np.isnan(logp_train_N) & (logp_train_N < np.inf)


def align(train: Trace, infer: Trace) -> TracePair:
    """Check for equal sequences and tokens; the error names the first difference.

    Raises:
        EvidenceError: the two traces do not concern the same tokens.
    """
    if not np.array_equal(train.sequence_S, infer.sequence_S):
        raise EvidenceError(
            f"the train kernel scored sequences {_span(train)}, and infer has {_span(infer)}",
            hint="score the sequences that the infer kernel sampled",
        )
    if not np.array_equal(train.length_S, infer.length_S):
        row = int(np.flatnonzero(train.length_S != infer.length_S)[0])
        raise EvidenceError(
            f"sequence {infer.sequence_S[row]} has {infer.length_S[row]} tokens on infer "
            f"and {train.length_S[row]} on train",
            hint="both sides must score the same token ids, the end-of-text step included",
        )
    if not np.array_equal(train.token_N, infer.token_N):
        at = int(np.flatnonzero(train.token_N != infer.token_N)[0])
        row = int(np.searchsorted(np.cumsum(infer.length_S), at, side="right"))
        raise EvidenceError(
            f"sequence {infer.sequence_S[row]} differs at token {at} of the batch: "
            f"id {infer.token_N[at]} on infer, {train.token_N[at]} on train",
            hint="send token ids, never text: tokenizers do not round-trip",
        )
    return TracePair(infer, train)


def _span(trace: Trace) -> str:
    n = len(trace.sequence_S)
    return f"{trace.sequence_S[0]}..{trace.sequence_S[-1]} ({n})" if n else "none"


# Pairing: arrays of a trainer, a dump or a gateway -> a TracePair of the trained tokens.
#
# Axes: B sequences of T columns (padded), or N tokens of all sequences, concatenated.


def pair(
    logp_train: ArrayLike,
    logp_infer: ArrayLike,
    mask: ArrayLike,
    *,
    groups: Sequence[str] | None = None,
    labels: Mapping[str, Sequence[str]] | None = None,
    tokens: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    per_token: Mapping[str, ArrayLike] | None = None,
    first: int = 0,
) -> TracePair:
    """Two kernels on the tokens that a trainer learns from.

    The pair contains for each token its turn (a stretch of the mask), its position in the turn, and
    the number of earlier tokens, for slices.

    Args:
        logp_train, logp_infer: [B, T], nats; or [N] if `lengths` is given.  NaN if missing: it
            counts as missing, never as 0.
        mask: of the same shape; whether the trainer learns from the token.  Tokens before a
            sequence's first trained one are its prompt, tokens between stretches are a tool's.
        groups: the prompt group of each sequence, [B]; default: each a separate group.
        labels: name -> text of each sequence, [B], such as {"env": [...]}.
        tokens: token ids, of the same shape; default unknown (-1).
        lengths: tokens of each sequence, [B], including its prompt.
        per_token: name -> number of each token, of the same shape: "staleness", "entropy_nats".
        first: launch index of the first sequence.

    Raises:
        EvidenceError: shapes differ, or the lengths do not add up.

    Examples:
        >>> pair([[0.0, -1.0, -0.5]], [[0.0, -1.1, -0.5]], [[0, 1, 1]]).infer.length_S.tolist()
        [2]
    """
    mask_A = np.asarray(mask)
    length_B = _lengths(mask_A, lengths)
    flat = {
        "logp_train": _flat("logp_train", logp_train, mask_A),
        "logp_infer": _flat("logp_infer", logp_infer, mask_A),
        **{name: _flat(name, values, mask_A) for name, values in (per_token or {}).items()},
    }
    token_N = np.full(mask_A.size, -1) if tokens is None else _flat("tokens", tokens, mask_A)
    size, mask_N = len(length_B), mask_A.astype(bool).ravel()
    for name, column in {"groups": groups, **(labels or {})}.items():
        if column is not None and len(column) != size:
            raise EvidenceError(f"{size} sequences have {len(column)} values of {name}")
    own = tuple(str(first + b) for b in range(size))
    train_N, infer_N = flat.pop("logp_train"), flat.pop("logp_infer")
    named = {name: tuple(values) for name, values in (labels or {}).items()}
    group_S = own if groups is None else tuple(groups)
    rollouts = Rollouts(0, length_B, token_N, mask_N, train_N, infer_N, group_S, own, named)
    return pair_of(rollouts, flat, first=first)


def pair_of(rollouts: Rollouts, per_token: Mapping[str, Array], *, first: int = 0) -> TracePair:
    """Two kernels on the trained tokens of a step; the same as `pair` of its columns.

    Args:
        per_token: name -> number of each token, [N], for slices; instead of those of the rollouts.
        first: launch index of the first sequence.
    """
    mask_N, size = rollouts.mask_N, len(rollouts)
    index_N = np.arange(len(mask_N)) - np.repeat(rollouts.start_S, rollouts.length_S)
    context = {"length": index_N, "turn": rollouts.turn_N, "turn_position": rollouts.turn_token_N}
    columns = {name: column[mask_N] for name, column in per_token.items()}
    columns |= {name: column[mask_N].astype(np.float64) for name, column in context.items()}
    shape = {
        "sequence_S": np.arange(first, first + size),
        "length_S": np.bincount(rollouts.sequence_N[mask_N], minlength=size),
        "lost_S": np.zeros(size, dtype=bool),
        "prompt_tokens_S": rollouts.prompt_tokens_S,
        "token_N": rollouts.token_N[mask_N].astype(np.int64),
    }
    infer = Trace(**shape, columns={"logp": rollouts.logp_infer_N[mask_N], **columns})
    train = Trace(**shape, columns={"logp": rollouts.logp_train_N[mask_N]})
    return TracePair(infer, train, rollouts.group_S, rollouts.labels)


def _lengths(mask_A: Array, lengths: ArrayLike | None) -> Array:
    if lengths is None:
        if mask_A.ndim != 2:
            raise EvidenceError(
                f"a mask of shape {mask_A.shape} does not say where sequences end",
                hint="give [sequences, tokens], or lengths=",
            )
        return np.full(mask_A.shape[0], mask_A.shape[1])
    length_B = np.asarray(lengths, dtype=np.int64)
    if mask_A.ndim != 1 or int(length_B.sum()) != mask_A.size:
        raise EvidenceError(
            f"the lengths add up to {int(length_B.sum())} tokens, and the mask has shape "
            f"{mask_A.shape}"
        )
    return length_B


def _flat(name: str, values: ArrayLike, mask_A: Array) -> Array:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != mask_A.shape:
        raise EvidenceError(f"{name} has shape {array.shape}, and the mask {mask_A.shape}")
    return array.ravel()


# Latency of served requests: the record of one batch that ran together.
#
# Axes: S requests, T steps, N tokens of all requests but their first.


Seconds = tuple[float, ...]


@dataclass(frozen=True)
class Timing:
    """The timing of one served batch, in seconds of the engine's clock.

    Args:
        first_S: from the dispatch of the batch to each request's first token.
        gap_N: between consecutive tokens, request after request.
        wall: from the dispatch to the last token of all.
    """

    first_S: Seconds
    gap_N: Seconds
    wall: float

    @classmethod
    def of(cls, begun: float, step_T: Sequence[float], length_S: Sequence[int]) -> Timing:
        """From clock readings: of the dispatch, and of each step that gave a token to all.

        >>> Timing.of(1.0, [1.5, 2.0, 2.25], [3, 1])
        Timing(first_S=(0.5, 0.5), gap_N=(0.5, 0.25), wall=1.25)
        """
        gap_T = [after - before for before, after in pairwise(step_T)]
        return cls(
            first_S=tuple(step_T[0] - begun for _ in length_S),
            gap_N=tuple(gap for length in length_S for gap in gap_T[: length - 1]),
            wall=step_T[-1] - begun,
        )

    @classmethod
    def of_requests(cls, begun: float, at_ST: Sequence[Sequence[float]]) -> Timing:
        """From clock readings: of the dispatch, and of each token of each request."""
        return cls(
            first_S=tuple(at_T[0] - begun for at_T in at_ST),
            gap_N=tuple(after - before for at_T in at_ST for before, after in pairwise(at_T)),
            wall=max(at_T[-1] for at_T in at_ST) - begun,
        )

    @classmethod
    def join(cls, parts: Sequence[Timing]) -> Timing:
        """Batches that were dispatched at once and ran one after another."""
        return cls(
            tuple(s for part in parts for s in part.first_S),
            tuple(s for part in parts for s in part.gap_N),
            max(part.wall for part in parts),
        )

    @property
    def tokens(self) -> int:
        return len(self.first_S) + len(self.gap_N)
