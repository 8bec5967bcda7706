# `servanda contract diff`: what one version of a contract promises more or less than another.

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import click

from servanda.authoring.diff.difference import Difference
from servanda.authoring.diff.report import FORMATS
from servanda.authoring.diff.values import SIDES, Side
from servanda.cli.input import contract_bytes, each
from servanda.cli.options import DASH, shared, show, show_json
from servanda.contract.model import Contract
from servanda.errors import ContractError
from servanda.runner import load

# Files as a revision of git has them.


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


_BREAKING = 1


@click.command("diff")
@click.argument("files", nargs=-1, required=True, metavar="OLD NEW")
@click.option(
    "--since",
    metavar="REVISION",
    help="Compare each contract of a list with its version in git, such as HEAD or origin/main.",
)
@click.option(
    "--reader",
    type=click.Choice(SIDES),
    default="consumer",
    show_default=True,
    help="Side to judge for: the consumer relies on the contract, the producer has to keep it.",
)
@click.option(
    "--semver",
    is_flag=True,
    help="Accept a breaking change that metadata.version announces, such as 2.0.0 after 1.4.2.",
)
@shared("--format", type=click.Choice([*FORMATS]))
@shared("--no-code")
def diff_command(
    files: tuple[str, ...], since: str | None, reader: Side, semver: bool, format_: str
) -> None:
    """Say what the contract NEW promises more, less or otherwise than OLD.

    For the consumer what is loosened, removed or retargeted breaks; for the producer what is
    tightened, added or retargeted. The files that a contract names are not opened, so OLD may
    come from git: git show HEAD~1:c.yaml | servanda contract diff - c.yaml, or --since HEAD~1
    c.yaml. A contract that is not in that revision is new, and breaks nothing.
    """
    if since is None:
        if len(files) != 2:
            raise click.UsageError("it takes OLD and NEW; --since REVISION takes any number")
        _refuse_same(*files)
        pairs = [each(_read, files)]
    elif DASH in files:
        raise click.UsageError("--since takes files: standard input has no version in git")
    else:
        pairs = each(partial(_since, since), dict.fromkeys(files))
    differences = [Difference(pair[0], pair[1], reader) for pair in pairs if len(pair) == 2]
    texts = [FORMATS[format_](difference) for difference in differences]
    if since is None:
        show(texts[0])
    elif format_ == "json":
        show_json([*map(json.loads, texts)])
    else:
        new = [f"{pair[0].metadata.name}: new since {since}" for pair in pairs if len(pair) == 1]
        show(("\n" if format_ == "github" else "\n\n").join([*texts, *new]))
    accepted = (d.compatible or (semver and not d.advice) for d in differences)
    if not all(accepted):
        sys.exit(_BREAKING)


def _since(revision: str, file: str) -> list[Contract]:
    """A contract at a revision and now; only now, where that revision does not have it."""
    now = _read(file)
    before = file_at(revision, Path(file))
    return [now] if before is None else [load.parse(before, f"{revision}:{file}"), now]


def _read(file: str) -> Contract:
    data, name, _ = contract_bytes(file)
    return load.parse(data, name)


def _refuse_same(old: str, new: str) -> None:
    """Two names of one file: a gate would pass whatever it holds."""
    if old == new == DASH:
        raise click.UsageError("one of the two may be -, standard input")
    try:
        same = old == new or Path(old).samefile(new)
    except OSError:
        same = False  # one is not there; reading says so
    if same:
        raise ContractError(
            f"OLD and NEW are one file: {new}",
            hint=f"of git: servanda contract diff --since HEAD~1 {new}",
        )
