# The columns of slices: field of a contract -> its value at every token; and the class of a token
# by its text.

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.judgement.slices.rules import FIELDS, LABEL, TOKEN_CLASSES, column, modulo
from servanda.theory.divergence.routes import router_flip
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
    values: dict[str, Array] = {}
    for field in fields:
        base, modulus = modulo(field)
        if base in FIELDS:
            value_N = _recorded(pair, base)
            values[field] = value_N if modulus is None else value_N % modulus
        else:
            label = field.removeprefix(LABEL)
            label_S = np.array([p.labels.get(label) for p in prompts], dtype=object)
            values[field] = np.repeat(label_S, pair.infer.length_S)
    return values


def _recorded(pair: TracePair, field: str) -> Array:
    trace = pair.infer
    if field == "context.position":
        return pair.position_N.astype(np.float64)
    if field == "outcome.from_end":
        return np.repeat(trace.length_S, trace.length_S) - 1.0 - pair.position_N
    if field == "request.prompt_tokens":
        return np.repeat(trace.prompt_tokens_S, trace.length_S).astype(np.float64)
    if field == "context.row":
        return np.repeat(trace.sequence_S, trace.length_S).astype(np.float64)
    train_NLK, infer_NLK = pair.train.routes, trace.routes
    if field == "outcome.flipped_layers" and train_NLK is not None and infer_NLK is not None:
        return router_flip(train_NLK, infer_NLK) * infer_NLK.shape[1]
    if field == "outcome.token_id":
        return np.where(trace.token_N < 0, np.nan, trace.token_N)
    return column(field, trace.columns, len(trace.token_N))


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
