# The errors of the tensors of B beside A: on the inputs of A, in a run of B, and their noise.
#
# Axes: N given tokens, V vocabulary.

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.model import Path
from servanda.theory.divergence.base import LogitRows
from servanda.theory.divergence.kl import kl_exact
from servanda.traces.trace import Batch

if TYPE_CHECKING:
    from servanda.engines.transformers_modules import Key, Recording

BEYOND = 2.0  # times its own noise: what differs by more differs

Rows = NDArray[np.float32]


class TensorErrors:
    """The errors of all chunks."""

    def __init__(self) -> None:
        self.local: dict[Key, float] = {}
        self.run: dict[str, float] = {}
        self.noise: dict[Key, float] = {}
        self.order: dict[Key, None] = {}
        self.logits: list[Rows] = []
        self.kl = self.floor = 0.0
        self.n = self.floor_n = 0

    @property
    def mean_kl(self) -> float:
        return self.kl / max(self.n, 1)

    @property
    def mean_floor(self) -> float:
        return self.floor / max(self.floor_n, 1)

    def beyond(self, key: Key) -> bool:
        return self.local[key] > BEYOND * self.noise.get(key, 0.0)

    @property
    def first(self) -> tuple[str, str] | None:
        """The module and the tensor."""
        for key in self.order:
            if key in self.local and self.beyond(key):
                return key.owner, tensor_name(key)
        return None

    def add(self, a: Any, b: Any, chunk: Batch, path: Path) -> None:
        from servanda.engines.transformers_modules import errors, record

        of_a, of_b = record(a, chunk, path), record(b, chunk, path)
        # A on its own tensors as well: given ones lie otherwise in memory, and may round otherwise
        again, at_a = (record(side, chunk, path, given=of_a) for side in (a, b))
        self.order |= dict.fromkeys(at_a.tensors)
        _raise(self.noise, _finite(errors(of_a, again)))
        _raise(self.local, errors(again, at_a))
        outputs = {k: e for k, e in errors(of_a, of_b).items() if k.kind == "output"}
        _raise(self.run, {key.module: 0.0 for key in outputs})
        for key, error in outputs.items():
            _raise(self.run, {key.module: error})
        self.kl += float(kl_of(of_a.logits_NV, of_b.logits_NV).sum())
        self.n += len(of_a.logits_NV)
        self.logits.append(of_a.logits_NV)
        for rows in _parts(chunk):
            self.rebatched(a, b, chunk, path, rows, of_a, (again, at_a))

    def rebatched(
        self,
        a: Any,
        b: Any,
        chunk: Batch,
        path: Path,
        rows: Sequence[int],
        of_a: Recording,
        on_a: tuple[Recording, Recording],
    ) -> None:
        """The noise: each side against itself, on the same inputs in another batch."""
        from servanda.engines.transformers_modules import errors, record, with_rows

        part, given = with_rows(chunk, rows), of_a.take(rows)
        for engine, whole in zip((a, b), on_a, strict=True):
            before, again = whole.take(rows), record(engine, part, path, given=given)
            _raise(self.noise, _finite(errors(before, again)))
        sizes = [len(given) for given in chunk.continuations]
        ends = np.cumsum(sizes)
        at_N = np.concatenate([np.arange(ends[r] - sizes[r], ends[r]) for r in rows])
        free = np.concatenate([*a.logits(part, path)])
        self.floor += float(kl_of(of_a.logits_NV[at_N], free).sum())
        self.floor_n += len(at_N)


def _finite(found: dict[Any, float]) -> dict[Any, float]:
    """Without inf: of a tensor that does not split into rows the noise is not known."""
    return {key: error for key, error in found.items() if math.isfinite(error)}


def _raise(most: dict[Any, float], found: dict[Any, float]) -> None:
    for key, error in found.items():
        most[key] = max(error, most.get(key, 0.0))


def _parts(chunk: Batch) -> Iterator[list[int]]:
    """Halves of a chunk, each with its longest prompt, which decides the width of both."""
    longest = max(range(len(chunk)), key=lambda row: len(chunk.prompts[row]))
    others = [row for row in range(len(chunk)) if row != longest]
    if not others:
        yield [longest]
        return
    middle = (len(others) + 1) // 2
    for half in (others[:middle], others[middle:]):
        if half:
            yield sorted([longest, *half])


def tensor_name(key: Key) -> str:
    if key.kind == "output":
        return f"output.{key.name}" if key.name else "output"
    inner = key.module.removeprefix(f"{key.owner}.") if key.owner else key.module
    return f"{inner}.{key.name}" if inner else key.name


def kl_of(a_NV: Rows, b_NV: Rows) -> NDArray[np.float64]:
    return kl_exact(LogitRows(a_NV, b_NV))
