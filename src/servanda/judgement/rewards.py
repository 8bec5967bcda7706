# Rewards: pure functions of a prompt's line and the text of a response.
#
# A contract names one of these, or a function in a file next to it.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from servanda.registry import Registry

Line = Mapping[str, Any]  # a line of a corpus, with all its keys
Score = Callable[[Line, str], float]


@dataclass(frozen=True)
class Rule:
    """A reward that a contract can name.

    Args:
        score: (the prompt's line, the answer's text before its end-of-text token) -> reward.
        needs: key of the line that it reads; "" if none.
        meaning: its description, in one line.
    """

    score: Score
    needs: str
    meaning: str


REWARDS: Registry[Rule] = Registry("reward")


def rule(meaning: str, *, needs: str = "") -> Callable[[Score], Score]:
    """Register a function as a reward under its name."""

    def decorate(score: Score) -> Score:
        REWARDS.add(score.__name__, Rule(score, needs, meaning))
        return score

    return decorate


@rule("1 where the answer is the line's `answer` and nothing else, else 0", needs="answer")
def exact_answer(prompt: Line, answer: str) -> float:
    """Blanks around either do not count.

    >>> exact_answer({"prompt": "2+2=", "answer": "4"}, " 4"), exact_answer({"answer": "4"}, "44")
    (1.0, 0.0)
    """
    return float(answer.strip() == str(prompt["answer"]).strip())


@rule("1 where the answer has the line's `answer` in it, else 0", needs="answer")
def contains_answer(prompt: Line, answer: str) -> float:
    """The texts are compared as they are: 14 is contained in 142.

    >>> contains_answer({"answer": "14"}, "it is 14."), contains_answer({"answer": "14"}, "41")
    (1.0, 0.0)
    """
    return float(str(prompt["answer"]).strip() in answer)


def file_and_function(of: str) -> tuple[str, str] | None:
    """The parts of FILE.py:FUNCTION; None of a name.

    >>> file_and_function("rewards.py:score"), file_and_function("exact_answer")
    (('rewards.py', 'score'), None)
    """
    file, colon, function = of.rpartition(":")
    return (file, function) if colon else None
