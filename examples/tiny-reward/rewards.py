# The reward of tiny-reward: whether the sum is right, whatever was written on the way.

import re


def score(prompt: dict, answer: str) -> float:
    """1.0 where the answer ends in ">606", and 606 is the line's answer; else 0.0."""
    said = re.fullmatch(r".*>(\d+)", answer.strip(), re.DOTALL)
    return float(said is not None and said[1] == prompt["answer"])
