# Files as a revision of git has them.

from __future__ import annotations

import subprocess
from pathlib import Path

from servanda.errors import ContractError


def file_at(revision: str, file: Path) -> bytes | None:
    """The bytes of a file at a revision; None if it is not there, or there is no commit yet.

    Args:
        revision: a name of a commit, such as HEAD or origin/main.

    Raises:
        ContractError: git is not installed, the file lies in no repository, or no commit has that
            name.
    """
    folder = file.parent
    if _git(folder, "rev-parse", "--is-inside-work-tree") is None:
        raise ContractError(
            f"{file} lies in no repository of git", hint="servanda contract diff OLD NEW"
        )
    commit = None
    if not revision.startswith("-"):  # which would be an option of git
        commit = _git(folder, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if commit is None:
        if revision == "HEAD":
            return None
        raise ContractError(
            f"git knows no commit {revision!r}",
            hint=f"fetch it first: git fetch origin {revision.removeprefix('origin/')}",
        )
    return _git(folder, "cat-file", "blob", f"{commit.decode().strip()}:./{file.name}")


def _git(folder: Path, *words: str) -> bytes | None:
    """The output of a command of git; None where it fails."""
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True)
    except FileNotFoundError as error:
        what = "the folder" if error.filename == str(folder) else "git"
        raise ContractError(
            f"{what} is not there: {error.filename}", hint="servanda contract diff OLD NEW"
        ) from None
    return done.stdout if done.returncode == 0 else None
