# Rewards: pure functions of a prompt's line and the text of a response.
#
# A contract names one of these, or a function in a file next to it.  The lines of a corpus need the
# key that it reads.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from servanda.contract.clause import Place
from servanda.contract.model import Contract
from servanda.errors import Problem
from servanda.judgement.clauses.base import DRAWS, Cell
from servanda.judgement.clauses.scope import known_by_name
from servanda.judgement.slices.rules import Cut
from servanda.registry import Registry
from servanda.traces.corpus import Corpus

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


def unanswered(
    contract: Contract,
    cells: Sequence[Cell],
    corpora: Mapping[str, Corpus],
    cuts: Mapping[str, Mapping[str, tuple[Cut, ...]]],
) -> Iterator[Problem]:
    """Clauses whose reward needs a key that lines lack, each with the first such line.

    Args:
        corpora: corpus of each workload; cuts: workload -> slice -> its cuts.
    """
    of = (contract.reward and contract.reward.of) or ""
    if of not in REWARDS or not REWARDS[of].needs:
        return  # keys that a contract's own function reads are unknown
    needs = REWARDS[of].needs
    reported: set[Place] = set()
    for cell in cells:
        if DRAWS not in cell.kind.peers or not cell.workload or cell.place in reported:
            continue
        corpus = corpora[cell.workload]
        line = _lacking(corpus, cell.cut)
        if line is None:
            continue
        reported.add(cell.place)
        answered = [
            name
            for name, when in known_by_name(contract).items()
            if when == "request" and (own := cuts[cell.workload].get(name))
            if all(_lacking(corpus, cut) is None for cut in own)
        ]
        other = f"name slices: [{', '.join(answered)}], whose lines have one"
        if not answered:
            other = "declare a slice of the lines that have one, and name it under slices"
        yield Problem(
            f"clause {cell.clause.id!r} needs {of} on slice {cell.cut.name!r}, and "
            f"{corpus.file}:{line} has no {needs!r}",
            contract.where(*cell.place, "slices"),
            f"{other}; or name a reward.of that does without, such as rewards.py:score",
        )


def _lacking(corpus: Corpus, cut: Cut) -> int | None:
    """The first line that can meet a slice and lacks the key."""
    lines = (p.line for p in corpus.prompts if p.answer is None and cut.may_meet(p))
    return next(lines, None)
