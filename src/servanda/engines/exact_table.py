# Explicit next-token tables: kernels whose every divergence is known exactly.
#
# A table gives the next-token distribution after the last `order` tokens.  Two tables over
# one vocabulary stand for two kernels at identical weights.

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from servanda.errors import MeasurementError
from servanda.theory.divergence.precision import CAPTURES

Floats = NDArray[np.float64]
_SUM_SLACK = 1e-9  # rows written as decimals need not add up to the last bit


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
                f"{file}: not a table of next-token probabilities ({error!r})",
                hint='{"tokens": ["a", "."], "eos": ".", "order": 1, "rows": {"": [0.9, 0.1]}}',
            ) from None
        table._check(file)
        return table

    def _check(self, file: str) -> None:
        if self.capture not in CAPTURES:
            raise MeasurementError(
                f"{file}: logprobs cannot be recorded as {self.capture!r}",
                hint=f"capture is one of {', '.join(CAPTURES)}",
            )
        if "" not in self.rows:
            raise MeasurementError(f"{file}: the table has no row '' for unknown contexts")
        for context, row in self.rows.items():
            if len(row) != len(self.tokens):
                raise MeasurementError(
                    f"{file}: row {context!r} has {len(row)} values for {len(self.tokens)} tokens"
                )
            if not all(p >= 0 for p in row) or abs(math.fsum(row) - 1) > _SUM_SLACK:
                raise MeasurementError(
                    f"{file}: row {context!r} is no distribution (sum {math.fsum(row)!r})"
                )

    @cached_property
    def contexts(self) -> Mapping[str, int]:
        return {context: i for i, context in enumerate(self.rows)}

    @cached_property
    def logits_CV(self) -> Floats:
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
