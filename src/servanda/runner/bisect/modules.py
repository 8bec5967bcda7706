# The module of B that makes it differ from A: two kernels of one architecture in one process.
#
# A module is at fault if it computes something else than that of A on the inputs of A.  What it
# explains is the share of KL(B || A) that goes away once the module of A stands in its place.
# Axes: N given tokens, V vocabulary.

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from servanda.contract.kernel_string import parse_kernel
from servanda.contract.model import Path
from servanda.engines import engine_names, open_engine
from servanda.engines.base import AROUND
from servanda.errors import ContractError, Where
from servanda.runner.batch_invariance import PLAIN
from servanda.runner.compare.prompts import SHIPPED, read_corpus, shipped
from servanda.runner.compare.sides import refuse_missing
from servanda.runner.measurement import Progress, Watch, unwatched
from servanda.runner.probe import encoded
from servanda.theory.divergence.base import LogitRows
from servanda.theory.divergence.kl import kl_exact
from servanda.traces.trace import Batch

if TYPE_CHECKING:
    from servanda.engines.transformers_modules import Key, Recording

TOGETHER = 8  # sequences whose tensors are in memory at a time
BEYOND = 2.0  # times its own noise: what differs by more differs
_NAMED = 0.9  # share of the divergence that named modules explain together
_OTHERS = (
    "modules are swapped between two kernels of transformers, such as "
    "transformers:models/x@bfloat16"
)
_FEW = 8  # modules of several kinds that are still a cause
_ALONE = 32  # most modules that are swapped one by one

Rows = NDArray[np.float32]


@dataclass(frozen=True)
class Module:
    """One module of B beside that of A.

    Args:
        name: its path in the model; "" is the model itself, AROUND what the engine does around it.
        tensor: where the local error is largest: "output", or an input of a child as
            "child.argument".
        error: local error, on the inputs of A; NaN if the sides share no tensor of it.
        noise: the error of the same tensor between runs of one side in other batches.
        run_error: error of its output in a run of B, where errors before it arrive as well.
        share: of KL(B || A) that the module of A removes in its place; None: not measured.
        differs: whether some tensor has an error beyond its noise.
    """

    name: str
    kind: str
    tensor: str
    error: float
    noise: float
    run_error: float
    share: float | None
    differs: bool


@dataclass(frozen=True)
class ModuleBisection:
    """What makes the logits of B differ, by modules in the order of execution.

    Args:
        tokens: given tokens, all drawn by B.
        kl_nats: mean KL(B || A) of a token.
        floor_nats: the same between runs of A in other batches.
        first: the first tensor that differs beyond its noise, as Module.tensor.
        cause: the fewest modules, by their shares, that explain nine tenths together.
        explained: the share that they explain.
        joint: the share that all modules explain that differ.
    """

    a: str
    b: str
    path: Path
    sequences: int
    tokens: int
    kl_nats: float
    floor_nats: float
    first: tuple[str, str] | None
    modules: tuple[Module, ...]
    cause: tuple[str, ...]
    explained: float | None
    joint: float | None

    @property
    def suspects(self) -> tuple[Module, ...]:
        return tuple(module for module in self.modules if module.differs)

    @property
    def moved(self) -> bool:
        """Whether the logits differ beyond their noise."""
        return self.kl_nats > BEYOND * self.floor_nats

    @property
    def outcome(self) -> Literal["same", "below noise", "named", "spread", "unexplained"]:
        """spread: as another precision does it, with many modules of several kinds."""
        if not self.moved:
            return "below noise" if self.suspects else "same"
        kinds = {name.rpartition(".")[2] for name in self.cause}
        if len(self.cause) > _FEW and len(kinds) > 1:
            return "spread"
        return "named" if self.cause else "unexplained"


def drawn(b: Any, prompts: Sequence[Sequence[int]], width: int, seed: int = 0) -> Batch:
    """Prompts with the continuations that B draws at temperature 1."""
    batch = Batch(tuple(range(len(prompts))), tuple(tuple(p) for p in prompts), width)
    trace = b.generate(batch, PLAIN, seed)
    ends = trace.length_S.cumsum()
    given = [part.tolist() for part in np.split(trace.token_N, ends[:-1])]
    return Batch(batch.sequence_S, batch.prompts, width, tuple(map(tuple, given)))


def bisect_modules(
    a: Any, b: Any, batch: Batch, path: Path, *, watch: Watch = unwatched
) -> ModuleBisection:
    """Compare the modules of two open engines on given tokens.

    Raises:
        ContractError: not two kernels of one architecture in Transformers.
    """
    classes = _classes(a, b)
    chunks = batch.chunks(min(TOGETHER, a.kernel.batch_size, b.kernel.batch_size))
    found = _Found()
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
        modules=tuple(_shared(row, shares) for row in rows),
        cause=cause,
        explained=explained,
        joint=joint,
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


class _Found:
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
                return key.owner, _tensor(key)
        return None

    def add(self, a: Any, b: Any, chunk: Batch, path: Path) -> None:
        from servanda.engines.transformers_modules import errors, record

        of_a, of_b = record(a, chunk, path), record(b, chunk, path)
        at_a = record(b, chunk, path, given=of_a)
        self.order |= dict.fromkeys(at_a.tensors)
        _raise(self.local, errors(of_a, at_a))
        outputs = {k: e for k, e in errors(of_a, of_b).items() if k.kind == "output"}
        _raise(self.run, {key.module: 0.0 for key in outputs})
        for key, error in outputs.items():
            _raise(self.run, {key.module: error})
        self.kl += float(_kl(of_a.logits_NV, of_b.logits_NV).sum())
        self.n += len(of_a.logits_NV)
        self.logits.append(of_a.logits_NV)
        for rows in _parts(chunk):
            self.rebatched(a, b, chunk, path, rows, of_a, at_a)

    def rebatched(
        self,
        a: Any,
        b: Any,
        chunk: Batch,
        path: Path,
        rows: Sequence[int],
        of_a: Recording,
        at_a: Recording,
    ) -> None:
        """The noise: what each side computes on the same inputs in another batch."""
        from servanda.engines.transformers_modules import errors, record, with_rows

        part, given = with_rows(chunk, rows), of_a.take(rows)
        for engine, before in ((a, given), (b, at_a.take(rows))):
            again = record(engine, part, path, given=given)
            # inf: a tensor that does not split into rows, so its noise is not known
            finite = {k: e for k, e in errors(before, again).items() if math.isfinite(e)}
            _raise(self.noise, finite)
        sizes = [len(given) for given in chunk.continuations]
        ends = np.cumsum(sizes)
        at_N = np.concatenate([np.arange(ends[r] - sizes[r], ends[r]) for r in rows])
        free = np.concatenate([*a.logits(part, path)])
        self.floor += float(_kl(of_a.logits_NV[at_N], free).sum())
        self.floor_n += len(at_N)


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


def _tensor(key: Key) -> str:
    if key.kind == "output":
        return f"output.{key.name}" if key.name else "output"
    inner = key.module.removeprefix(f"{key.owner}.") if key.owner else key.module
    return f"{inner}.{key.name}" if inner else key.name


def _modules(found: _Found, classes: dict[str, str]) -> Iterator[Module]:
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
            tensor="" if key is None else _tensor(key),
            error=math.nan if key is None else found.local[key],
            noise=0.0 if key is None else found.noise.get(key, 0.0),
            run_error=found.run.get(name, math.nan),
            share=None,
            differs=key is not None and found.beyond(key),
        )


def _shared(row: Module, shares: dict[str, float]) -> Module:
    return replace(row, share=shares.get(row.name))


def _kl(a_NV: Rows, b_NV: Rows) -> NDArray[np.float64]:
    return kl_exact(LogitRows(a_NV, b_NV))


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
        left += float(_kl(of_a, swapped(a, b, names, chunk, path)).sum())
        n += len(of_a)
    return 1 - left / n / kl


def _fewest(
    ranked: Sequence[str],
    shares: dict[str, float],
    explains: Callable[[Collection[str]], float],
    joint: float,
) -> tuple[tuple[str, ...], float | None]:
    """The shortest beginning of the ranking, by doubling and halving, that explains enough.

    Shares need not grow with the set: what is returned was measured.
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
    ids = encoded(corpus, b)
    chosen = np.linspace(0, len(ids) - 1, min(sequences, len(ids))).round().astype(int)
    return bisect_modules(a, b, drawn(b, [ids[i] for i in chosen], width), path, watch=watch)
