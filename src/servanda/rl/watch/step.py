# One step of a watch, judged from a dump or read from a monitor's state.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from servanda.contract.model import WHOLE
from servanda.judgement.breakdown import Advice
from servanda.judgement.clauses.base import CellVerdict, Outcome
from servanda.report.cell_text import worst_promise
from servanda.rl.steps import format
from servanda.rl.steps.drift import Trend

COVERAGE = ("usable_ratio", "rescored_ratio")  # validity checks for logprob coverage


@dataclass(frozen=True)
class WatchedStep:
    """The verdict on one step.

    Args:
        step: step number of the trainer.
        why: the reason if the step is an error; otherwise "".
        advice: likely cause of the violated slices, and what to do; None if unknown.
        trend: ratio to the first steps of the run; None if there are too few.
        staleness: of the oldest token, in updates; None: unknown.
        actions: actions of the contract's escalation, executed or not.
        command: next command for the user.
        again: whether this step was judged before and has changed since.
        needs_tokens: approximate number of tokens for a decision, if undecided; judged: the tokens
            of the steps that it is judged on.
        drafts: share of the draft tokens that the target accepted; None: not counted.
        follow: whether the engine follows the trainer, in one line; "" if not observed.
    """

    step: int
    outcome: Outcome
    cells: tuple[CellVerdict, ...] = ()
    tokens: int = 0
    sequences: int = 0
    why: str = ""
    advice: Advice | None = None
    trend: Trend | None = None
    staleness: float | None = None
    actions: tuple[str, ...] = ()
    command: str = ""
    again: bool = False
    needs_tokens: int | None = None
    judged: int = 0
    drafts: float | None = None
    follow: str = ""

    @property
    def cause(self) -> str:
        """The likely cause, an estimate; "" if unknown."""
        return "" if self.advice is None else self.advice.cause

    @property
    def enforced(self) -> tuple[CellVerdict, ...]:
        return tuple(cell for cell in self.cells if cell.enforced)

    def where(self, cell: CellVerdict) -> str:
        """The display name of what a cell is about, with the steps that are judged together."""
        if cell.section == "runtime":
            return "all drafts"
        first, _ = cell.steps or (self.step, self.step)
        steps = f" (steps {first} to {self.step})" if first < self.step else ""
        return f"{format.place(cell.slice)}{steps}"

    @property
    def slices(self) -> tuple[str, ...]:
        """Every slice except the whole, in the order of the contract."""
        return tuple(dict.fromkeys(c.slice for c in self.enforced if c.slice != WHOLE))

    def worst(self, slice_: str | None = None) -> CellVerdict | None:
        """The worst cell: violated before others, then by the ratio to the limit."""
        return worst_promise(c for c in self.cells if slice_ in (None, c.slice))

    def of_whole(self, metric: str) -> CellVerdict | None:
        """The first cell of a metric on all tokens, enforced or not."""
        cells = (c for c in self.cells if c.slice == WHOLE and c.metric == metric)
        return next((c for c in cells if c.value is not None), None)

    @property
    def coverage(self) -> CellVerdict | None:
        return next((c for name in COVERAGE if (c := self.of_whole(name)) is not None), None)


class Source(Protocol):
    """The followed source.

    `kind`: its name in a state file; `missing`: why there is no step yet; `left`: data that is not
    counted; both "" if none.
    """

    kind: str
    missing: str
    left: str

    def poll(self, *, final: bool) -> Iterator[WatchedStep]:
        """The complete steps that were not polled yet, in order.

        Args:
            final: whether writing has ended, so that all steps are complete.
        """
        ...

    def head(self) -> tuple[str, ...]:
        """Lines about the followed source, once it is known."""
        ...

    def to_plain(self) -> dict[str, Any]:
        """Plain data for `resume`."""
        ...

    def resume(self, state: Mapping[str, Any]) -> None: ...
