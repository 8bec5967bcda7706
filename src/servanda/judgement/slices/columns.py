# The columns of slices: field of a contract -> its value at every token; and the class of a token
# by its text.

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

# tokenizers' marks for a blank and a newline inside a token
_BLANKS = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n", "ĉ": "\t"})


def columns(
    pair: TracePair, prompts: Sequence[Prompt], fields: Collection[str]
) -> dict[str, Array]:
    """Values of the given fields, each [N]; numbers that were not recorded are NaN.

    Args:
        prompts: prompt of each sequence of the pair.
    """
    trace = pair.infer
    values: dict[str, Array] = {}
    for field in fields:
        if field == "context.position":
            values[field] = pair.position_N.astype(np.float64)
        elif field == "request.prompt_tokens":
            values[field] = np.repeat(trace.prompt_tokens_S, trace.length_S).astype(np.float64)
        elif field in FIELDS:
            values[field] = column(field, trace.columns, len(trace.token_N))
        else:
            label = field.removeprefix(LABEL)
            label_S = np.array([p.labels.get(label) for p in prompts], dtype=object)
            values[field] = np.repeat(label_S, trace.length_S)
    return values


def class_of(token: str) -> str:
    """The class of a token's first character that is not blank.

    >>> [class_of(t) for t in ("Ġthe", "42", "▁", "),", "é", "")]
    ['letter', 'digit', 'space', 'punctuation', 'letter', 'other']
    """
    text = token.translate(_BLANKS)
    if not text:
        return "other"
    first = (text.strip() or " ")[0]
    if first.isspace():
        return "space"
    if first.isdigit():
        return "digit"
    if first.isalpha():
        return "letter"
    return "punctuation" if first.isprintable() and first.isascii() else "other"


def codes(vocabulary: Sequence[str], ends: Sequence[int]) -> NDArray[np.float64]:
    """Index into TOKEN_CLASSES of every token id, [V]; the ids that end a sequence are "end"."""
    code_V = np.array(
        [TOKEN_CLASSES.index(class_of(token)) for token in vocabulary], dtype=np.float64
    )
    code_V[list(ends)] = TOKEN_CLASSES.index("end")
    return code_V
