# A theorem: one function with its assumptions and its source.
#
# Conventions of this package, fixed once.  p is the train kernel's distribution, q that of
# the infer kernel, w = p / q; the tokens come from infer.  `osc` is max - min of the
# difference of two rows of logits (at most twice its largest absolute value; a shift of all
# logits costs nothing).  All computations use float64 and nats.  Arguments may have any shapes that
# broadcast, and a result has their common shape.  NaN, or a number outside the range of a theorem,
# raises an EvidenceError.

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from servanda.registry import Registry
from servanda.theory.bounds.assumptions import ASSUMPTIONS

# the guarantee types, for certified inputs: see docs/explanation/chain.md
Standing = Literal["certificate", "fact", "conditional bound", "estimate", "diagnostic"]
DERIVED = "derived in docs/explanation/chain.md"
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Theorem:
    """A bound with the information that belongs to its result.

    Args:
        standing: guarantee type of its result, for certified inputs.
        assumes: names in ASSUMPTIONS that the proof needs beyond its inputs.
        sharp: whether some pair of kernels attains it or comes arbitrarily near, at any drift or as
            the drift vanishes, for responses of any length.
        source: source of the statement.
    """

    name: str
    function: Callable[..., Any]
    standing: Standing
    assumes: tuple[str, ...]
    sharp: bool
    source: str

    @property
    def statement(self) -> str:
        """The statement, in one line."""
        return (inspect.getdoc(self.function) or "").split("\n")[0].rstrip(".")


THEOREMS: Registry[Theorem] = Registry("theorem")


def theorem(
    standing: Standing,
    *,
    source: str = DERIVED,
    assumes: tuple[str, ...] = (),
    sharp: bool = False,
) -> Callable[[F], F]:
    """Register a function as a theorem under its name.

    Raises:
        ValueError: it has an assumption that is not in ASSUMPTIONS.
    """

    def decorate(function: F) -> F:
        name = function.__name__
        unknown = [key for key in assumes if key not in ASSUMPTIONS]
        if unknown:
            raise ValueError(f"theorem {name!r} assumes {unknown}, which no one has written down")
        THEOREMS.add(name, Theorem(name, function, standing, assumes, sharp, source))
        return function

    return decorate
