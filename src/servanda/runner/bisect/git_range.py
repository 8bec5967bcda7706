# The commits of a range, checked out in a temporary folder: the user's checkout stays as it is.

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from servanda.errors import ContractError, MeasurementError


@dataclass(frozen=True)
class GitRange:
    """Commits from a good one to a bad one, by the first parents of merges.

    Args:
        commits: ids, the oldest first; subjects: the first line of each.
        folder: a work tree.
    """

    commits: tuple[str, ...]
    subjects: tuple[str, ...]
    folder: Path

    def checkout(self, number: int) -> None:
        _git(self.folder, "checkout", "--quiet", "--force", "--detach", self.commits[number])


@contextmanager
def opened(repository: Path, text: str) -> Iterator[GitRange]:
    """A range GOOD..BAD, with a temporary work tree.

    Raises:
        ContractError: no such range, or BAD does not come after GOOD.
        MeasurementError: git cannot make a work tree.
    """
    good, dots, bad = text.partition("..")
    if not (good and dots and bad) or bad.startswith("."):
        raise ContractError(f"--git {text!r} is no range of commits", hint="write --git v1.0..main")
    ends = []
    for name in (good, bad):
        try:
            ends.append(_git(repository, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"))
        except MeasurementError:
            raise ContractError(
                f"there is no commit {name!r} in {repository}",
                hint="write --git GOOD..BAD, and name another repository with --repository",
            ) from None
    lines = _git(
        repository, "log", "--reverse", "--first-parent", "--format=%H %s", f"{ends[0]}..{ends[1]}"
    ).splitlines()
    beside = _git(repository, "rev-list", "--count", f"{ends[1]}..{ends[0]}")
    if not lines or beside != "0":
        raise ContractError(
            f"{bad} does not come after {good}", hint="write the good commit first: --git GOOD..BAD"
        )
    first = _git(repository, "log", "-1", "--format=%H %s", ends[0])
    pairs = [line.partition(" ") for line in (first, *lines)]
    with tempfile.TemporaryDirectory(prefix="servanda-git-") as place:
        tree = Path(place) / "tree"
        _git(repository, "worktree", "add", "--quiet", "--detach", str(tree), ends[0])
        try:
            commits, subjects = (tuple(pair[i] for pair in pairs) for i in (0, 2))
            yield GitRange(commits, subjects, tree)
        finally:
            _git(repository, "worktree", "remove", "--force", str(tree))


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise MeasurementError("git is not installed here", hint="install it") from None
    if done.returncode:
        raise MeasurementError(
            f"git {words[0]} in {folder} failed: {done.stderr.strip()}",
            hint="try the same command by hand",
        )
    return done.stdout.strip()
