# A law of engines, and the case it is tried on: one open engine and what was drawn with it.
#
# Axes: S sequences, N tokens of all sequences one after another, K best tokens.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from servanda.contract.identity import Description
from servanda.contract.model import Path
from servanda.engines.base import Engine, verb_of
from servanda.errors import MeasurementError
from servanda.registry import Registry
from servanda.theory.sampling import Sampling, uniforms
from servanda.traces.trace import Array, Batch, Trace

PLAIN = Sampling()  # type: ignore[call-arg]
COLD = Sampling(temperature=0.5)  # type: ignore[call-arg]
GREEDY = Sampling(top_k=1)  # type: ignore[call-arg]
CUT = Sampling(top_p=0.5)  # type: ignore[call-arg]
BY_CHANCE = 1e-9  # what is rarer than this in an honest engine is no accident
FEW = 16  # sequences where a law does not need many

_TEXTS = ("The ship left the harbour", "Two and two", "In the year", "A", "Once there was a king")
_FIRST, _STRIDE = 11, 3  # launch indexes are neither rows of a batch nor consecutive

T = TypeVar("T")


class Broken(Exception):  # noqa: N818 - it is found, and not raised at a caller
    """An engine does otherwise than a law says: what was found, and the next move."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class Skipped(Exception):  # noqa: N818
    """A law does not apply to this engine; the reason is reported."""


Law = Callable[["Case"], str | None]
LAWS: Registry[Law] = Registry("law")


def require(holds: object, message: str, hint: str) -> None:
    """What an engine was found to do, where it is not what a law says.

    Raises:
        Broken: `holds` is false.
    """
    if not holds:
        raise Broken(message, hint)


def require_none(odd_N: Array, message: Callable[[int], str], hint: str) -> None:
    """What was found at the first token that is odd.

    Raises:
        Broken: one is.
    """
    at = np.flatnonzero(odd_N)
    if len(at):
        raise Broken(message(int(at[0])), hint)


@dataclass
class Case:
    """One open engine, and how strictly it is held: the options of `examine_engine`.

    Args:
        open_engine: opens it again; engine: the one that laws are tried on.
        texts: prompts, as texts or token ids; None: they are made up.
    """

    open_engine: Callable[[], Engine]
    engine: Any
    texts: Sequence[str | Sequence[int]] | None
    tolerance: float
    prefill: float
    flips: float
    deterministic: bool
    reopen: bool
    sequences: int
    width: int
    seed: int
    _drawn: dict[Any, tuple[Batch, Trace]] = field(default_factory=dict)

    @cached_property
    def description(self) -> Description:
        """The engine's description before anything ran."""
        return self.engine.describe()

    @cached_property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of the prompts, of unequal lengths where they are made up.

        Raises:
            MeasurementError: there are none, and none can be made up.
        """
        texts = self.texts
        size, ends = self.description.vocab_size, set(self.description.eos)
        if texts is None and size:
            ids = [i for i in range(size) if i not in ends]
            at = (uniforms(self.seed, "prompt", 0, 32) * len(ids)).astype(int).tolist()
            return tuple(tuple(ids[i] for i in at[4 * n : 4 * n + 1 + n % 4]) for n in range(8))
        if texts is None and not self.description.encodes:
            raise MeasurementError(
                "the engine knows neither its vocabulary nor a tokenizer, so no prompt can be "
                "made up",
                hint="give token ids: check_engine(open_engine, prompts=[[1, 2], [3]])",
            )
        lines = [*(_TEXTS if texts is None else texts)]
        ids_of = iter(self.engine.encode([line for line in lines if isinstance(line, str)]))
        return tuple(tuple(next(ids_of) if isinstance(line, str) else line) for line in lines)

    @cached_property
    def room(self) -> int:
        """New tokens that every prompt has room for.

        Raises:
            MeasurementError: there are none.
        """
        context, longest = self.description.context, max(map(len, self.prompts))
        room = self.width if context is None else min(self.width, context - longest)
        if room < 1:
            raise MeasurementError(
                f"a prompt of {longest} tokens leaves no room in a context of {context}",
                hint="give shorter prompts",
            )
        return room

    def batch(self, n: int = FEW, width: int | None = None, same: bool = False) -> Batch:
        """The first n sequences; `same`: all from one prompt."""
        prompts = [self.prompts[0 if same else i % len(self.prompts)] for i in range(n)]
        launched = tuple(_FIRST + _STRIDE * i for i in range(n))
        return Batch(launched, tuple(prompts), width or self.room)

    def generate(self, batch: Batch, sampling: Sampling = PLAIN, seed: int | None = None) -> Trace:
        """Draw; an engine that cannot, or not under these filters, is not spoken of."""
        seed = self.seed if seed is None else seed
        return self._unless_refused(
            lambda: verb_of(self.engine, "generate")(batch, sampling, seed), sampling
        )

    def score(self, batch: Batch, path: Path, sampling: Sampling = PLAIN) -> Trace:
        if path not in self.description.scores:
            raise Skipped(f"it does not score by {path}")
        return self._unless_refused(lambda: self.engine.score(batch, sampling, path), sampling)

    def _unless_refused(self, ask: Callable[[], T], sampling: Sampling) -> T:
        try:
            return ask()
        except MeasurementError as error:
            if "has no verb" in error.args[0]:
                raise Skipped(error.args[0]) from None
            if sampling != PLAIN:
                changed = sampling.model_dump(exclude_defaults=True).items()
                options = ", ".join(f"{name} {value}" for name, value in changed)
                raise Skipped(f"it refuses {options}: {error.args[0]}") from None
            raise

    def drawn(self, sampling: Sampling = PLAIN, n: int | None = None) -> tuple[Batch, Trace]:
        """A batch and what was drawn for it, once; n: the default is as many as laws need."""
        key = sampling, n
        if key not in self._drawn:
            batch = self.batch(self.sequences if n is None else n)
            self._drawn[key] = batch, self.generate(batch, sampling)
        return self._drawn[key]

    def given(self, sampling: Sampling = PLAIN) -> tuple[Batch, Array]:
        """Continuations to score and their recorded logprobs, [N]; NaN where nothing drew them.

        Sequences that were lost, or are empty, are left out.
        """
        try:
            batch, trace = self.drawn(sampling, FEW)
        except Skipped:
            if sampling != PLAIN:
                raise
            return self._made_up()
        rows = [row for row, length in enumerate(trace.length_S) if length]
        if not rows:
            raise Skipped("every sequence it drew was lost")
        batch = replace(batch, continuations=trace.continuations).take(rows)
        return batch, trace.columns["logp"]

    def _made_up(self) -> tuple[Batch, Array]:
        batch = self.batch()
        tokens = [token for prompt in self.prompts for token in prompt]
        lengths = [1 + i % self.room for i in range(len(batch))]
        given = tuple(
            tuple(tokens[(i + t) % len(tokens)] for t in range(length))
            for i, length in enumerate(lengths)
        )
        return replace(batch, continuations=given), np.full(sum(lengths), np.nan)


def place(trace: Trace, at: int) -> str:
    """Where a token of a trace stands: "sequence 14, new token 3"."""
    ends_S = np.cumsum(trace.length_S)
    row = int(np.searchsorted(ends_S, at, side="right"))
    start = int(ends_S[row] - trace.length_S[row])
    return f"sequence {trace.sequence_S[row]}, new token {at - start}"


def apart(one_N: Array, other_N: Array) -> Array:
    """|difference| of two records of the same logprobs, [N]; equal infinities are equal.

    NaN where either side has no value.
    """
    with np.errstate(invalid="ignore"):
        gap_N = np.abs(one_N - other_N)
    return np.where(one_N == other_N, 0.0, gap_N)


def unlikely(logp_N: Array) -> bool:
    """Whether drawing just these tokens once more, by chance, is out of the question."""
    known_N = logp_N[np.isfinite(logp_N)]
    return len(known_N) > 0 and float(known_N.sum()) < np.log(BY_CHANCE)
