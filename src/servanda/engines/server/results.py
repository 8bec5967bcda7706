# The answers to one queued request, as they come.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from servanda.engines.server.jobs import Ended, Event, Failed, Job, Token
from servanda.engines.server.responses import Choice
from servanda.engines.server.scheduler import Batcher


class Answers:
    """A queued request: its tokens as they come, each put into its choice."""

    def __init__(
        self,
        batcher: Batcher,
        jobs: list[Job],
        silent: list[Choice],
        events: asyncio.Queue[tuple[Any, Event]],
    ) -> None:
        self._batcher, self._jobs, self._events = batcher, jobs, events
        self._silent = silent  # choices of no token

    async def __aiter__(self) -> AsyncIterator[tuple[Choice, Token | None]]:
        """(choice, its next token), and (choice, None) once it is over.

        Raises:
            Exception: what the engine raised.
        """
        left = len(self._jobs)
        while left:
            (choice, of_prompt), event = await self._events.get()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Ended):
                left -= 1
                if not of_prompt:
                    choice.text, choice.why = event.text, event.why
                    yield choice, None
                continue
            (choice.scored if of_prompt else choice.tokens).append(event)
            if not of_prompt:
                yield choice, event
        for choice in self._silent:
            yield choice, None

    def drop(self) -> None:
        """Nobody waits for it any more."""
        self._batcher.drop(self._jobs)
