# What a fault is: a class of engine, and the same class with something broken in it.
#
# Faults are injected on purpose, by a contract's `fault:`, in demos, tests and drills.  They
# do not change the engine's description, because a real fault would not either.  A fault
# overrides what an engine has and adds nothing, so an engine that lacks it is refused.
# The values that a fault may take are a set that can name itself.

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from servanda.errors import MeasurementError, Problem
from servanda.registry import Registry

if TYPE_CHECKING:
    from servanda.contract.model import Contract

Side = Literal["train", "infer"]
Wrap = Callable[[Any, Any], Any]  # (class of engine, the fault's value) -> class of engine


class Takes(Protocol):
    def __contains__(self, value: Any, /) -> bool: ...

    def __str__(self) -> str:
        """Completes the sentence "the fault takes ..."."""
        ...


@dataclass(frozen=True)
class Between:
    """Numbers in (low, high]; `whole` ones in [low, high]."""

    low: float
    high: float
    whole: bool = False

    def __contains__(self, value: Any, /) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        if self.whole:
            return self.low <= value <= self.high
        return math.isfinite(value) and self.low < value <= self.high

    def __str__(self) -> str:
        if self.whole:
            return f"a whole number in [{self.low:.12g}, {self.high:.12g}]"
        return f"a number in ({self.low:g}, {self.high:g}]"


@dataclass(frozen=True)
class Switch:
    """On, and nothing else: a kernel without a fault has no `fault:`."""

    def __contains__(self, value: Any, /) -> bool:
        return value is True

    def __str__(self) -> str:
        return "true"


SWITCH = Switch()


@dataclass(frozen=True)
class OneOf:
    words: tuple[str, ...]

    def __contains__(self, value: Any, /) -> bool:
        return isinstance(value, str) and value in self.words

    def __str__(self) -> str:
        return " or ".join(self.words)


@dataclass(frozen=True)
class Fault:
    """One entry of the catalogue.

    Args:
        summary: what goes wrong, in one sentence.
        side: the kernel that such a bug is met in.
        default: the value that drills and the truth table inject.
        takes: the values it may have.
        wrap: gives an engine's class the fault.
        seen: where the bug was met in the field; "" where no report is known to us.
        field: the value that it was met at; None where no report gives one.
        field_source: where that value is from.
        strengths: the values that a sweep tries, weakest first; none where it is on or off.
    """

    name: str
    summary: str
    side: Side
    default: Any
    takes: Takes
    wrap: Wrap
    seen: str = ""
    field: Any = None
    field_source: str = ""
    strengths: tuple[Any, ...] = ()

    def problem(self, value: Any) -> Problem | None:
        """What is wrong with a value; its place is for the caller to add."""
        if value in self.takes:
            return None
        return Problem(
            f"fault {self.name!r} takes {self.takes}, found {value!r}",
            hint=f"write fault: {{{self.name}: {json.dumps(self.default)}}}",
        )

    def inject(self, base: Any, value: Any) -> Any:
        """The class of engine `base` with this fault in it.

        Raises:
            MeasurementError: another value than it takes, or an engine that cannot have it.
        """
        problem = self.problem(value)
        if problem is not None:
            raise MeasurementError(problem.message, hint=problem.hint)
        broken = self.wrap(base, value)
        lacking = [n for n in vars(broken) if not n.startswith("__") and not hasattr(base, n)]
        if lacking:
            raise MeasurementError(
                f"{cannot(self.name)} {base.__name__}, which has no {lacking[0]!r} to break",
                hint="use engine: transformers for this fault",
            )
        return broken


FAULTS: Registry[Fault] = Registry("fault")


def cannot(name: str) -> str:
    """The beginning of the message for an engine that cannot have a fault."""
    return f"fault {name!r} cannot be injected into"


def fault(
    name: str,
    summary: str,
    *,
    default: Any = True,
    takes: Takes = SWITCH,
    side: Side = "infer",
    seen: str = "",
    field: Any = None,
    field_source: str = "",
    strengths: Sequence[Any] = (),
    registry: Registry[Fault] = FAULTS,
) -> Callable[[Wrap], Wrap]:
    """Register a fault; the decorated function wraps a class of engine.

    One that names no values is on or off, in the field as here.

    Raises:
        ValueError: the fault does not take its own default, the field's value or a strength.
    """

    if takes is SWITCH:
        field, field_source = True, "on or off"

    def decorate(wrap: Wrap) -> Wrap:
        entry = Fault(
            *(name, summary, side, default, takes, wrap, seen),
            *(field, field_source, tuple(strengths)),
        )
        known = (field,) if field is not None else ()
        refused = [value for value in (default, *known, *strengths) if entry.problem(value)]
        if refused:
            which = f"its default {default!r}" if refused[0] == default else repr(refused[0])
            raise ValueError(f"fault {name!r} takes {takes}, and not {which}")
        registry.add(name, entry)
        return wrap

    return decorate


def injected(contract: Contract, name: str, value: Any = None) -> Contract:
    """The contract with one fault of the catalogue in the kernel of its side.

    Args:
        value: None takes the fault's default.

    Raises:
        MeasurementError: no such fault, or it does not take the value.
    """
    if name not in FAULTS:
        raise MeasurementError(f"there is no fault {name!r}", hint=FAULTS.hint(name))
    entry = FAULTS[name]
    value = entry.default if value is None else value
    problem = entry.problem(value)
    if problem is not None:
        raise MeasurementError(problem.message, hint=problem.hint)
    kernel = getattr(contract.kernels, entry.side).model_copy(update={"fault": {name: value}})
    return contract.model_copy(
        update={"kernels": contract.kernels.model_copy(update={entry.side: kernel})}
    )
