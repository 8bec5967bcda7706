# Options that several verbs share.

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import click

from servanda.fields import seconds
from servanda.foreign import NO_CODE


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


def _no_code(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        before = os.environ.get(NO_CODE)
        os.environ[NO_CODE] = "1"  # of child processes too

        def put_back() -> None:
            os.environ.pop(NO_CODE)
            os.environ.update({} if before is None else {NO_CODE: before})

        # the root is closed even where a later option of the verb is refused
        ctx.find_root().call_on_close(put_back)


no_code_option = click.option(
    "--no-code",
    is_flag=True,
    expose_value=False,
    callback=_no_code,
    help="Refuse contracts and kernels that run code of their own.  [env var: SERVANDA_NO_CODE]",
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
