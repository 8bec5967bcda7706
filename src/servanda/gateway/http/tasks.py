# The end of background tasks.

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 0.5  # after which a task that still runs is cancelled again


async def end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until each of them has ended, whatever its outcome.

    Before Python 3.12 `asyncio.wait_for` returns its result and swallows the cancellation if both
    come in the same turn of the loop, so that a task in a loop goes on: it is cancelled again.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        ended, left = await asyncio.wait(left, timeout=_AGAIN_S)
        await asyncio.gather(*ended, return_exceptions=True)  # or asyncio reports their errors
