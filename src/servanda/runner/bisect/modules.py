# The module of B that makes it differ from A: two kernels of one architecture in one process.
#
# A module is at fault if it computes something else than that of A on the inputs of A.  What it
# explains is the share of KL(B || A) that goes away once the module of A stands in its place.
# Axes: N given tokens, V vocabulary.

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.kernel_string import parse_kernel
from servanda.contract.model import Path
from servanda.engines import engine_names, open_engine
from servanda.engines.base import AROUND
from servanda.errors import ContractError, Where
from servanda.runner.batch_invariance import PLAIN
from servanda.runner.bisect.module_result import BEYOND, Module, ModuleBisection
from servanda.runner.bisect.weight_layout import Floats32, Origins, TensorOrigin
from servanda.runner.compare.contract import SHIPPED, read_corpus, shipped
from servanda.runner.compare.sides import refuse_missing
from servanda.runner.measurement import Progress, Watch, unwatched
from servanda.runner.probe import encoded
from servanda.theory.divergence.base import LogitRows
from servanda.theory.divergence.kl import kl_exact
from servanda.traces.trace import Batch

if TYPE_CHECKING:
    from servanda.engines.transformers_modules import Key, Recording

# The errors of the tensors of B beside A: on the inputs of A, in a run of B, and their noise.


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
        from servanda.engines.transformers_modules import errors, record

        part, given = replace(chunk.take(rows), together=len(rows)), of_a.take(rows)
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


TOGETHER = 8  # sequences whose tensors are in memory at a time
_NAMED = 0.9  # share of the divergence that named modules explain together
_OTHERS = (
    "modules are swapped between two kernels of transformers, such as "
    "transformers:models/x@bfloat16"
)
_ALONE = 32  # most modules that are swapped one by one


def drawn(b: Any, prompts: Sequence[Sequence[int]], width: int, seed: int = 0) -> Batch:
    """Prompts with the continuations that B draws at temperature 1."""
    batch = Batch(tuple(range(len(prompts))), tuple(tuple(p) for p in prompts), width)
    return replace(batch, continuations=b.generate(batch, PLAIN, seed).continuations)


def bisect_modules(
    a: Any, b: Any, batch: Batch, path: Path, *, watch: Watch = unwatched
) -> ModuleBisection:
    """Compare the modules of two open engines on given tokens.

    Raises:
        ContractError: not two kernels of one architecture in Transformers.
    """
    classes = _classes(a, b)
    chunks = batch.chunks(min(TOGETHER, a.kernel.batch_size, b.kernel.batch_size))
    found = TensorErrors()
    for number, chunk in enumerate(chunks):
        watch(Progress("running the modules", number, len(chunks)))
        found.add(a, b, chunk, path)
    watch(Progress("running the modules", len(chunks), len(chunks)))
    rows = [*_modules(found, classes)]
    by_error = sorted((r for r in rows if r.differs), key=lambda r: -r.error)
    suspects = [row.name for row in by_error]
    kl, floor = found.mean_kl, found.mean_floor
    shares: dict[str, float] = {}
    cause: tuple[str, ...] = ()
    explained = joint = None
    if suspects and kl > BEYOND * floor:
        explains = partial(_explained, a, b, chunks, path, found.logits, kl)
        alone = suspects[:_ALONE]
        for number, name in enumerate(alone):
            watch(Progress("swapping modules", number, len(alone)))
            shares[name] = explains({name})
        watch(Progress("swapping modules", len(alone), len(alone)))
        joint = shares[suspects[0]] if len(suspects) == 1 else explains({*suspects})
        ranked = sorted(suspects, key=lambda name: -shares.get(name, -math.inf))
        cause, explained = _fewest(ranked, shares, explains, joint)
        if not cause and AROUND not in shares:  # a cache, that modules are given
            shares[AROUND] = explains({AROUND})
            if shares[AROUND] >= _NAMED:
                cause, explained = (AROUND,), shares[AROUND]
    return ModuleBisection(
        a=str(a.kernel),
        b=str(b.kernel),
        path=path,
        sequences=len(batch),
        tokens=sum(map(len, batch.continuations)),
        kl_nats=kl,
        floor_nats=floor,
        first=found.first,
        modules=tuple(replace(row, share=shares.get(row.name)) for row in rows),
        cause=cause,
        explained=explained,
        joint=joint,
        weights=tuple(_weights(a, b, cause)),
    )


def _classes(a: Any, b: Any) -> dict[str, str]:
    from servanda.engines.transformers_modules import module_classes

    for engine, side in ((a, "A"), (b, "B")):
        if not hasattr(engine, "model") or not hasattr(engine.model, "named_modules"):
            raise ContractError(
                f"{side} is a kernel of engine {engine.kernel.engine!r}, whose modules cannot be "
                "reached",
                hint=_OTHERS,
            )
    sides = [module_classes(engine) for engine in (a, b)]
    if sides[0][""] != sides[1][""]:
        raise ContractError(
            f"A is a {sides[0]['']} and B a {sides[1]['']}",
            hint="modules are swapped between two kernels of one architecture",
        )
    return {AROUND: "engine"} | {n: kind for n, kind in sides[1].items() if n in sides[0]}


def _modules(found: TensorErrors, classes: dict[str, str]) -> Iterator[Module]:
    """In the order in which they are done; only those that ran on both sides."""
    worst: dict[str, Key] = {}
    done: dict[str, None] = {}
    for key in found.order:
        if key.kind == "output":
            done.setdefault(key.owner)
        if key in found.local:
            best = worst.setdefault(key.owner, key)
            if (found.beyond(key), found.local[key]) > (found.beyond(best), found.local[best]):
                worst[key.owner] = key
    for name in done:
        key = worst.get(name)
        yield Module(
            name=name,
            kind=classes.get(name, ""),
            tensor="" if key is None else tensor_name(key),
            error=math.nan if key is None else found.local[key],
            noise=0.0 if key is None else found.noise.get(key, 0.0),
            run_error=found.run.get(name, math.nan),
            share=None,
            differs=key is not None and found.beyond(key),
        )


def _explained(
    a: Any,
    b: Any,
    chunks: Sequence[Batch],
    path: Path,
    logits: Sequence[Rows],
    kl: float,
    names: Collection[str],
) -> float:
    """The share of the divergence that modules of A in B remove."""
    from servanda.engines.transformers_modules import swapped

    left, n = 0.0, 0
    for chunk, of_a in zip(chunks, logits, strict=True):
        left += float(kl_of(of_a, swapped(a, b, names, chunk, path)).sum())
        n += len(of_a)
    return 1 - left / n / kl


def _weights(a: Any, b: Any, cause: Collection[str]) -> Iterator[TensorOrigin]:
    """Parameters of these modules of B, beside all of A."""

    def values(parameter: Any) -> Floats32:
        return parameter.detach().float().cpu().numpy()

    of_a = dict(a.model.named_parameters())
    origins = Origins(
        {name: partial(values, parameter) for name, parameter in of_a.items()},
        {name: tuple(parameter.shape) for name, parameter in of_a.items()},
    )
    named = [name for name in of_a if name.rpartition(".")[0] in cause]
    of_b = dict(b.model.named_parameters())
    pairs = [(name, values(of_b[name])) for name in named if name in of_b]
    for origin in origins.of(pairs):
        if origin.kind not in ("equal", "only in A"):
            yield origin


def _fewest(
    ranked: Sequence[str],
    shares: dict[str, float],
    explains: Callable[[Collection[str]], float],
    joint: float,
) -> tuple[tuple[str, ...], float | None]:
    """The shortest beginning of the ranking, by doubling and halving, that explains enough.

    Shares need not grow with the set: the returned one was measured.
    """
    if shares[ranked[0]] >= _NAMED:
        return (ranked[0],), shares[ranked[0]]
    if joint < _NAMED:
        return (), None
    low, high, best = 1, len(ranked), joint  # `low` is too few
    while high - low > 1:
        middle = (low + high) // 2
        share = explains({*ranked[:middle]})
        if share >= _NAMED:
            high, best = middle, share
        else:
            low = middle
    return tuple(ranked[:high]), best


def bisect_kernels(
    a_text: str,
    b_text: str,
    prompts: FilePath | None,
    sequences: int,
    width: int,
    path: Path,
    *,
    watch: Watch = unwatched,
) -> ModuleBisection:
    """Open two kernels by their strings and compare their modules on tokens that B draws.

    Raises:
        ContractError: an invalid kernel string or file; kernels whose modules cannot be swapped.
        MeasurementError: a kernel does not load.
    """
    engines = []
    for text, name in ((a_text, "A"), (b_text, "B")):
        kernel = parse_kernel(text, engines=engine_names(), name=name)
        refuse_missing(kernel, text, name)
        if kernel.engine != "transformers" or kernel.python is not None:
            raise ContractError(
                f"{name} runs outside of this process, where its modules cannot be reached",
                where=Where(name, 1, 1, text),
                hint=_OTHERS,
            )
        watch(Progress("loading the kernels", len(engines), 2))
        engines.append(open_engine(kernel))
    watch(Progress("loading the kernels", 2, 2))
    a, b = engines
    _classes(a, b)  # before anything is drawn
    corpus = read_corpus(prompts or shipped(SHIPPED))
    ids = encoded(corpus, b, width)
    chosen = np.linspace(0, len(ids) - 1, min(sequences, len(ids))).round().astype(int)
    return bisect_modules(a, b, drawn(b, [ids[i] for i in chosen], width), path, watch=watch)
