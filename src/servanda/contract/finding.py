# A finding of a lint rule: the path of the value, the problem, and the hint.
#
# A contract may use an alias for a key in place of the stored one.  The reader turns each into the
# stored key, so that the values and every digest are the same whichever is written.  One of the two
# may be there, not both.

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

Path = tuple[str | int, ...]

# path of the alias -> the stored key
ALIASES: Mapping[Path, str] = {
    ("kernels", "reference"): "train",
    ("kernels", "candidate"): "infer",
}


def stored_key(path: Path) -> str | int:
    """The key that the last part of a path means.

    >>> stored_key(("kernels", "reference")), stored_key(("kernels", "train"))
    ('train', 'train')
    """
    return ALIASES.get(path, path[-1])


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
