# An engine that decodes in this process: what draws, scores and times, once a library gives
# the logits.
#
# The shapes it runs at are fixed by the launch, never by how long sequences turn out to be.
# Ended rows are stepped on until the last has ended.  Where a library wants rows of one length,
# decoding pads prompts on the left.
# Prefill of padded rows pads on the right, to the longest prompt plus batch.width; its last
# column is always padding, since nothing follows a sequence's last token.
# Axes: S rows of a chunk, T columns that are fed, W new tokens, N tokens of all sequences
# one after another, R rows of logits, V vocabulary, K best.

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.identity import Description
from servanda.contract.model import Kernel, Path
from servanda.engines.base import CHUNK_ELEMENTS, about_of, refuse_misfits
from servanda.theory.sampling import (
    Floats,
    Ints,
    Sampling,
    columns_of,
    draw,
    likeliest,
    processed_logprobs,
    uniforms,
)
from servanda.traces.trace import Array, Batch, Timing, Trace

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
    draw: Callable[[Floats, Floats], Ints],
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
        draw: the next token of each row, [S], from its logprobs and its uniform.
        ends: ids that end a row.
        pad: what ended rows are fed.
        best: how many of the most likely tokens are recorded as well.
    """
    uniform_SW = np.stack([uniforms(seed, "draw", s, chunk.width) for s in chunk.sequence_S])
    ends, fed_S = [*ends], None
    open_S = np.ones(len(chunk), dtype=bool)
    for t in range(chunk.width):
        logp_SV = logp_after(fed_S)
        token_S = draw(logp_SV, uniform_SW[:, t])
        columns = columns_of(logp_SV, token_S) if record else {}
        yield Step(token_S, open_S, columns | likeliest(logp_SV, best))
        fed_S = np.where(open_S, token_S, pad)
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


class LocalEngine(ABC):
    """Draws by real decoding with a cache; scores by decoding or by prefill.

    The logits of kernel.batch_size scored sequences are in memory at a time.  They are arrays
    of the library's own (`Any` below), which can be indexed like those of numpy.  Who wraps the
    engine may override `_draw`.
    """

    _description: Description

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.clock: Callable[[], float] = time.perf_counter

    def describe(self) -> Description:
        return self._description

    def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Trace:
        return Trace.join([self._generate(c, sampling, seed) for c in self._chunks(batch)])

    def steps(self, batch: Batch, sampling: Sampling, seed: int, best: int = 0) -> Iterator[Trace]:
        for chunk in self._chunks(batch):
            for step in self._steps(chunk, sampling, seed, best=best):
                yield self._trace(chunk, *step.record, "decode", sampling)

    def score(self, batch: Batch, sampling: Sampling, path: Path) -> Trace:
        return Trace.join([self._score(c, sampling, path) for c in self._chunks(batch)])

    def logits(self, batch: Batch, path: Path) -> Iterator[NDArray[np.float32]]:
        for chunk in self._chunks(batch):
            for logits_RV in self._given_logits(chunk, path):
                if len(logits_RV):
                    yield self._numpy(logits_RV).astype(np.float32, copy=False)

    def time(self, batch: Batch, sampling: Sampling, seed: int, record: bool) -> Timing:
        chunks = self._chunks(batch)  # requests beyond the batch size wait
        begun = self.clock()
        return Timing.join([self._timed(chunk, sampling, seed, record, begun) for chunk in chunks])

    # what a library has to give

    @abstractmethod
    def _decode(self, chunk: Batch) -> Generator[Any, Ints | None, None]:
        """Yields logits of the next token, [S, V], and is sent the tokens to go on with."""

    @abstractmethod
    def _prefill(self, chunk: Batch) -> Iterator[Any]:
        """Logits before each given token, as `_given_logits` has them, of whole texts."""

    # and what it gives besides where its arrays are not those of numpy

    def _stack(self, logits_TSV: Sequence[Any]) -> Any:
        """The logits of single steps as [S, T, V]."""
        return np.stack(logits_TSV, axis=1)

    def _numpy(self, logits: Any) -> NDArray[np.floating]:
        """The same numbers, none of them rounded."""
        return logits

    # how it runs

    def _chunks(self, batch: Batch) -> list[Batch]:
        """What runs together, of a batch that can run."""
        refuse_misfits(batch, self._description)
        return batch.chunks(self.kernel.batch_size)

    @property
    def _pad(self) -> int:
        eos = self._description.eos
        return eos[0] if eos else 0

    def _left_padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
        """Ids and mask, [S, T] each, to decode from."""
        width = max(map(len, prompts))
        ids_ST = np.array([[self._pad] * (width - len(p)) + [*p] for p in prompts])
        return ids_ST, np.array([[0] * (width - len(p)) + [1] * len(p) for p in prompts])

    def _right_padded(self, chunk: Batch) -> tuple[Ints, Ints, int]:
        """Ids and mask, [S, T] each, to prefill with, and of how many columns logits are asked."""
        texts = [
            [*prompt, *given[:-1]]
            for prompt, given in zip(chunk.prompts, chunk.continuations, strict=True)
        ]
        shortest, longest = min(map(len, chunk.prompts)), max(map(len, chunk.prompts))
        width = longest + chunk.width
        ids_ST = np.array([text + [self._pad] * (width - len(text)) for text in texts])
        mask_ST = np.array([[1] * len(t) + [0] * (width - len(t)) for t in texts])
        return ids_ST, mask_ST, width - shortest + 1

    def _draw(self, logp_SV: Floats, uniform_S: Floats) -> Ints:
        """The next token of each row, [S], from its processed logprobs."""
        return draw(logp_SV, uniform_S)

    def _logprobs(self, logits_RV: Any, sampling: Sampling) -> Floats:
        """Processed logprobs in float64; a logit that is no number makes NaN, quietly."""
        with np.errstate(invalid="ignore"):
            return processed_logprobs(self._numpy(logits_RV), sampling)

    def _steps(self, chunk: Batch, sampling: Sampling, seed: int, **options: Any) -> Iterator[Step]:
        """Draws a chunk, step by step; `kept` says what is recorded, see `decoded`."""
        decode, ends = self._decode(chunk), self._description.eos
        return decoded(
            lambda fed_S: self._logprobs(decode.send(fed_S), sampling),
            self._draw,
            *(chunk, seed, ends, self._pad),
            **options,
        )

    def _generate(self, chunk: Batch, sampling: Sampling, seed: int) -> Trace:
        record = stacked(self._steps(chunk, sampling, seed))
        return self._trace(chunk, *record, "decode", sampling)

    def _timed(
        self, chunk: Batch, sampling: Sampling, seed: int, record: bool, begun: float
    ) -> Timing:
        steps, step_T = [], []
        for step in self._steps(chunk, sampling, seed, record=record):
            steps.append(step)
            step_T.append(self.clock())
        length_S, _, _ = stacked(steps)
        return Timing.of(begun, step_T, length_S.tolist())

    def _score(self, chunk: Batch, sampling: Sampling, path: Path) -> Trace:
        token_N = np.array([t for given in chunk.continuations for t in given], dtype=np.int64)
        parts, start = [], 0
        for logits_RV in self._given_logits(chunk, path):
            token_R = token_N[start : start + len(logits_RV)]
            parts.append(self._columns(logits_RV, token_R, sampling))
            start += len(logits_RV)
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        length_S = np.array([len(given) for given in chunk.continuations])
        return self._trace(chunk, length_S, token_N, columns, path, sampling)

    def _columns(self, logits_RV: Any, token_R: Ints, sampling: Sampling) -> dict[str, Floats]:
        """The record of given tokens, [R] each, from the logits before them."""
        return columns_of(self._logprobs(logits_RV, sampling), token_R)

    def _given_logits(self, chunk: Batch, path: Path) -> Iterator[Any]:
        """Logits before each given token, sequence by sequence, in one piece [R, V] or more."""
        if path == "prefill":
            return self._prefill(chunk)
        return self._pieces(chunk, self._forced(chunk), path)

    def _after_prompts(self, chunk: Batch, logits_STV: Any) -> Iterator[Any]:
        """The same, of one forward over `_right_padded`: column 0 follows the shortest prompt."""
        return self._pieces(chunk, logits_STV, "prefill")

    def _places(self, chunk: Batch, path: Path) -> tuple[Ints, Ints]:
        """Row and column, [N] each, of the logits before each given token."""
        length_S = np.array([len(given) for given in chunk.continuations])
        row_N = np.repeat(np.arange(len(chunk)), length_S)
        position_N = np.arange(len(row_N)) - np.repeat(length_S.cumsum() - length_S, length_S)
        prompt_S = np.array([len(prompt) for prompt in chunk.prompts])
        first_S = prompt_S - prompt_S.min() if path == "prefill" else np.zeros_like(prompt_S)
        return row_N, first_S[row_N] + position_N

    def _pieces(self, chunk: Batch, logits_STV: Any, path: Path) -> Iterator[Any]:
        """The same, in pieces of a limited size."""
        row_N, column_N = self._places(chunk, path)
        rows = max(1, CHUNK_ELEMENTS // self._description.vocab_size)
        for start in range(0, max(1, len(row_N)), rows):  # one piece, be it empty
            piece = slice(start, start + rows)
            yield logits_STV[row_N[piece], column_N[piece]]

    def _forced(self, chunk: Batch) -> Any:
        """Logits [S, T, V] of decoding the given tokens, just as `generate` ran."""
        given_SW = np.full((len(chunk), chunk.width), self._pad)
        for row, given in enumerate(chunk.continuations):
            given_SW[row, : len(given)] = given
        decode, steps = self._decode(chunk), max(map(len, chunk.continuations))
        logits_TSV = [next(decode)]
        logits_TSV += [decode.send(given_SW[:, t]) for t in range(steps - 1)]
        return self._stack(logits_TSV)

    def _trace(
        self,
        chunk: Batch,
        length_S: Array,
        token_N: Array,
        columns: Mapping[str, Floats],
        path: Path,
        sampling: Sampling,
    ) -> Trace:
        about = about_of(chunk, self.kernel, path, sampling)
        return Trace.of(chunk, length_S, token_N, columns, about)
