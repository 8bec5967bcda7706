# The task: three-digit sums worked out digit by digit, with an answer that can be checked.

from __future__ import annotations

import random
from collections.abc import Sequence

from scripts.corpus import ANSWER_MARK, END_OF_TEXT, Split, Sum, draw_sum

from servanda.judgement.rewards import exact_answer


def draw(seed: int, stream: str, n: int, split: Split) -> list[Sum]:
    """Sums of one stream; the same for every arm of a seed."""
    rng = random.Random(f"{seed}|{stream}")
    return [draw_sum(rng, split) for _ in range(n)]


def prompt_of(problem: Sum, given: int) -> str:
    """A sum with its first `given` digits worked out.

    >>> prompt_of(Sum(347, 588), 2)
    '347+588:7+8=15 4+8+1=13 '
    """
    steps = problem.completion.partition(ANSWER_MARK)[0].split(" ")[:given]
    return problem.prompt + "".join(f"{step} " for step in steps)


def reward(problem: Sum, text: str) -> float:
    """1 where an answer has ended, and what it says last is the sum; else 0.

    >>> reward(Sum(347, 588), "3+5+1=9>935<|endoftext|>"), reward(Sum(347, 588), "9>935")
    (1.0, 0.0)
    """
    said, ended, _ = text.partition(END_OF_TEXT)
    _, marked, last = said.rpartition(ANSWER_MARK)
    if not (ended and marked):
        return 0.0
    return exact_answer({"answer": problem.answer}, last)


def rewards(problems: Sequence[Sum], texts: Sequence[str]) -> list[float]:
    return [reward(problem, text) for problem, text in zip(problems, texts, strict=True)]
