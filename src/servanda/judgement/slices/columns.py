# The columns that slices are cut by: field of a contract -> its value at every token.

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.judgement.slices.rules import FIELDS, LABEL, TOKEN_CLASSES, column
from servanda.traces.corpus import Prompt
from servanda.traces.trace import TracePair

Array = NDArray[Any]

CLASS_FIELDS = frozenset(name for name, f in FIELDS.items() if f.values == TOKEN_CLASSES)


def columns(
    pair: TracePair, prompts: Sequence[Prompt], fields: Collection[str]
) -> dict[str, Array]:
    """Values of the given fields, each [N]; numbers that were not recorded are NaN.

    Args:
        prompts: of each sequence of the pair.
    """
    trace = pair.infer
    found: dict[str, Array] = {}
    for field in fields:
        if field == "context.position":
            found[field] = pair.position_N.astype(np.float64)
        elif field == "request.prompt_tokens":
            found[field] = np.repeat(trace.prompt_tokens_S, trace.length_S).astype(np.float64)
        elif field in FIELDS:
            found[field] = column(field, trace.columns, len(trace.token_N))
        else:
            label = field.removeprefix(LABEL)
            label_S = np.array([p.labels.get(label) for p in prompts], dtype=object)
            found[field] = np.repeat(label_S, trace.length_S)
    return found
