# Key aliases: words that a contract may use for a key in place of the stored one.
#
# The reader turns each into the stored key, so that the values and every digest are the same
# whichever is written.  One of the two may be there, not both.

from __future__ import annotations

from collections.abc import Mapping

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
