# Steps of the chain: a number, its theorem, and its assumptions.

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from servanda.judgement.bound_chain.assumptions import Rest
from servanda.theory.bounds.sequence import is_vacuous
from servanda.theory.bounds.theorem import THEOREMS, Standing

# from the strongest to the weakest guarantee
STANDINGS: tuple[Standing, ...] = (
    "certificate",
    "fact",
    "conditional bound",
    "estimate",
    "diagnostic",
)


@dataclass(frozen=True)
class Step:
    """One number of the chain: `what` is at most `number`.

    Args:
        clause: the start of its path; level: number of steps from there.
        theorem: a name in THEOREMS; "" for the clause's own number.
        standing: weakest guarantee on the path; assumes: names in ASSUMPTIONS, of the whole path.
        enforced: whether the clause at its start is enforced.
        vacuous: whether the number is no smaller than the range of the quantity.
    """

    clause: str
    level: int
    what: str
    number: float
    unit: str = ""
    theorem: str = ""
    standing: Standing = "certificate"
    assumes: tuple[str, ...] = ()
    enforced: bool = True
    vacuous: bool = False


@dataclass(frozen=True)
class Chain:
    """The implications of a contract's numbers.

    Args:
        shown: whether they start from a verdict's upper bounds instead of limits.
        tokens: most tokens of a whole response; None: unknown, so that no bound for one exists.
        steps: path by path, each number after its premise.
        rests: all assumptions of the steps.
        left_out: (clause, reason why no or no further consequence follows).
    """

    contract: str
    shown: bool
    tokens: int | None
    steps: tuple[Step, ...]
    rests: tuple[Rest, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def vacuous(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.vacuous)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; a vacuous number is null."""
        data = asdict(self)
        for step in data["steps"]:
            theorem = step.pop("theorem")
            law = THEOREMS[theorem] if theorem else None
            step["number"] = None if step["vacuous"] else step["number"]
            step["theorem"] = law and {
                "name": law.name,
                "statement": law.statement,
                "source": law.source,
                "sharp": law.sharp,
            }
        data["left_out"] = [{"clause": c, "reason": reason} for c, reason in self.left_out]
        return data


def follow(
    start: Step,
    theorem: str,
    what: str,
    *inputs: float,
    unit: str = "",
    most: float = math.inf,
    adds: tuple[str, ...] = (),
) -> Step:
    """The step that a theorem adds to its premises.

    Args:
        most: the largest value of the quantity; a bound of at least this is vacuous.
        adds: assumptions of the path beyond the theorem's own.
    """
    law = THEOREMS[theorem]
    number = float(law.function(*inputs))
    return replace(
        start,
        level=start.level + 1,
        what=what,
        number=number,
        unit=unit,
        theorem=theorem,
        standing=weakest(start.standing, law.standing),
        assumes=joined(start.assumes, (*law.assumes, *adds)),
        vacuous=is_vacuous(number, most),
    )


def weakest(*standings: Standing) -> Standing:
    """The weakest of several guarantee types."""
    return max(standings, key=STANDINGS.index)


def joined(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    """The union in order."""
    return tuple(dict.fromkeys((*first, *second)))
