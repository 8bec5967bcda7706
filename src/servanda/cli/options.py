# Options that several verbs share.

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

from servanda.contract.fields import seconds
from servanda.engines.foreign_code import NO_CODE

R = TypeVar("R")


class DurationType(click.ParamType):
    """10m, 30s, 1h: in seconds."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        try:
            found = seconds(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)
        assert isinstance(found, float)
        return found


def until(max_time: float | None) -> Callable[[], bool] | None:
    """Whether the time is over, counted from now; None: there is no end."""
    if max_time is None:
        return None
    end = time.monotonic() + max_time
    return lambda: time.monotonic() >= end


def no_code_option(verb: Callable[..., R]) -> Callable[..., R]:
    """--no-code of a verb: code that a contract names is refused while the verb runs."""

    @click.option(
        "--no-code",
        is_flag=True,
        help="Refuse contracts and kernels that run code of their own, or send a key.  "
        "[env var: SERVANDA_NO_CODE]",
    )
    @functools.wraps(verb)
    def refusing(*args: Any, no_code: bool, **options: Any) -> R:
        if not no_code:
            return verb(*args, **options)
        before = os.environ.get(NO_CODE)
        os.environ[NO_CODE] = "1"  # of child processes too
        try:
            return verb(*args, **options)
        finally:
            os.environ.pop(NO_CODE)
            os.environ.update({} if before is None else {NO_CODE: before})

    return refusing


format_option = click.option(
    "--format",
    "format_",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Of what is printed.",
)

ledger_option = click.option(
    "--ledger",
    "where",
    metavar="WHERE",
    envvar="SERVANDA_LEDGER",
    default="runs/ledger.db",
    show_default=True,
    show_envvar=True,
    help="A file for SQLite, or postgresql://USER@HOST/DATABASE.",
)

max_time_option = click.option(
    "--max-time",
    type=DurationType(),
    help="Start no new round after this time, such as 30s or 10m; what is open stays inconclusive.",
)
