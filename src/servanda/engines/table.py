# Engine `table`: a kernel that is a file of next-token probabilities, with known truth.

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.identity import Description, digest_of
from servanda.contract.model import Kernel, Path
from servanda.contract.text_file import content
from servanda.engines.base import CHUNK_ELEMENTS, ENGINES
from servanda.engines.decode_loop import stacked
from servanda.engines.exact_table import Table
from servanda.engines.local_engine import DecodingEngine
from servanda.errors import MeasurementError
from servanda.theory.divergence.precision import rounded
from servanda.theory.sampling import Ints, Sampling
from servanda.traces.latency import Timing
from servanda.traces.trace import Batch, Trace

_LARGEST = 64 << 20  # bytes of a table's file


@ENGINES.register("table")
class TableEngine(DecodingEngine):
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
        super().__init__(kernel)
        self.table = table = Table.parse(text, str(path))
        self._description = Description(
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

    def logits(self, batch: Batch, path: Path) -> Iterator[NDArray[np.floating]]:
        for chunk in self._chunks(batch):
            yield from filter(len, self._given_logits(chunk, path))  # none of them rounded

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

    def _chunks(self, batch: Batch) -> list[Batch]:
        """All at once, but for a sequence with a token that the table does not have."""
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
        return [batch]

    def _generate(self, chunk: Batch, sampling: Sampling, seed: int) -> Trace:
        """Drawn without a record, and recorded once: a table's scores are those of its draws."""
        drawn = stacked(self._steps(chunk, sampling, seed, record=False))
        given = self._trace(chunk, *drawn, "decode", sampling).continuations
        return self._score(replace(chunk, continuations=given), sampling, "decode")

    def _decode(self, chunk: Batch) -> Generator[NDArray[np.float64], Ints | None, None]:
        texts = [[*prompt] for prompt in chunk.prompts]
        while True:
            token_S = yield self.table.logits_CV[[self.table.row_of(text) for text in texts]]
            assert token_S is not None  # whoever goes on sends what was drawn
            for text, token in zip(texts, token_S.tolist(), strict=True):
                text.append(token)

    def _prefill(self, chunk: Batch) -> Iterator[NDArray[np.float64]]:
        return self._given_logits(chunk, "prefill")

    def _given_logits(self, chunk: Batch, path: Path) -> Iterator[NDArray[np.float64]]:
        """By looking up: prefill and decode are the same here."""
        keep, rows = self.table.order, []
        for prompt, given in zip(chunk.prompts, chunk.continuations, strict=True):
            text = [*prompt, *given]
            ends = range(len(prompt), len(text))
            rows += [self.table.row_of(text[max(0, at - keep) : at]) for at in ends]
        size = max(1, CHUNK_ELEMENTS // len(self.table.tokens))
        for start in range(0, max(1, len(rows)), size):  # one piece, be it empty
            yield self.table.logits_CV[np.array(rows[start : start + size], dtype=np.int64)]

    def _trace(self, *record: Any) -> Trace:
        trace = super()._trace(*record)
        columns = {
            name: rounded(values_N, self.table.capture) if name.startswith("logp") else values_N
            for name, values_N in trace.columns.items()
        }
        return replace(trace, columns=columns)
