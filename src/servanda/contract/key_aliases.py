# Key aliases: words that a contract may use for a key in place of the stored one.
#
# The reader turns each into the stored key, so that the values and every digest are the same
# whichever is written.  One of the two may be there, not both.

from __future__ import annotations

from collections.abc import Mapping

from servanda.contract.clause import STAGES

Path = tuple[str | int, ...]

# path of the alias -> the stored key.  Where messages print the alias, RENAMED has it.
RENAMED: Mapping[Path, str] = {
    **{("promotion", stage, "prompt_groups"): "sequences" for stage in STAGES},
    ("routing", "min_users"): "keys",
    ("routing", "scorer_utilisation"): "budget",
}
ALIASES: Mapping[Path, str] = {
    ("kernels", "reference"): "train",
    ("kernels", "candidate"): "infer",
    **RENAMED,
}
_PRINTED: Mapping[Path, str] = {
    (*path[:-1], stored): str(path[-1]) for path, stored in RENAMED.items()
}


def stored_key(path: Path) -> str | int:
    """The key that the last part of a path means.

    >>> stored_key(("routing", "min_users")), stored_key(("routing", "keys"))
    ('keys', 'keys')
    """
    return ALIASES.get(path, path[-1])


def printed_key(path: Path) -> str | int:
    """The last part of a path as messages print it.

    >>> printed_key(("promotion", "offline", "sequences")), printed_key(("routing", "mode"))
    ('prompt_groups', 'mode')
    """
    return _PRINTED.get(path, path[-1])
