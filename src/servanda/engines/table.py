# Engine `table`: a kernel that is a file of next-token probabilities, with known truth.
#
# A table gives the next-token distribution after the last `order` tokens.  Two tables over
# one vocabulary stand for two kernels at identical weights.

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.identity import Description, digest_of
from servanda.contract.model import Kernel, Path
from servanda.contract.text_file import content
from servanda.engines.base import CHUNK_ELEMENTS, ENGINES
from servanda.engines.local_engine import LocalEngine, stacked
from servanda.errors import MeasurementError
from servanda.theory.divergence.precision import CAPTURES, rounded
from servanda.theory.sampling import Ints, Sampling
from servanda.traces.json_fields import words
from servanda.traces.trace import Batch, Timing, Trace

_SUM_SLACK = 1e-9  # rows written as decimals need not add up to the last bit
_LARGEST = 64 << 20  # bytes of a table's file


@dataclass(frozen=True)
class Seconds:
    """What a table kernel says its tokens take: the first, each next, and recording one."""

    first: float = 0.0
    next: float = 0.0
    record: float = 0.0

    def of(self, step: int, record: bool) -> float:
        return (self.next if step else self.first) + (self.record if record else 0.0)


@dataclass(frozen=True)
class Table:
    """Next-token distributions by context.

    Args:
        tokens: the vocabulary; the last `order` tokens joined by a blank name a context.
        eos: id of the token that ends a sequence.
        order: how many tokens of context a row sees.
        rows: context -> probabilities, [V]; the longest known suffix of a context is used,
            and "" must be there.
        weights: name of the policy that this table evaluates.
        capture: the format that its logprobs are recorded in: rounded to it, for drills.
        seconds: how long it claims to take, for drills; None: what the clock says.
    """

    tokens: tuple[str, ...]
    eos: int
    order: int
    rows: Mapping[str, tuple[float, ...]]
    weights: str = "table"
    capture: str = "float64"
    seconds: Seconds | None = None

    @classmethod
    def parse(cls, text: str, file: str) -> Table:
        """From JSON: {"tokens": [...], "eos": "...", "order": 1, "rows": {"": [...]}, ...}.

        Raises:
            MeasurementError: not JSON, a key is missing, or a row is no distribution.
        """
        try:
            data = json.loads(text)
            tokens = tuple(map(str, data["tokens"]))
            rows = {str(c): tuple(map(float, row)) for c, row in data["rows"].items()}
            table = cls(
                tokens,
                tokens.index(data["eos"]),
                int(data.get("order", 1)),
                rows,
                str(data.get("weights", "table")),
                str(data.get("capture", "float64")),
                Seconds(**data["seconds"]) if "seconds" in data else None,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MeasurementError(
                f"{file}: not a table of next-token probabilities ({words(repr(error))})",
                hint='{"tokens": ["a", "."], "eos": ".", "order": 1, "rows": {"": [0.9, 0.1]}}',
            ) from None
        table._check(file)
        return table

    def _check(self, file: str) -> None:
        if self.capture not in CAPTURES:
            raise MeasurementError(
                f"{file}: logprobs cannot be recorded as {words(repr(self.capture))}",
                hint=f"capture is one of {', '.join(CAPTURES)}",
            )
        if "" not in self.rows:
            raise MeasurementError(f"{file}: the table has no row '' for unknown contexts")
        for context, row in self.rows.items():
            name = words(repr(context))
            if len(row) != len(self.tokens):
                raise MeasurementError(
                    f"{file}: row {name} has {len(row)} values for {len(self.tokens)} tokens"
                )
            if not all(p >= 0 for p in row) or abs(math.fsum(row) - 1) > _SUM_SLACK:
                raise MeasurementError(
                    f"{file}: row {name} is no distribution (sum {words(repr(math.fsum(row)))})"
                )

    @cached_property
    def contexts(self) -> Mapping[str, int]:
        return {context: i for i, context in enumerate(self.rows)}

    @cached_property
    def logits_CV(self) -> NDArray[np.float64]:
        """log p of every row, [C, V]; -inf where p = 0."""
        with np.errstate(divide="ignore"):
            return np.log(np.array(list(self.rows.values())))

    def row_of(self, prefix: Sequence[int]) -> int:
        """Index of the row that follows a prefix of token ids."""
        for keep in range(min(self.order, len(prefix)), 0, -1):
            name = " ".join(self.tokens[t] for t in prefix[-keep:])
            if name in self.contexts:
                return self.contexts[name]
        return self.contexts[""]


@ENGINES.register("table")
class TableEngine(LocalEngine):
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
        """By the clock, to which the table's own seconds are added; no one waits for them."""
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
        record = stacked(self._steps(chunk, sampling, seed, record=False))
        drawn = self._trace(chunk, *record, "decode", sampling)
        given = replace(chunk, continuations=drawn.continuations)
        return self._score(given, sampling, "decode")

    def _decode(self, chunk: Batch) -> Generator[NDArray[np.float64], Ints | None, None]:
        texts = [[*prompt] for prompt in chunk.prompts]
        while True:
            token_S = yield self.table.logits_CV[[self.table.row_of(text) for text in texts]]
            assert token_S is not None  # anyone who goes on sends what was drawn
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

    def _trace(self, *record: Any, **named: Any) -> Trace:
        trace = super()._trace(*record, **named)
        columns = {
            name: rounded(values_N, self.table.capture) if name.startswith("logp") else values_N
            for name, values_N in trace.columns.items()
        }
        return replace(trace, columns=columns)
