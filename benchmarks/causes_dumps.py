# Dumps with known faults: logprobs of faulty kernels on fixed texts, put together as a trainer
# would write them.
#
# Axes: S sequences of one step, T response tokens, R rows of all sequences, V vocabulary.

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from servanda.rl.dumps.formats.parquet import Writer

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "causes"
STEPS, SIZE, WIDTH = 6, 32, 48
ROWS = STEPS * SIZE
Array = Any


@dataclass(frozen=True)
class Model:
    """A shipped model, one made from it, or one that is trained here.

    Args:
        kind, seed, moved: of `tests.trainers.trainer`; kind and seed of a trained one.
        tune: whether thresholds may be chosen on it; looked_at: whether its answers were seen
            before the rules were what they are.
        layers: of a model that is trained from nothing; 0: it is not.
        folder: of a real model, whose kernels take minutes each: a fault has one strength.
    """

    kind: str
    seed: int
    moved: float
    tune: bool
    layers: int = 0
    looked_at: bool = True
    folder: str = ""


MODELS = {
    "llama, with biases, moved": Model("llama, with biases", 2, 0.015, False),
    "tiny-lm": Model("llama", 0, 0.0, True),
    "tiny-qwen3": Model("qwen3", 0, 0.0, True),
    "llama, untied, moved": Model("llama, untied", 1, 0.01, True),
    "llama, 6 layers, trained": Model("llama", 11, 0.0, False, layers=6, looked_at=False),
    "qwen3, 2 layers, trained": Model("qwen3", 12, 0.0, False, layers=2, looked_at=False),
    "llama, 3 layers, trained": Model("llama", 13, 0.0, False, layers=3, looked_at=False),
    "qwen3, 5 layers, trained": Model("qwen3", 14, 0.0, False, layers=5, looked_at=False),
    "SmolLM2-135M": Model("real", 21, 0.0, False, folder=".venvs/real-model/float32"),
}
_TRAINED_STEPS = 400
# strengths of dumps of trained models, where those between the used ones are none or no others
_UNUSED = {"block_edges": (64,), "shifted": (-2,), "healthy": (3,), "mask_contamination": (True,)}


@dataclass(frozen=True)
class Fault:
    """A fault of a dump.

    Args:
        causes: the names that are right; () for a healthy dump.
        kind: how it is made.
        make: a world, a strength and a generator to a record.
        tune, test: strengths.
    """

    causes: tuple[str, ...]
    kind: str
    make: Callable[[World, Any, np.random.Generator], Record]
    tune: tuple[Any, ...]
    test: tuple[Any, ...]


@dataclass
class Record:
    """What is written: columns of the response, [R, T], and of sequences."""

    token: Array
    train: Array
    infer: Array
    mask: Array
    labels: dict[str, list[str]]
    staleness: Array | None = None


@dataclass(frozen=True)
class World:
    """A model's texts and the logits of healthy kernels on them, each [ROWS, WIDTH, V]."""

    name: str
    prompts: list[tuple[int, ...]]
    token: Array
    exact: Array
    rounded: Array

    @property
    def healthy(self) -> Record:
        """The engine in float32, the trainer in bfloat16."""
        return Record(
            self.token.copy(),
            at(self.rounded, self.token),
            at(self.exact, self.token),
            np.ones(self.token.shape, dtype=bool),
            {},
        )

    def gap(self, fault: str, value: Any = True, path: str = "prefill") -> Array:
        """The logprobs of a faulty kernel less those of a healthy one, [ROWS, WIDTH]."""
        return scored(self.name, fault, value, path) - at(self.exact, self.token)


def log_softmax(z: Array) -> Array:
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def at(logp: Array, token: Array) -> Array:
    return np.take_along_axis(logp, token[..., None], -1)[..., 0].astype(np.float64)


def drawn(logp: Array, rng: np.random.Generator) -> Array:
    below = np.exp(logp).cumsum(-1, dtype=np.float64)
    return (below <= rng.random((*logp.shape[:2], 1)) * below[..., -1:]).sum(-1)


# kernels


@cache
def folder_of(name: str) -> str:
    model = MODELS[name]
    if model.folder:
        return str(ROOT / model.folder)
    if not model.moved and not model.layers:
        return str(ROOT / "models" / name)
    from tests.trainers import checkpoint, trainer

    folder = KEPT / name.replace(", ", "-").replace(" ", "-") / "model"
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        if model.layers:
            _train(model, folder)
            return str(folder)
        checkpoint(trainer(model.kind, model.seed, model.moved), folder)
    return str(folder)


def _train(model: Model, folder: Path) -> None:
    """Train a model of the shipped vocabulary from nothing."""
    sys.path.insert(0, str(ROOT / "scripts"))  # it imports its corpus by name
    import torch

    import train_tiny_lm as training

    shipped = training.SHIPPED[model.kind]
    shape = replace(shipped, layers=model.layers, heads=(4, 4), mlp=768 - shipped.mlp)
    torch.manual_seed(model.seed)
    tokenizer = training.train_tokenizer()
    made = shape.model(training.architecture(shape, tokenizer.eos_token_id))
    recipe = training.Recipe(steps=_TRAINED_STEPS, threads=1)
    training.train(made, training.rows(tokenizer, "train", model.seed), recipe)
    training.save(made, tokenizer, folder)


def strengths_of(name: str, model: Model) -> list[tuple[bool, Any]]:
    """(whether a threshold may be chosen with it, strength) of a fault on a model."""
    of = FAULTS[name]
    if model.folder:
        slow = name in ("kv_cache_int8", "mask_contamination")  # their decoding takes an hour
        return [] if slow else [(False, s) for s in (*of.tune, *of.test)[:1]]
    if model.layers:
        return [(False, strength) for strength in _UNUSED.get(name) or _between(of)]
    return [(True, s) for s in of.tune if model.tune or not of.test] + [(False, s) for s in of.test]


def _between(of: Fault) -> list[Any]:
    """The geometric mean of a strength of each kind: one that no dump had before."""
    used = (*of.tune, *of.test)
    if not (of.tune and of.test) or not all(type(s) in (int, float) and s > 0 for s in used):
        return [*used[-1:]]
    middle = (of.tune[0] * of.test[-1]) ** 0.5
    if isinstance(of.tune[0], float) or isinstance(of.test[-1], float):
        return [round(middle, 3)]
    return [next(n for n in range(round(middle), 10_000) if n not in used)]


def opened(name: str, fault: str = "", value: Any = True) -> Any:
    from servanda.contract.model import Kernel
    from servanda.engines.faults import FAULTS as CATALOGUE
    from servanda.engines.transformers import TransformersEngine

    more: dict[str, Any] = {"attention": "eager"}
    engine: Any = TransformersEngine
    if fault in ("bfloat16", "float16"):
        more |= {"dtype": fault}
    elif fault == "quantization":
        more |= {"quantization": value}
    elif fault == "softcap":
        engine = _capped(TransformersEngine, value)
    elif fault in CATALOGUE:
        engine = CATALOGUE[fault].inject(TransformersEngine, value)
    kernel = Kernel(engine="transformers", model=folder_of(name), batch_size=SIZE, **more)
    return engine(kernel)


def _capped(base: Any, value: float) -> Any:
    class Capped(base):
        def _forward(self, ids_ST: Any, mask_ST: Any, **options: Any) -> Any:
            import torch

            logits = super()._forward(ids_ST, mask_ST, **options)
            with torch.inference_mode():
                return value * torch.tanh(logits / value)

    return Capped


def prompts_of(name: str) -> list[tuple[int, ...]]:
    lines = (ROOT / "data" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    ids = [tuple(row) for row in opened(name).encode(texts[:600])]
    short = [row for row in ids if 8 <= len(row) <= 72]
    order = np.random.default_rng(MODELS[name].seed).permutation(len(short))[: ROWS // 2]
    return [short[i] for i in order for _ in range(2)]  # two answers to a prompt


@cache
def world_of(name: str) -> World:
    """Drawn once by real decoding in float32, and kept."""
    from servanda.theory.sampling import Sampling
    from servanda.traces.trace import Batch

    path = KEPT / name.replace(", ", "-").replace(" ", "-") / "world.npz"
    if not path.exists():
        prompts = prompts_of(name)
        engine = opened(name)
        # no end token: every answer has the same width
        object.__setattr__(engine._description, "eos", ())
        token = np.zeros((ROWS, WIDTH), dtype=np.int64)
        for first in range(0, ROWS, SIZE):
            rows = tuple(range(first, first + SIZE))
            batch = Batch(rows, tuple(prompts[r] for r in rows), WIDTH)
            for r, answer in zip(
                rows, engine.generate(batch, Sampling(), 7).continuations, strict=True
            ):
                token[r] = answer
        exact, rounded = (
            np.concatenate([*_logprobs(opened(name, fault), prompts, token, "prefill")])
            for fault in ("", "bfloat16")
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(
            path,
            token=token,
            exact=exact.astype(np.float32),
            rounded=rounded.astype(np.float32),
            prompts=np.array([len(p) for p in prompts]),
            ids=np.concatenate([np.array(p) for p in prompts]),
        )
    kept = np.load(path)
    ends = kept["prompts"].cumsum()
    prompts = [tuple(p.tolist()) for p in np.split(kept["ids"], ends[:-1])]
    return World(name, prompts, kept["token"], kept["exact"], kept["rounded"])


def _logprobs(engine: Any, prompts: Sequence[Any], token: Array, path: str) -> Iterator[Array]:
    """The logprobs of all tokens of the vocabulary, of one batch of rows after the other."""
    from servanda.traces.trace import Batch

    for first in range(0, ROWS, SIZE):
        rows = tuple(range(first, first + SIZE))
        answers = tuple(tuple(token[r].tolist()) for r in rows)
        batch = Batch(rows, tuple(prompts[r] for r in rows), WIDTH, answers)
        logits = np.concatenate([*engine.logits(batch, path)]).reshape(SIZE, WIDTH, -1)
        yield log_softmax(logits).astype(np.float32)


def scored(name: str, fault: str, value: Any, path: str) -> Array:
    """The logprobs of a faulty kernel, computed once."""
    own = f"{fault}-{value}-{path}.npy".replace("/", "_")
    kept = KEPT / name.replace(", ", "-").replace(" ", "-") / own
    if not kept.exists():
        world, prompts = world_of(name), world_of(name).prompts
        if fault == "prefix":  # other tokens before the prompt
            before = {"bos": lambda _: (1,), "last": lambda r: _packed(world, r)}[value]
            prompts = [(*before(r), *prompt) for r, prompt in enumerate(prompts)]
            fault = ""
        parts = _logprobs(opened(name, fault, value), prompts, world.token, path)
        own = np.split(world.token, STEPS)
        np.save(kept, np.concatenate([at(p, t) for p, t in zip(parts, own, strict=True)]))
    return np.load(kept)


def _packed(world: World, r: int) -> tuple[int, ...]:
    """The tokens before a prompt: of two packed sequences in three, the end of the one before."""
    if r % 3 == 0:
        return ()
    return (*world.prompts[r - 1][-8:], *world.token[r - 1][:24].tolist())


# faults


def engine(
    fault: str, *causes: str, tune: Sequence[Any], test: Sequence[Any], path: str = "prefill"
) -> Fault:
    def make(world: World, value: Any, _: np.random.Generator) -> Record:
        record = world.healthy
        record.train += world.gap(fault, value, path)
        return record

    return Fault(causes, "engine", make, (*tune,), (*test,))


def composed(*causes: str, tune: Sequence[Any], test: Sequence[Any]) -> Any:
    def decorate(make: Any) -> Fault:
        return Fault(causes, "composed", make, (*tune,), (*test,))

    return decorate


def sampler(*causes: str, tune: Sequence[Any], test: Sequence[Any]) -> Any:
    """A fault of the sampler: (logp, token, value) -> the processed logprobs that it draws from."""

    def decorate(process: Any) -> Fault:
        def make(world: World, value: Any, rng: np.random.Generator) -> Record:
            record = world.healthy
            for step in range(STEPS):  # a vocabulary can be large
                own = slice(step * SIZE, (step + 1) * SIZE)
                part = replace(
                    world,
                    **{k: getattr(world, k)[own] for k in ("token", "exact", "rounded")},
                )
                processed, reports, scored = process(part, value)
                record.token[own] = drawn(processed, rng)
                record.infer[own] = at(reports, record.token[own])
                record.train[own] = at(scored, record.token[own])
            return record

        return Fault(causes, "drawn", make, (*tune,), (*test,))

    return decorate


def nucleus(logp: Array, top_p: float) -> Array:
    order = np.argsort(-logp, axis=-1)
    sorted_ = np.take_along_axis(logp, order, -1)
    before = np.cumsum(np.exp(sorted_), -1) - np.exp(sorted_)
    out = np.empty_like(logp)
    np.put_along_axis(out, order, np.where(before < top_p, sorted_, -np.inf), -1)
    return log_softmax(out)


def of_steps(by_step: Sequence[float]) -> Array:
    return np.repeat(by_step, SIZE)[:, None]


def rows() -> Array:
    return np.arange(ROWS) % SIZE


@composed(tune=(0,), test=(1, 2))
def healthy(world: World, _: int, __: np.random.Generator) -> Record:
    return world.healthy


@sampler("temperature", tune=(0.8,), test=(0.9, 0.7, 1.15))
def temperature(world: World, value: float) -> Any:
    processed = log_softmax(world.exact / value)
    return processed, processed, world.rounded


@sampler("top_p", tune=(0.9,), test=(0.95, 0.8))
def top_p(world: World, value: float) -> Any:
    processed = nucleus(world.exact, value)
    return processed, processed, world.rounded


@sampler("top_p", tune=(8,), test=(4, 16))
def top_k(world: World, value: int) -> Any:
    least = np.sort(world.exact, axis=-1)[..., -value, None]
    processed = log_softmax(np.where(world.exact >= least, world.exact, -np.inf))
    return processed, processed, world.rounded


@sampler("top_p", tune=(0.1,), test=(0.05, 0.2))
def min_p(world: World, value: float) -> Any:
    least = world.exact.max(axis=-1, keepdims=True) + np.log(value)
    processed = log_softmax(np.where(world.exact >= least, world.exact, -np.inf))
    return processed, processed, world.rounded


@sampler("raw_logprobs", tune=(0.7,), test=(0.6, 0.8))
def raw_logprobs(world: World, value: float) -> Any:
    return log_softmax(world.exact / value), world.exact, log_softmax(world.rounded / value)


@sampler("penalty", tune=(1.2,), test=(1.1, 1.3))
def repetition_penalty(world: World, value: float) -> Any:
    seen = np.zeros(world.exact.shape, dtype=bool)
    for t in range(1, WIDTH):
        seen[:, t] = seen[:, t - 1]
        seen[np.arange(len(seen)), t, world.token[:, t - 1]] = True
    # the rule is about logits, which are known up to a constant: the mean is taken as 0
    z = world.exact - world.exact.mean(axis=-1, keepdims=True)
    processed = log_softmax(np.where(seen, np.where(z > 0, z / value, z * value), z))
    return processed, processed, world.rounded


def mixed(world: World, fault: str, value: Any, some: Array, scale: Array | float = 1.0) -> Record:
    """A healthy record, with the gap of a fault on some tokens.

    A scaled gap is normalised, so that its weights have the mean 1 of two laws.
    """
    record, gap = world.healthy, world.gap(fault, value)
    scales = np.broadcast_to(scale, gap.shape)
    for one in set(np.unique(scales)) - {1.0}:
        scaled = one * gap[scales == one]
        gap[scales == one] = scaled - np.log(np.exp(scaled).mean())
    record.train += np.where(some, gap, 0.0)
    return record


STALE, OLD = ("stale_weights", 3.0), ("stale_weights", 20.0)
OTHER, FAR = ("norm_epsilon", 1e4), ("norm_epsilon", 1e6)  # other kernels, with gaps that matter
GROWING = (0.0, 0.3, 0.6, 0.9, 1.2, 1.5)


@composed("one_engine", "stale_replica", tune=(4,), test=(3, 6))
def replica_of_another_build(world: World, of: int, _: np.random.Generator) -> Record:
    record = mixed(world, *OTHER, (rows() % of == 1)[:, None])
    record.labels["replica"] = [f"r{r % of}" for r in rows()]
    return record


@composed("stale_replica", tune=(4,), test=(3, 6))
def replica_stale(world: World, of: int, _: np.random.Generator) -> Record:
    record = mixed(world, *OLD, (rows() % of == 1)[:, None], of_steps(GROWING) / 1.5)
    record.labels["replica"] = [f"r{r % of}" for r in rows()]
    return record


@composed("one_kind", tune=(4,), test=(3, 6))
def one_environment(world: World, of: int, _: np.random.Generator) -> Record:
    record = mixed(world, *OTHER, (rows() // 2 % of == 1)[:, None])
    record.labels["env"] = ["arc" if r // 2 % of == 1 else "math" for r in range(SIZE)] * STEPS
    return record


@composed("stale_weights", tune=(1.0,), test=(0.6, 1.5))
def never_synced(world: World, by: float, _: np.random.Generator) -> Record:
    return mixed(world, *STALE, True, by * of_steps(GROWING))


@composed("stale_weights", tune=(1.5,), test=(1.0, 2.0))
def head_never_synced(world: World, by: float, _: np.random.Generator) -> Record:
    return mixed(world, "stale_tied_head", 3.0, True, by * of_steps(GROWING))


@composed("stale_weights", tune=(1.0,), test=(0.8, 1.2))
def low_precision_drift(world: World, by: float, _: np.random.Generator) -> Record:
    return mixed(world, "int4", True, True, by * of_steps((0.9, 1.1, 1.4, 1.7, 2.0, 2.3)))


@composed("old_weights", tune=(1.0,), test=(0.7, 1.5))
def asynchronous(world: World, by: float, rng: np.random.Generator) -> Record:
    age = rng.integers(0, 3, ROWS)[:, None] * np.ones((1, WIDTH), dtype=int)
    record = mixed(world, *STALE, True, by * age)
    record.staleness = age
    return record


@composed("stale_cache", tune=(0.2,), test=(0.15, 0.25))
def stale_prefix_cache(world: World, share: float, rng: np.random.Generator) -> Record:
    hit = rng.random(ROWS) < share
    return mixed(world, *OLD, hit[:, None], of_steps(GROWING) / 1.5)


@composed("batch", tune=(8,), test=(6, 12))
def unlabelled_rank(world: World, of: int, _: np.random.Generator) -> Record:
    return mixed(world, *FAR, (rows() % of == 3)[:, None])


@composed("odd_sequences", tune=(0.08,), test=(0.05, 0.12))
def one_sequence_in_twenty(world: World, share: float, rng: np.random.Generator) -> Record:
    odd = np.zeros(ROWS, dtype=bool)
    odd[rng.permutation(ROWS)[: round(share * ROWS)]] = True
    return mixed(world, *FAR, odd[:, None])


@composed("retokenised", tune=(0.5,), test=(0.3, 0.8))
def retokenised_turns(world: World, share: float, rng: np.random.Generator) -> Record:
    record = world.healthy
    for start in (16, 32):
        record.mask[:, start - 4 : start] = False
        other = rng.random(ROWS) < share
        record.train[other, start] -= rng.uniform(3, 12, int(other.sum()))
    return record


@composed("end_of_answer", tune=(1,), test=(2, 3))
def end_of_response(world: World, last: int, rng: np.random.Generator) -> Record:
    record = world.healthy
    keep = rng.integers(WIDTH // 2, WIDTH + 1, ROWS)
    record.mask &= np.arange(WIDTH) < keep[:, None]
    wrong = (np.arange(WIDTH) >= keep[:, None] - last) & record.mask
    record.train[wrong] -= rng.uniform(2, 9, int(wrong.sum()))
    return record


@composed("blocks", tune=(16,), test=(8, 32))
def block_edges(world: World, size: int, rng: np.random.Generator) -> Record:
    record = world.healthy
    wrong = (np.array([len(p) for p in world.prompts])[:, None] + np.arange(WIDTH)) % size == 0
    record.train[wrong] -= rng.uniform(1, 6, int(wrong.sum()))
    return record


@composed("routing", tune=(0.04,), test=(0.03, 0.05))
def experts_rerouted(world: World, share: float, rng: np.random.Generator) -> Record:
    record = world.healthy
    some = rng.random(record.train.shape) < share
    logits = world.exact[some] + 2.5 * rng.standard_normal((int(some.sum()), world.exact.shape[-1]))
    record.train[some] = at(log_softmax(logits), record.token[some])
    return record


@composed("missing_data", tune=(8,), test=(4, 12))
def written_as_zero(world: World, last: int, _: np.random.Generator) -> Record:
    record = world.healthy
    record.infer[::4, -last:] = 0.0
    return record


@composed("missing_data", tune=(0.3,), test=(0.2, 0.5))
def not_recorded(world: World, share: float, rng: np.random.Generator) -> Record:
    record = world.healthy
    record.infer[rng.random(record.infer.shape) < share] = np.nan
    return record


@composed("shift", tune=(1,), test=(-1, 2))
def shifted(world: World, by: int, _: np.random.Generator) -> Record:
    record = world.healthy
    record.infer = np.roll(record.infer, by, axis=1)
    return record


FAULTS: dict[str, Fault] = {
    "healthy": healthy,
    "temperature": temperature,
    "top_p": top_p,
    "top_k": top_k,
    "min_p": min_p,
    "raw_logprobs": raw_logprobs,
    "repetition_penalty": repetition_penalty,
    "int4": engine("int4", "numerics", tune=(True,), test=()),
    "int8": engine("quantization", "numerics", tune=("int8_weight_only",), test=()),
    "float16": engine("float16", "numerics", tune=(), test=(True,)),
    "kv_cache_int8": engine(
        "kv_cache_int8", "numerics", "positions", tune=("head",), test=("token",), path="decode"
    ),
    "dropout_in_train": engine("dropout_in_train", "numerics", tune=(0.2,), test=(0.4,)),
    "stale_weights": engine("stale_weights", "numerics", tune=(3.0,), test=(5.0,)),
    "bf16_logits": engine("bf16_logits", "numerics", tune=(True,), test=()),
    "norm_epsilon": engine("norm_epsilon", "softcap", "numerics", tune=(1e4,), test=(1e5,)),
    "softcap": engine("softcap", "softcap", "temperature", "numerics", tune=(10.0,), test=(7.0,)),
    "wrong_rope_base": engine("wrong_rope_base", "positions", "numerics", tune=(2.0,), test=(4.0,)),
    "attention_window": engine("attention_window", "long_context", tune=(48,), test=(64,)),
    "corrupted_vocabulary": engine(
        "corrupted_vocabulary", "vocabulary", "head", tune=(0.5,), test=(0.3,)
    ),
    "stale_tied_head": engine("stale_tied_head", "head", "numerics", tune=(10.0,), test=(20.0,)),
    "mask_contamination": engine(
        "mask_contamination", "beginning", tune=(True,), test=(), path="decode"
    ),
    "batch_dependent": engine("batch_dependent", "batch", "numerics", tune=(0.1,), test=(0.2,)),
    "bos_added": engine("prefix", "beginning", tune=("bos",), test=()),
    "packed": engine("prefix", "packing", "beginning", tune=("last",), test=()),
    "replica_of_another_build": replica_of_another_build,
    "replica_stale": replica_stale,
    "one_environment": one_environment,
    "never_synced": never_synced,
    "head_never_synced": head_never_synced,
    "low_precision_drift": low_precision_drift,
    "asynchronous": asynchronous,
    "stale_prefix_cache": stale_prefix_cache,
    "unlabelled_rank": unlabelled_rank,
    "one_sequence_in_twenty": one_sequence_in_twenty,
    "retokenised_turns": retokenised_turns,
    "end_of_response": end_of_response,
    "block_edges": block_edges,
    "experts_rerouted": experts_rerouted,
    "written_as_zero": written_as_zero,
    "not_recorded": not_recorded,
    "shifted": shifted,
}


@dataclass(frozen=True)
class Dump:
    """A dump to write, and what is known about it."""

    about: dict[str, Any]
    make: Callable[[], tuple[list[tuple[int, ...]], Record]]

    def write(self, folder: Path) -> None:
        (prompts, record), writer = self.make(), Writer(folder)
        for step in range(STEPS):
            rows = range(step * SIZE, (step + 1) * SIZE)
            kept = [int(np.flatnonzero(record.mask[r])[-1]) + 1 for r in rows]
            some: dict[str, Any] = {}
            if record.staleness is not None:
                some["staleness"] = [
                    [*[0] * len(prompts[r]), *record.staleness[r, :n].tolist()]
                    for r, n in zip(rows, kept, strict=True)
                ]
            none = float("nan")
            writer.step(
                step + 1,
                [[*prompts[r], *record.token[r, :n].tolist()] for r, n in _with(rows, kept)],
                [[*[0] * len(prompts[r]), *record.mask[r, :n]] for r, n in _with(rows, kept)],
                [
                    [*[none] * len(prompts[r]), *np.minimum(record.train[r, :n], -1e-9)]
                    for r, n in _with(rows, kept)
                ],
                [
                    [*[none] * len(prompts[r]), *np.minimum(record.infer[r, :n], 0)]
                    for r, n in _with(rows, kept)
                ],
                groups=[f"{step}.{r // 2}" for r in rows],
                labels={n: [values[r] for r in rows] for n, values in record.labels.items()},
                **some,
            )


def _with(rows: Sequence[int], kept: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(rows, kept, strict=True)


def _made(name: str, of: Fault, strength: Any, rng: np.random.Generator) -> tuple[Any, Record]:
    world = world_of(name)
    return world.prompts, of.make(world, strength, rng)


def dumps(
    only: Sequence[str] = (), models: Sequence[str] = (), few: bool = False
) -> Iterator[Dump]:
    """The dumps of every fault, strength and model; of a few, the first strength alone."""
    for name, model in MODELS.items():
        if models and name not in models:
            continue
        for fault, of in FAULTS.items():
            if only and fault not in only:
                continue
            strengths = strengths_of(fault, model)
            for tuned, strength in strengths[:1] if few else strengths:
                rng = np.random.default_rng([sum(map(ord, f"{fault}{strength}")), model.seed])
                about = {
                    "model": name,
                    "fault": fault,
                    "strength": strength,
                    "tune": tuned and model.tune,
                    "seen": model.tune,
                }
                yield Dump(about, partial(_made, name, of, strength, rng))
