# The probe tokens of a run: many short rows, because a row is the unit of the statistics.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servanda.errors import ContractError
from servanda.rl.sync_drill.vocabulary import drawn, named_ids, size_of

ROWS, TOKENS = 64, 11  # 640 scored tokens
FEWEST = 24  # rows; with fewer, no interval is finite for long


def rows_of(source: Any, seed: int = 0) -> list[list[int]]:
    """The rows that both sides score.

    Args:
        source: rows of token ids; or a torch module, or the size of its vocabulary, for which 640
            tokens are drawn, evenly over the vocabulary.

    Raises:
        ContractError: too few rows, a row without a scored token, other values than token ids, or
            no known vocabulary.
    """
    if not isinstance(source, Sequence):
        size = source if isinstance(source, int) else size_of(source)
        if size is None:
            raise ContractError(
                f"the vocabulary size of {type(source).__name__} is unknown, so no probe tokens "
                "can be chosen",
                hint="pass rows of token ids, or the size of the vocabulary",
            )
        named = [] if isinstance(source, int) else named_ids(source, size)
        return drawn(size, named, ROWS, TOKENS, seed)
    try:
        rows = [[int(token) for token in row] for row in source]
    except (TypeError, ValueError):
        raise ContractError(
            "the probe tokens are not rows of token ids",
            hint="pass rows such as [[1, 2, 3], ...], a module, or the size of its vocabulary",
        ) from None
    short = next((i for i, row in enumerate(rows, 1) if len(row) < 2), None)
    if short is not None:
        raise ContractError(
            f"row {short} of the probe tokens has {len(rows[short - 1])}: the first token of a row "
            "is not scored",
            hint="use rows of two tokens or more",
        )
    if len(rows) < FEWEST:
        raise ContractError(
            f"{len(rows)} rows of probe tokens, and at least {FEWEST} are needed: a row is the "
            "unit of the statistics",
            hint=f"use many short rows; {ROWS} rows of {TOKENS} tokens are enough",
        )
    return rows
