# Tokens that a trainer's filter removed before it wrote its dump.
#
# Both logprobs of the removed tokens are recorded.  A clause holds only if it holds with and
# without those tokens, because inclusion must be decided before the outcome; it is violated only on
# the trained tokens.

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from servanda.judgement.breakdown import Removed
from servanda.judgement.clauses.base import Reason, worst
from servanda.judgement.token_profile import Sums
from servanda.judgement.verdict import Verdict
from servanda.report.cell_text import of_cell
from servanda.traces.rollouts import Rollouts

# a clause holds only after a filter
ONLY_FILTERED: tuple[Reason, ...] = ("violated unfiltered", "undecided unfiltered")


@dataclass
class RemovedTokens:
    """The removed sequences and tokens, and the sums of those that both sides scored."""

    sequences: int = 0
    tokens: int = 0
    n: int = 0
    tv: float = 0.0

    def add(
        self, block: Rollouts, removed_N: np.ndarray, kept: Sums, drawn_tv_K: np.ndarray
    ) -> None:
        """Add a block.

        Args:
            kept: sums over its tokens without the removed ones; drawn_tv_K: (1 - w)^+ of all.
        """
        self.sequences += len(np.unique(block.sequence_N[removed_N]))
        self.tokens += int(removed_N.sum())
        self.n += len(drawn_tv_K) - kept.n
        self.tv += float(drawn_tv_K.sum()) - kept.tv

    def join(self, later: RemovedTokens) -> None:
        """Add the tokens of later steps."""
        self.sequences += later.sequences
        self.tokens += later.tokens
        self.n += later.n
        self.tv += later.tv

    def removed(self, sequences: int, trained: int, kept: Sums) -> Removed | None:
        """The summary for reports; None if nothing was removed."""
        if not self.sequences:
            return None
        of = sequences, trained + self.tokens
        if not self.n or not kept.n:
            return Removed(self.sequences, self.tokens, *of)
        own, others = self.tv / self.n, kept.tv / kept.n
        before = (self.tv + kept.tv) / (self.n + kept.n)
        return Removed(self.sequences, self.tokens, *of, own, others, before)


def bracketed(kept: Verdict, before: Verdict) -> Verdict:
    """The verdict on the trained tokens, inconclusive where it does not hold before the filter."""
    cells = []
    for own, drawn in zip(kept.cells, before.cells, strict=True):
        if own.metric == "kept_ratio":
            cells.append(drawn)
            continue
        missing = own.missing + max(drawn.n - own.n, 0)
        cell = own.but(missing=missing) if own.section == "statistical" else own
        if own.interval and drawn.interval:
            ends = (
                min(own.interval[0], drawn.interval[0]),
                max(own.interval[1], drawn.interval[1]),
            )
            cell = cell.but(interval=ends)
        if own.outcome == "holds" and drawn.outcome != "holds":
            # unscored tokens were removed too: a mean over the rest does not cover them
            scored = drawn.n - own.n > drawn.missing - own.missing
            value = of_cell(drawn, drawn.value) if scored else ""
            violated = drawn.outcome == "violated"
            known = "violated" if violated else "not decided"
            note = f"holds only after a filter: before it {value or 'not known'}, {known}"
            reason = ONLY_FILTERED[0 if violated else 1]
            cell = cell.but(outcome="inconclusive", note=note, reason=reason)
        cells.append(cell)
    enforced = [c.outcome for c in cells if c.enforced and c.outcome != "not applicable"]
    return replace(kept, cells=tuple(cells), outcome=worst([kept.outcome, *enforced]))
