# vLLM's output for each token, as arrays and traces; and a tap on the logits before its sampler.
#
# Nothing here imports vLLM.  Axes: T tokens of one request, K reported tokens beside the
# token itself, V vocabulary.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.theory.sampling import Floats, best_columns
from servanda.traces.trace import Batch, Trace

Rows = NDArray[np.float32]
SequenceRecord = tuple[Sequence[int], Mapping[str, Floats]]  # tokens of a sequence, their columns

KEY = "servanda"  # in SamplingParams.extra_args: which tap is the request's


@dataclass(frozen=True)
class Reported:
    """Logprobs of the top-k tokens at each position, and of the token that stands there.

    Args:
        ids_TK, logp_TK: [T, 1 + K].  The token itself comes first, then the top-k tokens,
            best first: the token is not among them because it is the token (see rank).
    """

    ids_TK: NDArray[np.int64]
    logp_TK: NDArray[np.float64]

    @classmethod
    def of(cls, flat: Any) -> Reported:
        """Of vLLM's FlatLogprobs; positions that it says nothing of have no row.

        The first token of a prompt is such a position: nothing comes before it.
        """
        ends = zip(flat.start_indices, flat.end_indices, strict=True)
        positions = sum(start < end for start, end in ends)
        shape = (positions, len(flat.token_ids) // positions if positions else 1)
        ids = np.array(flat.token_ids, dtype=np.int64).reshape(shape)
        return cls(ids, np.array(flat.logprobs, dtype=np.float64).reshape(shape))

    @classmethod
    def best(cls, logp_TV: Rows, token_T: Sequence[int], k: int) -> Reported:
        """From whole rows: the k most likely, ties by id."""
        order_TK = np.argsort(-logp_TV, axis=-1, kind="stable")[:, :k]
        ids_TK = np.column_stack([np.asarray(token_T, dtype=np.int64), order_TK])
        logp_TK = np.take_along_axis(logp_TV, ids_TK, axis=-1)
        return cls(ids_TK, logp_TK.astype(np.float64))

    def last(self, n: int) -> Reported:
        """The last n positions."""
        start = len(self.ids_TK) - n
        return Reported(self.ids_TK[start:], self.logp_TK[start:])

    def then(self, other: Reported) -> Reported:
        """These positions, followed by others."""
        return Reported(
            np.concatenate([self.ids_TK, other.ids_TK]),
            np.concatenate([self.logp_TK, other.logp_TK]),
        )

    def rows(self, vocab_size: int) -> Rows:
        """Whole rows, [T, V]; NaN where a token was not reported."""
        logp_TV = np.full((len(self.ids_TK), vocab_size), np.nan, dtype=np.float32)
        np.put_along_axis(logp_TV, self.ids_TK, self.logp_TK.astype(np.float32), axis=-1)
        return logp_TV

    def columns(self, k: int) -> dict[str, NDArray[np.float64]]:
        """Columns of a Trace: the token's own, and its k best as "id.0", "logp.0", ..."""
        return {
            "logp": self.logp_TK[:, 0],
            "top1": self.ids_TK[:, 1].astype(np.float64),
            "p_max": np.exp(self.logp_TK[:, 1]),
            **best_columns(self.ids_TK[:, 1 : 1 + k], self.logp_TK[:, 1 : 1 + k]),
        }


@dataclass
class Tap:
    """Sees the logits of one request before its sampler does, and may choose its tokens.

    Args:
        forced: tokens to decode, one a step; none where the sampler is free.
        logp: position -> raw logprobs, [V]: by vLLM's own formula, so that they are bit for
            bit what it reports of a free request.
    """

    forced: Sequence[int] = ()
    logp: dict[int, Rows] = field(default_factory=dict)

    def __call__(self, output_ids: Sequence[int], logits_V: Any) -> Any:
        step = len(output_ids)  # a prompt that comes in pieces is seen more than once: the last
        self.logp[step] = logits_V.float().log_softmax(dim=-1).cpu().numpy()
        if self.forced:
            logits_V.fill_(-np.inf)
            logits_V[self.forced[step]] = 0.0
        return logits_V

    def rows(self, n: int) -> Rows:
        """Of the first n positions, [n, V]."""
        return np.stack([self.logp[step] for step in range(n)])


class TapProcessor:
    """The half of a vLLM logits processor that is ours; the other is its AdapterLogitsProcessor.

    `taps` holds those of the requests that are being served.
    """

    taps: dict[str, Tap]

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Tap | None:
        return self.taps.get((params.extra_args or {}).get(KEY, ""))


def trace_of(
    parts: Sequence[SequenceRecord | None], batch: Batch, about: Mapping[str, str]
) -> Trace:
    """A trace of a batch from its sequences' parts; one that has none is lost."""
    there = [part for part in parts if part is not None]
    names = there[0][1] if there else ("logp",)
    return Trace.of(
        batch,
        [len(part[0]) if part else 0 for part in parts],
        [t for tokens, _ in there for t in tokens],
        {
            name: np.concatenate([np.zeros(0), *(columns[name] for _, columns in there)])
            for name in names
        },
        about,
        lost_S=[part is None for part in parts],
    )
