# A job is one sequence, to be drawn or to be scored; events are what comes of it.
#
# Its sequence number is the request's seed, and the engine's seed is constant: so what it draws
# does not depend on its company.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from servanda.contract.model import Path
from servanda.theory.sampling import Sampling, seed_of

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Token:
    """One token of a reply.

    Args:
        logp: its processed logprob; NaN where the engine gave none.
        rank: how many tokens are likelier; None where no one counted.
        cached: tokens of the prompt that were read from a cache; None where no one counted.
        word: its text; "" unless logprobs are asked for.
        best: (id, logprob, text) of the top-k tokens, best first.
        text: what a stream says with it.
        end: why it is the last one; None where it is not.
    """

    id: int
    logp: float
    rank: int | None = None
    word: str = ""
    best: tuple[tuple[int, float, str], ...] = ()
    text: str = ""
    end: str | None = None
    cached: int | None = None


@dataclass(frozen=True)
class Ended:
    """A sequence is over: its whole text, without the token that ended it."""

    text: str = ""
    why: str = "length"


@dataclass(frozen=True)
class Failed:
    error: Exception


Event = Token | Ended | Failed


@dataclass(eq=False)
class Job:
    """One sequence.

    Args:
        width: new tokens at most.
        given: what is scored, where nothing is drawn, by `path`.
        best: top-k tokens to report of each position; None where no logprob is asked for.
        salt: of its request; a prompt that is scored reads no cache.
        speaks: whether tokens carry the text that they add.
        aside: whether the engine that stands aside runs it, where there is one, in test mode.
        tell: takes the events, in the engine's thread.
    """

    prompt: Ids
    width: int
    sampling: Sampling
    sequence: int
    emit: Callable[[Event], None]
    given: Ids | None = None
    path: Path = "decode"
    best: int | None = None
    salt: str = ""
    speaks: bool = False
    aside: bool = False
    dropped: bool = False
    drawn: list[int] = field(default_factory=list)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Jobs of one kind may run together."""
        return self.given is None, self.path, self.aside, self.sampling, self.width


def sequence_of(seed: int, place: int) -> int:
    """The sequence number of a request's n-th choice: the seed itself for the first."""
    return seed_of(seed, "choice", place) if place else seed
