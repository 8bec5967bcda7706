# The pool of a run with thin steps: consecutive steps whose tokens are judged together.
#
# Windows are disjoint, and each has the whole error probability of a step: one begins after the
# last was decided, or had its most steps.  Within a window the bounds are anytime-valid, so it is
# judged after each step at no cost.  Its most steps are fixed before it begins.

from __future__ import annotations

import math
from dataclasses import dataclass

from servanda.judgement.evidence import Weighed
from servanda.judgement.plan import Plan
from servanda.judgement.verdict import Verdict
from servanda.rl.dumps.statistics import added
from servanda.rl.dumps.window import tokens_to_decide

_GROWTH = 4  # most that one undecided window lengthens the next


@dataclass(frozen=True)
class PooledSteps:
    """The steps that a verdict is about.

    Args:
        first: of them; steps: their number; most: of the window; tokens: of all of them.
        after: most steps of the next window, if this one ends here; else None.
    """

    first: int
    steps: int
    most: int
    tokens: int
    after: int | None = None


@dataclass
class StepPool:
    """The open window.

    Args:
        most: most steps of a window; 1: each step is judged alone; 0: fixed by the first step.
        notes: how the windows were fixed.
    """

    plan: Plan
    most: int = 0
    notes: tuple[str, ...] = ()
    _steps: tuple[int, ...] = ()
    _sum: Weighed | None = None

    def add(self, step: int, weighed: Weighed) -> Weighed:
        """Add a step to the window; a step from before its last begins another."""
        if not self.most:
            self._fix(weighed.tokens)
        if self._sum is None or self.most <= 1 or step < self._steps[-1]:
            self._steps, self._sum = (), None
        self._steps = tuple(dict.fromkeys((*self._steps, step)))
        self._sum = weighed if self._sum is None else added(self._sum, weighed)
        return self._sum

    def _fix(self, tokens: int) -> None:
        """Fix the windows of a run from the tokens of its first step."""
        need = tokens_to_decide(self.plan)
        self.most = max(math.ceil(need / tokens), 1)
        if self.most > 1:
            self.notes = (
                f"a step has about {tokens:,} tokens and about {need:,} decide: up to "
                f"{self.most:,} steps in a row are judged together",
            )

    def close(self, verdict: Verdict) -> PooledSteps | None:
        """What a verdict on the window is about; it ends if decided, or at its most steps."""
        steps, most = self._steps, self.most
        undecided = verdict.outcome == "inconclusive"
        after = None
        if not undecided or len(steps) >= most:
            self._steps, self._sum = (), None
            if undecided and most > 1 and verdict.needs_tokens and verdict.tokens:
                needs = math.ceil(verdict.needs_tokens * len(steps) / verdict.tokens)
                self.most = min(max(needs, most), _GROWTH * most)
            after = self.most
        if most <= 1 or not steps:
            return None
        return PooledSteps(steps[0], len(steps), most, verdict.tokens, after)
