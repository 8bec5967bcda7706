# What commands read: contracts, from files or from standard input.

from __future__ import annotations

import sys
from pathlib import Path

from servanda.contract.model import Contract
from servanda.contract.yaml_reader import MAX_BYTES
from servanda.runner import load

STDIN = "-"


def contract_bytes(file: str | Path) -> tuple[bytes, str, Path]:
    """What a contract's file holds, how messages name it, and the folder that its paths start from.

    - is standard input: its paths start from the current folder.

    Raises:
        ContractError: it cannot be read.
    """
    if str(file) == STDIN:
        return sys.stdin.buffer.read(MAX_BYTES + 1), "stdin", Path()
    path = Path(file)
    return load.bytes_of(path), str(path), path.parent


def contract_at(file: str | Path) -> Contract:
    """The contract of a file, or of standard input.

    Raises:
        ContractError: every problem of the text at once, each with its place.
    """
    return load.read(*contract_bytes(file))
