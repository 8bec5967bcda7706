# The columns that slices are cut by: field of a contract -> its value at every token.

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.corpus import Prompt
from servanda.slices import LABEL
from servanda.token_classes import CLASSES
from servanda.trace import TracePair

Array = NDArray[Any]

# fields that are columns of the infer kernel's trace, and their names there
_RECORDED = {
    "context.entropy_nats": "entropy_nats",
    "context.p_max": "p_max",
    "context.previous_class": "previous_class",
    "outcome.rank": "rank",
    "outcome.logp_nats": "logp",
    "outcome.token_class": "token_class",
}
CLASS_FIELDS = ("context.previous_class", "outcome.token_class")
NUMBER_FIELDS = (
    "request.prompt_tokens",
    "context.position",
    *(field for field in _RECORDED if field not in CLASS_FIELDS),
)


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
        elif field in _RECORDED:
            unrecorded_N = np.full(len(trace.token_N), np.nan)
            value_N = trace.columns.get(_RECORDED[field], unrecorded_N)
            found[field] = _names(value_N) if field in CLASS_FIELDS else value_N
        else:
            label = field.removeprefix(LABEL)
            label_S = np.array([p.labels.get(label) for p in prompts], dtype=object)
            found[field] = np.repeat(label_S, trace.length_S)
    return found


def _names(code_N: Array) -> Array:
    """Codes of token classes as their names; None where not recorded."""
    name_N = np.full(len(code_N), None, dtype=object)
    known_N = ~np.isnan(code_N)
    name_N[known_N] = np.array(CLASSES, dtype=object)[code_N[known_N].astype(np.int64)]
    return name_N
