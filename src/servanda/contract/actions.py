# Actions that may follow from a verdict, and the component that executes each.

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from servanda.registry import Registry

Door = Literal["gateway", "promotion", "rl"]


@dataclass(frozen=True)
class Action:
    """One entry of the table.

    Args:
        summary: the action, in one sentence.
        doors: the components that execute it.
        example: of its value in a contract; "" if it takes none.
    """

    summary: str
    doors: tuple[Door, ...]
    example: str = ""


ACTIONS: Registry[Action] = Registry("action")

ACTIONS.add(
    "divert",
    Action("The traffic of the slice, or all of it, goes to stable.", ("gateway",), "slice"),
)
ACTIONS.add(
    "mirror", Action("A share goes to both; stable serves the response.", ("gateway",), "0.1")
)
ACTIONS.add("sample", Action("A share is re-scored.", ("gateway", "rl"), "0.1"))
ACTIONS.add("correct", Action("Tokens are weighted by the declared importance weighting.", ("rl",)))
ACTIONS.add("mask", Action("The tokens of the slice are left out of the loss.", ("rl",)))
ACTIONS.add("hold", Action("The promotion does not advance.", ("promotion", "gateway")))
ACTIONS.add("roll_back", Action("All traffic goes back to stable.", ("promotion",)))
ACTIONS.add("halt", Action("The run stops.", ("rl", "promotion")))
ACTIONS.add("page", Action("A person is notified.", ("gateway", "promotion", "rl"), "oncall"))
