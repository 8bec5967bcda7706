# Corners of the envelope: a numerical clause at the smallest and largest batches and prompts.

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from servanda.contract.model import Contract
from servanda.contract.workload import Path
from servanda.judgement.clauses.base import Cell, Source
from servanda.judgement.clauses.numerical import Fact, Values
from servanda.theory.divergence.base import Floats

MOST_TOKENS = 24  # judged tokens after each prompt of a corner
Exact = Mapping[str, Floats]  # metric -> value at each position, [N]


@dataclass(frozen=True)
class Corner:
    """One corner: the batch size and the prompt length.

    Args:
        prompt_tokens: None if not declared: golden texts unchanged.
        width: number of judged tokens after each prompt.
    """

    batch_size: int
    prompt_tokens: int | None
    width: int
    path: Path

    @property
    def name(self) -> str:
        prompt = f" prompt={self.prompt_tokens}" if self.prompt_tokens else ""
        return f"corner batch={self.batch_size}{prompt}"


@dataclass(frozen=True)
class CornerRun:
    """The exact metrics of one corner, and the noise of each side there."""

    exact: Exact
    selves: tuple[Exact, ...]


@dataclass(frozen=True)
class CornerFact(Fact):
    """Exact for the scored positions of one corner."""

    corner: Corner
    source: ClassVar[Source] = "corners"

    def weigh(  # type: ignore[override]
        self, cell: Cell, runs: Mapping[str, CornerRun]
    ) -> Values:
        return Values.of(runs[self.corner.name].exact[cell.clause.metric])

    def noise(  # type: ignore[override]
        self, cell: Cell, runs: Mapping[str, CornerRun]
    ) -> tuple[tuple[Values, Values], ...]:
        selves = [Values.of(exact[cell.clause.metric]) for exact in runs[self.corner.name].selves]
        return tuple((values, values) for values in selves)


def corners_of(contract: Contract) -> tuple[Corner, ...]:
    """The combinations of low and high batch size and prompt length."""
    envelope = contract.runtime.envelope
    if envelope is None or not (envelope.batch_size or envelope.prompt_tokens):
        return ()
    infer = contract.kernels.infer
    batches = envelope.batch_size or (infer.batch_size,)
    prompts = [max(1, int(n)) for n in envelope.prompt_tokens or ()] or [None]
    new = contract.workload.sampling.max_new_tokens if contract.workload else MOST_TOKENS
    path: Path = envelope.path or infer.path or "decode"
    return tuple(
        Corner(max(1, int(batch)), prompt, min(new, MOST_TOKENS), path)
        for batch, prompt in dict.fromkeys(itertools.product(batches, prompts))
    )
