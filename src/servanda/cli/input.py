# What commands read: contracts, from files or from standard input.

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from servanda.cli.options import DASH
from servanda.contract.model import Contract
from servanda.contract.text_file import MAX_BYTES
from servanda.errors import ContractError, Problem
from servanda.runner import load

S = TypeVar("S")
T = TypeVar("T")


def contract_bytes(file: str | Path, hint: str = load.NO_CONTRACT) -> tuple[bytes, str, Path]:
    """What a contract's file holds, how messages name it, and the folder that its paths start from.

    - is standard input: its paths start from the current folder.

    Args:
        hint: where the file cannot be read.

    Raises:
        ContractError: it cannot be read.
    """
    if str(file) == DASH:
        return sys.stdin.buffer.read(MAX_BYTES + 1), "stdin", Path()
    path = Path(file)
    return load.bytes_of(path, hint), str(path), path.parent


def contract_at(file: str | Path) -> Contract:
    """The contract of a file, or of standard input.

    Raises:
        ContractError: every problem of the text at once, each with its place.
    """
    return load.read(*contract_bytes(file))


def each(call: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """The results for all items.

    Raises:
        ContractError: the problems of all of them at once; one that several have is there once.
    """
    results: list[T] = []
    problems: list[Problem] = []
    for item in items:
        try:
            results.append(call(item))
        except ContractError as error:
            problems += error.problems
    if problems:
        raise ContractError.all([*dict.fromkeys(problems)])
    return results
