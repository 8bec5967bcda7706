# What a rule of lint says: which value, what was found, the next move.

from __future__ import annotations

from typing import NamedTuple

from servanda.contract.yaml_reader import Path


class Finding(NamedTuple):
    """A problem before it has a place.

    Args:
        key: the place is that of the key; bare: its line is not shown, for it may hold a secret.
    """

    path: Path
    message: str
    hint: str = ""
    key: bool = False
    bare: bool = False
