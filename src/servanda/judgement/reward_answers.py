# Whether the lines of a corpus have the key that a reward reads.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from servanda.contract.clause import Place
from servanda.contract.model import Contract
from servanda.errors import Problem
from servanda.judgement.clauses.base import DRAWS, Cell
from servanda.judgement.clauses.scope import known_by_name
from servanda.judgement.rewards import REWARDS
from servanda.judgement.slices.rules import Cut
from servanda.traces.corpus import Corpus


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
