# Standard output and standard error of every command.

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from servanda.traces.serialization import to_plain


def show(text: str, *, err: bool = False) -> None:
    """Print, though anyone who reads may have seen enough; the exit code still counts."""
    try:
        click.echo(text, err=err)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_json(data: Any, *, err: bool = False) -> None:
    """Print data; a number that does not exist is null, an infinite one a text."""
    show(json.dumps(to_plain(data), indent=1), err=err)


def show_as(format_: str, data: Any, text: str, *, err: bool = False) -> None:
    """Print data for the format json, and a text for any other."""
    if format_ == "json":
        show_json(data, err=err)
    else:
        show(text, err=err)
