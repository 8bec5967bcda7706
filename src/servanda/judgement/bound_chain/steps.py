# Steps of the chain: one number, the theorem that gave it, and everything it rests on.

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from servanda.judgement.bound_chain.assumptions import Rest
from servanda.theory.bounds.sequence import is_vacuous
from servanda.theory.bounds.theorem import THEOREMS, Standing

# from what can be shown to what can only be said
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
        clause: where its path starts; level: how many steps from there.
        theorem: of THEOREMS, by which it follows; "" for the clause's own number.
        standing: the weakest on the path; assumes: names of ASSUMPTIONS, of the whole path.
        enforced: whether the clause that it starts from is.
        vacuous: the number says nothing that the range of the quantity did not.
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
    """What a contract's numbers imply.

    Args:
        shown: whether they start from a verdict's upper ends, and not from limits.
        tokens: that a whole answer has at most; None: not known, so nothing is said of one.
        steps: path by path, each number after the one it follows from.
        rests: every assumption of some step.
        left_out: (clause, why nothing follows from it, or nothing more).
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
        """Plain data for JSON: a vacuous number is null, for it says nothing."""
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
    """The number that a theorem makes of its inputs, one step after another number.

    Args:
        most: the largest value that the quantity has; a bound of that is vacuous.
        adds: what the path assumes besides the theorem's own assumptions.
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
    """The standing that is left of several."""
    return max(standings, key=STANDINGS.index)


def joined(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    """Both, each name once, in their order."""
    return tuple(dict.fromkeys((*first, *second)))
