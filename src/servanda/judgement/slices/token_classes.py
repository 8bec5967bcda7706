# Classes of tokens: what a token is, seen from its text alone.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from servanda.judgement.slices.rules import TOKEN_CLASSES

# how tokenizers write a blank and a line end inside a token
_BLANKS = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n", "ĉ": "\t"})


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
