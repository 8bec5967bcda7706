# Decoding, step by step: what is drawn, what is recorded of it, and when a row has ended.
#
# Ended rows are stepped on until the last has ended, so that the shape of a step is that of
# the launch; what they draw is thrown away.
# Axes: S rows of a chunk, V vocabulary, N tokens of all rows one after another, K best.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from servanda.theory.sampling import Floats, Ints, columns_of, likeliest, uniforms
from servanda.traces.trace import Array, Batch

Record = tuple[Array, Array, Mapping[str, Array]]  # length_S, token_N, columns


@dataclass(frozen=True)
class Step:
    """One token of each row.

    Args:
        token_S: what was drawn, of ended rows too.
        open_S: whether a row had not ended before this step.
        columns: the record of each token, [S].
    """

    token_S: Ints
    open_S: Array
    columns: Mapping[str, Array]

    @property
    def record(self) -> Record:
        """As a trace has it: rows that had ended have no token."""
        columns = {name: values_S[self.open_S] for name, values_S in self.columns.items()}
        return self.open_S.astype(np.int64), self.token_S[self.open_S], columns


def decoded(
    logp_after: Callable[[Ints | None], Floats],
    draw: Callable[[Floats, Floats, Sequence[Sequence[int]]], Ints],
    chunk: Batch,
    seed: int,
    ends: Iterable[int],
    pad: int,
    *,
    record: bool = True,
    best: int = 0,
) -> Iterator[Step]:
    """Draws a chunk; a step is handed on once all of it is known, and recorded.

    Args:
        logp_after: processed logprobs of the next token, [S, V], after the tokens that each
            row is fed; None before the first.
        draw: the next token of each row, [S], from its logprobs, its uniform and its text so far.
        ends: ids that end a row.
        pad: what ended rows are fed.
        best: how many of the likeliest tokens are recorded as well.
    """
    uniform_SW = np.stack([uniforms(seed, "draw", s, chunk.width) for s in chunk.sequence_S])
    ends, fed_S, texts = [*ends], None, [[*prompt] for prompt in chunk.prompts]
    open_S = np.ones(len(chunk), dtype=bool)
    for t in range(chunk.width):
        logp_SV = logp_after(fed_S)
        token_S = draw(logp_SV, uniform_SW[:, t], texts)
        columns = columns_of(logp_SV, token_S) if record else {}
        yield Step(token_S, open_S, columns | likeliest(logp_SV, best))
        fed_S = np.where(open_S, token_S, pad)
        for text, token in zip(texts, fed_S.tolist(), strict=True):
            text.append(token)
        open_S = open_S & ~np.isin(token_S, ends)
        if not open_S.any():
            return


def stacked(steps: Iterable[Step]) -> Record:
    """The record of a whole chunk, row after row."""
    step_T = [*steps]
    open_ST = np.stack([step.open_S for step in step_T], axis=1)
    token_ST = np.stack([step.token_S for step in step_T], axis=1)
    columns = {
        name: np.stack([step.columns[name] for step in step_T], axis=1)[open_ST]
        for name in step_T[0].columns
    }
    return open_ST.sum(axis=1), token_ST[open_ST], columns
