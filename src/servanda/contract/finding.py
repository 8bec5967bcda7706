# A finding of a lint rule: the value, the problem, and the hint.

from __future__ import annotations

from typing import NamedTuple

from servanda.contract.key_aliases import Path


class Finding(NamedTuple):
    """A problem without its place in the text.

    Args:
        key: whether its place is that of the key; bare: whether its line is hidden, because it may
            contain a secret.
    """

    path: Path
    message: str
    hint: str = ""
    key: bool = False
    bare: bool = False
