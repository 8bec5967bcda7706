# What a theorem is to the house: one function, what it rests on, and where it comes from.
#
# Conventions of this package, fixed once.  p is the train kernel's distribution, q that of
# the infer kernel, w = p / q; the tokens come from infer.  `osc` is max - min of the
# difference of two rows of logits (at most twice its largest absolute value; a shift of all
# logits costs nothing).  Everything is worked in float64 and in nats.  Arguments may have any
# shapes that broadcast, and a result has their common shape.  A number that is NaN, or outside of
# the range that a theorem names for it, is refused with an EvidenceError.

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from servanda.registry import Registry
from servanda.theory.bounds.assumptions import ASSUMPTIONS

# what a number is once its inputs are certified: see docs/explanation/chain.md
Standing = Literal["certificate", "fact", "conditional bound", "estimate", "diagnostic"]
DERIVED = "derived in docs/explanation/chain.md"
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Theorem:
    """A bound, and everything that must be said with a number it gives.

    Args:
        standing: of its result, where its inputs are certified.
        assumes: names of ASSUMPTIONS that the proof needs beside its inputs.
        sharp: whether some pair of kernels attains it or comes as near as one likes, at any
            drift or as the drift vanishes, for answers of any length.
        source: of the statement.
    """

    name: str
    function: Callable[..., Any]
    standing: Standing
    assumes: tuple[str, ...]
    sharp: bool
    source: str

    @property
    def statement(self) -> str:
        """What it says, in one line."""
        return (inspect.getdoc(self.function) or "").split("\n")[0].rstrip(".")


THEOREMS: Registry[Theorem] = Registry("theorem")


def theorem(
    standing: Standing,
    *,
    source: str = DERIVED,
    assumes: tuple[str, ...] = (),
    sharp: bool = False,
) -> Callable[[F], F]:
    """Register a function as a theorem of its own name.

    Raises:
        ValueError: it assumes something that ASSUMPTIONS does not have.
    """

    def decorate(function: F) -> F:
        name = function.__name__
        unknown = [key for key in assumes if key not in ASSUMPTIONS]
        if unknown:
            raise ValueError(f"theorem {name!r} assumes {unknown}, which no one has written down")
        THEOREMS.add(name, Theorem(name, function, standing, assumes, sharp, source))
        return function

    return decorate
