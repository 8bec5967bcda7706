# Engine `table`: a kernel that is a file of next-token probabilities, with known truth.

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath

import numpy as np
from numpy.typing import NDArray

from servanda.contract.identity import Description, digest_of
from servanda.contract.model import Kernel, Path
from servanda.contract.text_file import content
from servanda.engines.base import CHUNK_ELEMENTS, ENGINES, about_of
from servanda.engines.exact_table import Table
from servanda.errors import MeasurementError
from servanda.theory.divergence.precision import rounded
from servanda.theory.sampling import (
    Floats,
    Ints,
    Sampling,
    columns_of,
    draw,
    likeliest,
    observe,
    processed_logprobs,
    uniforms,
)
from servanda.traces.latency import Timing
from servanda.traces.trace import Batch, Trace

_LARGEST = 64 << 20  # bytes of a table's file


@ENGINES.register("table")
class TableEngine:
    """Draws from a Table and scores by looking up; prefill and decode are the same here."""

    def __init__(self, kernel: Kernel) -> None:
        if kernel.model is None:
            raise MeasurementError(
                "engine 'table' needs a model", hint="write `model: table.json` beside the engine"
            )
        path = FilePath(kernel.model)
        try:
            text = content(path, _LARGEST).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise MeasurementError(
                f"the table {str(path)!r} cannot be read: {error}",
                hint="kernels.*.model of engine 'table' is a JSON file of probabilities",
            ) from None
        self.kernel = kernel
        self.table = Table.parse(text, str(path))
        self.clock: Callable[[], float] = time.perf_counter

    def describe(self) -> Description:
        table = self.table
        return Description(
            fingerprint={
                "engine": "table",
                "order": str(table.order),
                "rows": digest_of(dict(table.rows)),
                **({"seconds": digest_of(vars(table.seconds))} if table.seconds else {}),
            },
            tensors={"policy": digest_of(table.weights)},
            tokens=digest_of(table.tokens),
            vocab_size=len(table.tokens),
            eos=(table.eos,),
            timed=True,
            capture=table.capture,
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        ids = {token: i for i, token in enumerate(self.table.tokens)}
        for text in texts:
            for word in text.split():
                if word not in ids:
                    raise MeasurementError(
                        f"the table has no token {word!r} (prompt {text!r})",
                        hint="prompts of a table are its tokens, parted by blanks",
                    )
        return [[ids[word] for word in text.split()] for text in texts]

    def vocabulary(self) -> list[str]:
        return list(self.table.tokens)

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return [" ".join(self.table.tokens[token] for token in tokens) for tokens in ids]

    def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Trace:
        self._refuse_misfits(batch)
        new: list[list[int]] = [[] for _ in batch.prompts]
        for alive, _, tokens in self._decode(batch, sampling, seed):
            for s, token in zip(alive, tokens.tolist(), strict=True):
                new[s].append(token)
        return self._trace(batch, new, sampling, "decode")

    def steps(self, batch: Batch, sampling: Sampling, seed: int, best: int = 0) -> Iterator[Trace]:
        self._refuse_misfits(batch)
        for alive, rows, token_R in self._decode(batch, sampling, seed):
            length_S = np.zeros(len(batch), dtype=np.int64)
            length_S[alive] = 1
            logp_RV = processed_logprobs(self.table.logits_CV[rows], sampling)
            columns = columns_of(logp_RV, token_R) | likeliest(logp_RV, best)
            yield self._recorded(batch, length_S, token_R, columns, sampling, "decode")

    def score(self, batch: Batch, sampling: Sampling, path: Path) -> Trace:
        self._refuse_misfits(batch)
        return self._trace(batch, batch.continuations, sampling, path)

    def logits(self, batch: Batch, path: Path) -> Iterator[NDArray[np.floating]]:
        self._refuse_misfits(batch)
        rows = self._rows(batch, batch.continuations)
        size = max(1, CHUNK_ELEMENTS // len(self.table.tokens))
        for start in range(0, len(rows), size):
            yield self.table.logits_CV[rows[start : start + size]]

    def time(self, batch: Batch, sampling: Sampling, seed: int, record: bool) -> Timing:
        """By the clock, to which the table's own seconds are added; nobody waits for them."""
        begun, parts, spent = self.clock(), [], 0.0
        for chunk in batch.chunks(self.kernel.batch_size):
            length_S = self.generate(chunk, sampling, seed).length_S.tolist()
            step_T = []
            for step in range(max(length_S)):
                spent += self.table.seconds.of(step, record) if self.table.seconds else 0.0
                step_T.append(self.clock() + spent)
            parts.append(Timing.of(begun, step_T, length_S))
        return Timing.join(parts)

    def close(self) -> None:
        pass

    def _refuse_misfits(self, batch: Batch) -> None:
        """A sequence with a token that the table does not have, by its name."""
        known = range(len(self.table.tokens))
        given = batch.continuations or ((),) * len(batch)
        for sequence, *texts in zip(batch.sequence_S, batch.prompts, given, strict=True):
            odd = [token for text in texts for token in text if token not in known]
            if odd:
                raise MeasurementError(
                    f"sequence {sequence} has the token id {odd[0]}, and the table's ids end at "
                    f"{len(known) - 1}",
                    hint="encode prompts with the tokens of this table",
                )

    def _draw(self, logp_SV: Floats, uniform_S: Floats) -> Ints:
        """The next token of each row, [S], from its processed logprobs; a fault overrides it."""
        return draw(logp_SV, uniform_S)

    def _biased(self, logp_SV: Floats, texts: Sequence[Sequence[int]]) -> Floats:
        """What is drawn from after the texts: what is reported, where no fault overrides it."""
        return logp_SV

    def _decode(
        self, batch: Batch, sampling: Sampling, seed: int
    ) -> Iterator[tuple[list[int], list[int], Ints]]:
        """Step by step: the sequences that have not ended, the table's row of each, its token."""
        logp_CV = processed_logprobs(self.table.logits_CV, sampling)
        draws_SW = np.stack([uniforms(seed, "draw", s, batch.width) for s in batch.sequence_S])
        texts = [[*prompt] for prompt in batch.prompts]
        alive = list(range(len(batch)))
        for step in range(batch.width):
            if not alive:
                return
            rows = [self.table.row_of(texts[s]) for s in alive]
            logp_RV = self._biased(logp_CV[rows], [texts[s] for s in alive])
            token_R = self._draw(logp_RV, draws_SW[alive, step])
            yield alive, rows, token_R
            for s, token in zip(alive, token_R.tolist(), strict=True):
                texts[s].append(token)
            alive = [s for s in alive if texts[s][-1] != self.table.eos]

    def _rows(self, batch: Batch, new: Sequence[Sequence[int]]) -> list[int]:
        keep = self.table.order
        rows = []
        for prompt, tokens in zip(batch.prompts, new, strict=True):
            text = [*prompt, *tokens]
            ends = range(len(prompt), len(text))
            rows += [self.table.row_of(text[max(0, at - keep) : at]) for at in ends]
        return rows

    def _trace(
        self, batch: Batch, new: Sequence[Sequence[int]], sampling: Sampling, path: Path
    ) -> Trace:
        token_N = np.array([t for tokens in new for t in tokens], dtype=np.int64)
        logits_NV = self.table.logits_CV[self._rows(batch, new)]
        length_S = np.array([len(tokens) for tokens in new], dtype=np.int64)
        columns = observe(logits_NV, token_N, sampling)
        return self._recorded(batch, length_S, token_N, columns, sampling, path)

    def _recorded(
        self,
        batch: Batch,
        length_S: Ints,
        token_N: Ints,
        columns: Mapping[str, Floats],
        sampling: Sampling,
        path: Path,
    ) -> Trace:
        capture = self.table.capture
        columns = {
            name: rounded(values_N, capture) if name.startswith("logp") else values_N
            for name, values_N in columns.items()
        }
        about = about_of(batch, self.kernel, path, sampling)
        return Trace.of(batch, length_S, token_N, columns, about)
