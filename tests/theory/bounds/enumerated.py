# Every answer of a pair of tables, as a run would sample it, with its exact probabilities.

from dataclasses import dataclass

import numpy as np

from servanda.engines.table import Table
from tests.table_pair import TablePair

TOKENS = ("a", "b", "<eos>")
PROMPT = (0,)
WIDTH = 4


@dataclass(frozen=True)
class Answers:
    """Each answer that infer can give: its tokens' log ratios, its law on both sides."""

    log_ratio_N: np.ndarray
    length_S: np.ndarray
    train_S: np.ndarray
    infer_S: np.ndarray
    new: tuple

    def mean(self, value_S):
        """E_infer of a value of each answer, exactly."""
        return float(self.infer_S @ value_S)


def table(counts):
    """A table of order 1 by counts of each row."""
    return Table(TOKENS, 2, 1, {c: tuple(np.array(r) / sum(r)) for c, r in counts.items()})


def pair(p, q):
    return TablePair(table(p), table(q))


def answers(tables):
    drawn = [y for y in tables.sequences(PROMPT, WIDTH) if y[2] > 0]
    log_ratio = []
    for new, _, _ in drawn:
        for at, token in enumerate(new):
            p_V, q_V = tables.rows((*PROMPT, *new[:at]))
            with np.errstate(divide="ignore"):
                log_ratio.append(np.log(p_V[token]) - np.log(q_V[token]))
    news, train, infer = zip(*drawn, strict=True)
    return Answers(
        np.array(log_ratio),
        np.array([len(new) for new in news]),
        np.array(train),
        np.array(infer),
        news,
    )


def refused(error, message):
    """The error says the place and what was found, as the message does, and the next move."""
    found, _, move = str(error.value).partition("\n  hint: ")
    assert move, f"{found}: and now?"
    assert message in (found, f"{found}\n  hint: {move}")
