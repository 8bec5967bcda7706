"""Which architectures run in which engine, and how far from Transformers in float32.

    python -m benchmarks.architecture_matrix [--only NAME ...] [--engines ENGINE ...]
    python -m benchmarks.architecture_matrix --write     writes docs/reference/architectures.md

Models are small and random (benchmarks/hunt/architectures.py), saved in two files.  Each engine
scores the same given tokens in float32; the reference is Transformers with eager attention, by one
prefill.  Engines of other environments are found under SERVANDA_VENVS (default .venvs).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from scripts import servers

from benchmarks import committed
from benchmarks.hunt import architectures
from servanda.contract.model import Kernel
from servanda.engines.checkpoint import quiet
from servanda.engines.worker import spawn
from servanda.errors import ServandaError
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "architectures.md"
VENVS = Path(os.environ.get("SERVANDA_VENVS", ROOT / ".venvs"))
LIMIT = 1e-5  # nats
WIDTH = 6

# name in benchmarks/hunt/architectures.json -> what is particular about it
NAMES = {
    "llama": "the plain one",
    "mistral": "sliding window",
    "qwen2": "biases of queries, keys and values",
    "qwen3": "norms of queries and keys",
    "qwen3_moe": "mixture of experts",
    "mixtral": "mixture of experts",
    "gpt_oss": "mixture of experts, attention sinks, sliding window",
    "deepseek_v3": "mixture of experts in groups, latent attention",
    "olmo2": "norms after the blocks",
    "gemma2": "softcaps, sliding window, tied head",
    "gemma3_text": "two rotary bases, sliding window, tied head",
    "phi3": "fused projections",
    "granite": "multipliers",
    "cohere": "parallel blocks, scaled logits, tied head",
    "starcoder2": "biases, sliding window",
    "gpt2": "learned positions, tied head",
    "gpt_neox": "partial rotary, parallel blocks",
    "falcon": "parallel blocks, grouped queries",
    "bloom": "ALiBi, tied head",
    "stablelm": "partial rotary, layer norms",
}


@dataclass(frozen=True)
class Column:
    """An engine as the table names it."""

    title: str
    kernel: Mapping[str, Any]
    path: str = "prefill"
    environment: str = ""


_HF = {"engine": "transformers"}
COLUMNS = (
    Column("Transformers, sdpa", {**_HF, "attention": "sdpa"}),
    Column("Transformers, decoding", _HF, "decode"),
    Column("Transformers, in steps", {**_HF, "prefill_chunk": 7}),
    Column("ONNX Runtime", {"engine": "onnxruntime"}),
    Column("llama.cpp", {"engine": "llamacpp"}, environment="llamacpp"),
    Column("vLLM", {"engine": "vllm"}, environment="vllm"),
)


def made(name: str, folder: Path) -> Path:
    """A checkpoint in several files, with the tokenizer of tiny-lm."""
    with quiet():
        model = architectures.model(name, width=2)  # vLLM has no heads of 16 values on a CPU
        size = sum(p.numel() * 4 for p in model.parameters())
        model.save_pretrained(folder, max_shard_size=max(size // 2, 1 << 17))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "models" / "tiny-lm" / file, folder)
    return folder


def given() -> Batch:
    """Prompts on both sides of the sliding windows, and tokens to score after them."""
    rng = np.random.default_rng(0)
    rows = [tuple(rng.integers(1, architectures.VOCABULARY, n).tolist()) for n in (37, 5, 12)]
    more = tuple(tuple(rng.integers(1, architectures.VOCABULARY, WIDTH).tolist()) for _ in rows)
    return Batch((0, 1, 2), tuple(rows), WIDTH, more)


def scores(folder: Path, column: Column) -> np.ndarray:
    """Its logprobs of the given tokens, by a process of its own.

    Raises:
        ServandaError: the engine refuses the model.
        CalledProcessError: the file that it reads cannot be written.
    """
    keys = {**column.kernel, "batch_size": 4}
    if column.environment:
        keys["python"] = str(VENVS / column.environment)
    with ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory())
        kernel = servers.local_kernel(keys.pop("engine"), folder, place, **keys)
        engine = spawn(Kernel(**kernel), "infer")
        stack.callback(engine.close)
        return engine.score(given(), Sampling(), column.path).columns["logp"]  # type: ignore[call-arg]


def cell(folder: Path, column: Column, reference: np.ndarray) -> dict[str, Any]:
    if column.environment and not (VENVS / column.environment).is_dir():
        return {"absent": True}
    try:
        return {"most": float(np.abs(scores(folder, column) - reference).max())}
    except ServandaError as error:
        return {"refused": _plain(error.problems[0].message, folder)}
    except subprocess.CalledProcessError as error:
        return {"refused": _plain(error.stderr.strip().splitlines()[0], folder)}


def _plain(message: str, folder: Path) -> str:
    """A refusal without the place and the name of this model, so that equal ones are one."""
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    return message.replace(str(folder), "MODEL").replace(f"{kind!r}", "'NAME'")


def rows(names: list[str], columns: tuple[Column, ...]) -> Iterator[dict[str, Any]]:
    reference = Column("", _HF)
    for name in names:
        with tempfile.TemporaryDirectory() as place:
            folder = made(name, Path(place))
            expected = scores(folder, reference)
            row = {
                "name": name,
                "files": len([*folder.glob("*.safetensors")]),
                "cells": {c.title: cell(folder, c, expected) for c in columns},
            }
        print(json.dumps(row), flush=True)
        yield row


def text(found: list[dict[str, Any]], columns: tuple[Column, ...]) -> str:
    """The table, and beneath it each refusal once."""
    notes: dict[str, int] = {}

    def shown(answer: Mapping[str, Any]) -> str:
        if "most" in answer:
            mark = "" if answer["most"] <= LIMIT else " ✗"
            return f"{answer['most']:.1e}{mark}"
        if "refused" in answer:
            return f"refused [{notes.setdefault(answer['refused'], len(notes) + 1)}]"
        return "not installed"

    lines = [
        f"| architecture | particular | files | {' | '.join(c.title for c in columns)} |",
        f"|---|---|---|{'---|' * len(columns)}",
    ]
    for row in found:
        cells = " | ".join(shown(row["cells"][c.title]) for c in columns)
        lines.append(f"| `{row['name']}` | {NAMES[row['name']]} | {row['files']} | {cells} |")
    lines.append("")
    lines += [f"{number}. {_shortened(message)}" for message, number in notes.items()]
    return "\n".join(lines)


def _shortened(message: str) -> str:
    first = " ".join(message.split())
    return first if len(first) <= 220 else f"{first[:217]}..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=[*NAMES])
    parser.add_argument("--engines", nargs="+", default=[c.title for c in COLUMNS])
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    columns = tuple(c for c in COLUMNS if c.title in chosen.engines)
    found = [*rows(chosen.only, columns)]
    page = text(found, columns)
    print(page)
    if chosen.write:
        libraries = ", ".join(f"{n} {version(n)}" for n in ("torch", "transformers", "onnxruntime"))
        command = "python -m benchmarks.architecture_matrix --write"
        committed.write(PAGE, f"{libraries}.\n\n{page}", command)


if __name__ == "__main__":
    main()
