# One step of a watch, whether it judged a dump or read what a monitor judged.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from servanda.contract.model import WHOLE
from servanda.judgement.clauses.base import CellVerdict, Outcome
from servanda.report.cell_text import worst_promise
from servanda.rl.dumps import format
from servanda.rl.dumps.steps import Trend

COVERAGE = ("usable_ratio", "rescored_ratio")  # guards: trained tokens with both logprobs


@dataclass(frozen=True)
class WatchedStep:
    """The answer about one step.

    Args:
        step: of the trainer.
        why: the step is an error, in words; "" where it is none.
        cause: the shape of the red slices fits, an estimate; "" where it says nothing.
        trend: against the first steps of the run; None where there are too few.
        staleness: of the oldest token, in updates; None where no one knows.
        actions: that the contract's escalation takes or would take.
        command: to run next.
        again: whether this step was judged before, and has changed since.
        together: slices that are judged with steps before this one -> the first of those.
        needs_tokens: about how many tokens such a step needs to be decided, where it is not.
    """

    step: int
    outcome: Outcome
    cells: tuple[CellVerdict, ...] = ()
    tokens: int = 0
    sequences: int = 0
    why: str = ""
    cause: str = ""
    trend: Trend | None = None
    staleness: float | None = None
    actions: tuple[str, ...] = ()
    command: str = ""
    again: bool = False
    together: Mapping[str, int] = field(default_factory=dict)
    needs_tokens: int | None = None

    @property
    def enforced(self) -> tuple[CellVerdict, ...]:
        return tuple(cell for cell in self.cells if cell.enforced)

    def place(self, name: str) -> str:
        """A slice in words, and the steps that are judged together."""
        first = self.together.get(name, self.step)
        steps = f" (steps {first} to {self.step})" if first < self.step else ""
        return f"{format.place(name)}{steps}"

    @property
    def slices(self) -> tuple[str, ...]:
        """Every slice but the whole, in the order of the contract."""
        return tuple(dict.fromkeys(c.slice for c in self.enforced if c.slice != WHOLE))

    def worst(self, slice_: str | None = None) -> CellVerdict | None:
        """The cell to name first: violated before others, then the largest of its limit."""
        return worst_promise(c for c in self.cells if slice_ in (None, c.slice))

    def of_whole(self, metric: str) -> CellVerdict | None:
        """The first cell of a metric on all tokens, enforced or not."""
        cells = (c for c in self.cells if c.slice == WHOLE and c.metric == metric)
        return next((c for c in cells if c.value is not None), None)

    @property
    def coverage(self) -> CellVerdict | None:
        return next((c for name in COVERAGE if (c := self.of_whole(name)) is not None), None)


class Source(Protocol):
    """What is followed.

    `kind` names it in a state file; `missing` says why there is nothing to see yet, and `left`
    what is there and is not counted; both are "" where there is no reason.
    """

    kind: str
    missing: str
    left: str

    def poll(self, *, final: bool) -> Iterator[WatchedStep]:
        """The steps that are whole and were not polled yet, in their order.

        Args:
            final: nothing more will be written: what is there is whole.
        """
        ...

    def head(self) -> tuple[str, ...]:
        """Lines that say what is followed, once it is known."""
        ...

    def to_plain(self) -> dict[str, Any]:
        """Plain data from which `resume` goes on."""
        ...

    def resume(self, state: Mapping[str, Any]) -> None: ...
