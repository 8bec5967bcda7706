# History: the top-k tokens of a position that occurred before in the text.
#
# A set of ids defined by the text so far has a known mass before the next token is sampled, and so
# does its part among the top-k tokens, whose logprobs are recorded.  Samplers that depend on
# history (repetition, presence and frequency penalties, no-repeat n-grams) sample these sets less
# often than their mass.  Axes: S sequences, N tokens of all sequences, concatenated, K top-k
# tokens.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from servanda.traces.trace import Array, Trace

SETS = {
    "text": "ids that the prompt or the response has had already",
    "answer": "ids that the response has had already",
    "often": "ids that the text has had three times or more",
    "ngram": "ids that would repeat three tokens in a row",
}
_PREFIX = "in."
_GRAM = 3
_OFTEN = 3
_BITS = 52  # whole numbers that a float64 column holds exactly


def with_history(trace: Trace, prompts: Sequence[Sequence[int]]) -> Trace:
    """The trace with a column for each set: bit k is set if top-k token k is in it.

    A trace without top-k tokens is returned unchanged.

    Args:
        prompts: token ids of each sequence of the trace.
    """
    if trace.best is None or not len(trace.token_N):
        return trace
    ids_NK = trace.best[0][:, :_BITS]
    power_K = 2.0 ** np.arange(ids_NK.shape[1])
    sets = _sets(trace, ids_NK, prompts)
    columns = {f"{_PREFIX}{name}": in_NK @ power_K for name, in_NK in sets.items()}
    return replace(trace, columns={**trace.columns, **columns})


def sets_of(trace: Trace, name: str) -> Array | None:
    """The mask of top-k tokens in a set, [N, K]; None if not recorded.

    Unknown (NaN, for a lost token) counts as in none.
    """
    column_N = trace.columns.get(f"{_PREFIX}{name}")
    if column_N is None or trace.best is None:
        return None
    k = trace.best[0].shape[1]
    bits_N = np.nan_to_num(column_N).astype(np.int64)
    return (bits_N[:, None] >> np.arange(k).clip(max=_BITS)) & 1 == 1


def _sets(trace: Trace, ids_NK: Array, prompts: Sequence[Sequence[int]]) -> dict[str, Array]:
    """Set -> mask of top-k tokens in it, [N, K]."""
    texts = [[*p, *a] for p, a in zip(prompts, trace.continuations, strict=True)]
    length_S = np.array([len(text) for text in texts])
    token_M = np.array([token for text in texts for token in text], dtype=np.int64)
    sequence_M = np.repeat(np.arange(len(texts)), length_S)
    place_M = np.arange(len(token_M)) - np.repeat(np.cumsum(length_S) - length_S, length_S)
    prompt_S = length_S - trace.length_S
    row_N = np.repeat(np.arange(len(texts)), trace.length_S)
    start_N = np.repeat(np.cumsum(trace.length_S) - trace.length_S, trace.length_S)
    place_N = np.arange(len(row_N)) - start_N + prompt_S[row_N]
    # the code of the preceding tokens, if there are enough
    before_M = np.full(len(token_M), -1, dtype=np.int64)
    if len(token_M) >= _GRAM:
        grams = np.stack(
            [sequence_M[_GRAM - 1 :], *(token_M[i : i + len(token_M) - _GRAM + 1] for i in (0, 1))]
        )
        _, before_M[_GRAM - 1 :] = np.unique(grams, axis=1, return_inverse=True)
    before_M[place_M < _GRAM - 1] = -1
    drawn_M = place_M >= prompt_S[sequence_M]
    met = _counts(sequence_M, token_M, place_M, row_N, ids_NK, place_N)
    asked = _counts(sequence_M, token_M, place_M, row_N, ids_NK, prompt_S[row_N])
    follows_N = before_M[drawn_M]
    repeated = _counts(before_M, token_M, place_M, follows_N, ids_NK, place_N)
    return {
        "text": met > 0,
        "answer": met > asked,
        "often": met >= _OFTEN,
        "ngram": (repeated > 0) & (follows_N >= 0)[:, None],
    }


def _counts(
    group_M: Array, token_M: Array, place_M: Array, group_N: Array, ids_NK: Array, place_N: Array
) -> Array:
    """The count of each id in its group before a place, [N, K]."""
    size = int(max(token_M.max(), ids_NK.max())) + 2
    room = int(place_M.max()) + 2
    key_M = np.sort(((group_M + 1) * size + token_M + 1) * room + place_M)
    base_NK = ((group_N + 1)[:, None] * size + ids_NK + 1) * room
    upto_NK = np.searchsorted(key_M, base_NK + place_N[:, None])
    return upto_NK - np.searchsorted(key_M, base_NK)
