"""Routing replay of a mixture of experts: `make demo-moe`, half a minute on two cores.

models/tiny-moe has 16 experts in each of three layers and picks four.  A sampler in bfloat16 draws
answers and records its experts; a trainer in float32 scores them in four ways:

    own         it routes by itself, and rounding flips some routes
    replayed    it uses the recorded experts (R3, arXiv 2510.11370)
    misaligned  it uses the experts of the token before
    partial     it uses the recorded experts in all layers but one

Each is a dump that `servanda check DIR` reads.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.rl.dumps.formats.parquet import Writer
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch, Trace

ROOT = Path(__file__).parents[2]
GROUPS, NEW, LAYER = 40, 24, 1
# what is expected of each: the exit code, and what the report says
EXPECTED = {
    "own": (0, "the trainer routes by itself"),
    "replayed": (0, "the trainer's experts are the sampler's, in every layer"),
    "misaligned": (4, "the trainer's experts are misaligned: row t is the sampler's row t-1"),
    "partial": (4, "the trainer says that it replays the sampler's experts, and"),
}


@dataclass(frozen=True)
class Rollout:
    """What a sampler drew: texts, where answers begin, their logprobs, and the experts of each
    token but the first, [T - 1, L, K] a text."""

    texts: list[list[int]]
    answers: list[int]  # tokens of each
    logp: list[Any]
    routes: tuple[Any, ...]


def opened(dtype: str) -> Any:
    model = str(ROOT / "models" / "tiny-moe")
    return open_engine(Kernel(engine="transformers", model=model, dtype=dtype))  # type: ignore[arg-type]


def sampled(engine: Any) -> Rollout:
    """Answers of a sampler to the first prompts, and the experts of one more pass over all."""
    with (ROOT / "data" / "prompts.jsonl").open(encoding="utf-8") as lines:
        texts = [json.loads(line)["prompt"] for _, line in zip(range(GROUPS), lines, strict=False)]
    prompts = tuple(map(tuple, engine.encode(texts)))
    drawn = engine.generate(Batch(tuple(range(GROUPS)), prompts, NEW), Sampling(), 7)
    whole = [[*p, *a] for p, a in zip(prompts, drawn.continuations, strict=True)]
    routes = engine.score(fed(whole), Sampling(), "prefill").routes_S
    assert routes is not None
    logp = np.split(drawn.columns["logp"], drawn.length_S.cumsum()[:-1])
    return Rollout(whole, drawn.length_S.tolist(), logp, routes)


def fed(texts: list[list[int]]) -> Batch:
    """Texts whose tokens are all scored, but for the first of each."""
    rows = tuple(tuple(text[1:]) for text in texts)
    return Batch(tuple(range(len(texts))), tuple((t[0],) for t in texts), max(map(len, rows)), rows)


def scored(engine: Any, rollout: Rollout, routes: tuple[Any, ...] = ()) -> Trace:
    """A trainer's pass over the whole texts, with its own experts or given ones."""
    return engine.score(replace(fed(rollout.texts), routes=routes), Sampling(), "prefill")


def passes(engine: Any, rollout: Rollout) -> dict[str, Trace]:
    """The four ways to score."""
    skipped = []
    for route in rollout.routes:
        own = route.copy()
        own[:, LAYER] = -1  # the router of this layer picks by itself
        skipped.append(own)
    return {
        "own": scored(engine, rollout),
        "replayed": scored(engine, rollout, rollout.routes),
        "misaligned": scored(
            engine, rollout, tuple(np.roll(route, 1, axis=0) for route in rollout.routes)
        ),
        "partial": scored(engine, rollout, tuple(skipped)),
    }


def written(folder: Path, rollout: Rollout, train: Trace, *, replays: bool) -> Path:
    """A dump of one step, as a trainer's hook writes it."""
    logp = np.split(train.columns["logp"], train.length_S.cumsum()[:-1])
    Writer(folder).step(
        1,
        rollout.texts,
        [[1] * n for n in rollout.answers],
        [of[-n:] for of, n in zip(logp, rollout.answers, strict=True)],
        rollout.logp,
        routes=list(rollout.routes),
        routes_train=list(train.routes_S or ()),
        replays=replays,
    )
    return folder


def flips(rollout: Rollout, own: Trace) -> list[tuple[int, int, int, set[int], set[int]]]:
    """(sequence, token, layer, experts of the sampler, of the trainer) of each flipped route."""
    found = []
    for sequence, (infer, train) in enumerate(zip(rollout.routes, own.routes_S or (), strict=True)):
        for token, layer in np.argwhere((infer != train).any(axis=-1)).tolist():
            sides = {*infer[token, layer].tolist()}, {*train[token, layer].tolist()}
            found.append((sequence, token + 1, layer, *sides))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/moe"))
    out = parser.parse_args().out
    infer, train = opened("bfloat16"), opened("float32")
    rollout = sampled(infer)
    tokens = sum(rollout.answers)
    print(f"{GROUPS} answers of {tokens:,} tokens, sampled by models/tiny-moe in bfloat16")
    found = passes(train, rollout)
    routes = flips(rollout, found["own"])
    pairs = sum(route.shape[0] * route.shape[1] for route in rollout.routes)
    print(
        f"\nA trainer in float32 picks other experts for {len(routes)} of {pairs:,} pairs of a "
        "token and a layer. The first:"
    )
    for sequence, token, layer, picked, others in routes[:3]:
        print(
            f"  answer {sequence + 1}, token {token}, layer {layer}: bfloat16 picks expert "
            f"{min(picked - others)}, float32 expert {min(others - picked)}"
        )
    wrong = 0
    for name, trace in found.items():
        folder = written(out / name, rollout, trace, replays=name != "own")
        print(f"\n$ servanda check {folder}")
        command = [sys.executable, "-m", "servanda", "check", str(folder), "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True)
        code, says = EXPECTED[name]
        shown = [line for line in done.stdout.splitlines() if "experts" in line or "exit" in line]
        print("\n".join(shown))
        if done.returncode != code or says not in done.stdout:
            wrong += 1
            print(f"expected exit {code} and {says!r}, and found exit {done.returncode}")
            print(done.stdout + done.stderr)
    gap = {
        name: np.concatenate(
            [
                np.abs(of[-n:] - drawn)
                for of, n, drawn in zip(
                    np.split(trace.columns["logp"], trace.length_S.cumsum()[:-1]),
                    rollout.answers,
                    rollout.logp,
                    strict=True,
                )
            ]
        ).mean()
        for name, trace in found.items()
    }
    print("\nmean |log ratio| of the answers, nats: ", end="")
    print(", ".join(f"{name} {value:.2g}" for name, value in gap.items()))
    share = 1 - gap["replayed"] / gap["own"]
    print(f"Replay removes {share:.0%} of the gap: the rest is rounding within the experts.")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
