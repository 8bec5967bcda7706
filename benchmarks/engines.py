# One contract's kernels on real engines: how far each lies from the trainer's, and how fast.
#
#     python -m benchmarks.engines             prints the table (ten minutes; --only NAME)
#     python -m benchmarks.engines --write     writes docs/reference/engines.md
#
# Every kernel scores the same given tokens, a quarter of data/golden.jsonl, and is held against
# Transformers in float32, eager.  A server that cannot score is held to its own draws instead.
# Engines of other environments are found under SERVANDA_VENVS (default .venvs, where
# `make test-engines` puts them); what is not there is left out, and said.

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scripts import servers

from benchmarks import committed
from servanda.contract.model import Kernel
from servanda.contract.model import Path as How
from servanda.engines.worker import spawn
from servanda.errors import ServandaError
from servanda.theory.divergence.topk import interval
from servanda.theory.divergence.topk_rows import TopK, TopRows
from servanda.theory.sampling import Sampling, log_softmax
from servanda.traces.corpus import Corpus
from servanda.traces.trace import Batch, Trace

ROOT = Path(__file__).parents[1]
MODEL = str(ROOT / "models" / "tiny-lm")
GOLDEN = ROOT / "data" / "golden.jsonl"
DOCS = ROOT / "docs" / "reference" / "engines.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
EVERY = 4  # of the golden texts: some 2,000 positions
PAIRS = 3  # of timings
DRAWN, WIDTH = 32, 24  # sequences, and their new tokens
SEED = 7
NEUTRAL = Sampling()  # type: ignore[call-arg]
REFERENCE = Kernel(engine="transformers", model=MODEL)  # type: ignore[call-arg]


@dataclass(frozen=True)
class Entry:
    """A row: an `infer:` line, and the environment or the server that it needs."""

    name: str
    kernel: Mapping[str, Any]
    needs: str = ""


def _local(name: str, engine: str, needs: str = "", **more: Any) -> Entry:
    python = {"python": str(servers.VENVS / needs)} if needs else {}
    return Entry(name, {"engine": engine, "model": MODEL, **python, **more}, needs)


ENTRIES = (
    _local("transformers fp32 sdpa", "transformers", attention="sdpa"),
    _local("transformers bf16 eager", "transformers", dtype="bfloat16"),
    _local("transformers int8_weight_only", "transformers", quantization="int8_weight_only"),
    _local("transformers int4_g32", "transformers", quantization="int4_g32"),
    _local("onnxruntime fp32", "onnxruntime"),
    _local("onnxruntime int8_dynamic", "onnxruntime", quantization="int8_dynamic"),
    _local("llamacpp f32", "llamacpp", "llamacpp"),
    _local("llamacpp f16", "llamacpp", "llamacpp", dtype="float16"),
    _local("llamacpp bf16", "llamacpp", "llamacpp", dtype="bfloat16"),
    _local("llamacpp q8_0", "llamacpp", "llamacpp", quantization="q8_0"),
    _local("llamacpp q4_k_m", "llamacpp", "llamacpp", quantization="q4_k_m"),
    _local("vllm fp32", "vllm", "vllm"),
    _local("vllm bf16", "vllm", "vllm", dtype="bfloat16"),
    Entry("vLLM server fp32", {"engine": "openai_http"}, "vllm_server"),
    Entry("llama-server f16", {"engine": "openai_http"}, "llama_server"),
    Entry("serve-kernel bf16", {"engine": "openai_http"}, "serve_kernel"),
)


@dataclass(frozen=True)
class Row:
    """One engine by one path.  NaN: the engine cannot tell.

    Args:
        path: prefill or decode of the golden texts; draws: of what the engine drew itself.
        mean, p99: of |log ratio|, nats; tv: [lower, upper] end of its mean; flips: share of
            positions at which the likeliest token is another.
        scored: given tokens a second, relative to the reference in the same run; drawn: the
            same of tokens that are drawn.
    """

    name: str
    path: str
    n: int
    mean: float
    p99: float
    tv: tuple[float, float] = (np.nan, np.nan)
    flips: float = np.nan
    scored: float = np.nan
    drawn: float = np.nan


class Reference:
    """Transformers in float32, eager, and what it says of the golden texts.

    logp_NV: its logprobs at each given token, nats.
    """

    def __init__(self) -> None:
        self.engine = spawn(REFERENCE, "reference")
        corpus = Corpus.parse(GOLDEN.read_text(encoding="utf-8"), str(GOLDEN))
        ids = sorted(self.engine.encode([p.text for p in corpus.prompts[::EVERY]]), key=len)
        rows = range(len(ids))
        texts = tuple(tuple(tokens[1:]) for tokens in ids)
        firsts = tuple((tokens[0],) for tokens in ids)
        self.golden = Batch(tuple(rows), firsts, max(map(len, texts)), texts)
        begun = tuple(tuple(ids[i % len(ids)][:8]) for i in range(DRAWN))
        self.asked = Batch(tuple(range(DRAWN)), begun, WIDTH)
        self.logp_NV = log_softmax(_logits(self.engine, self.golden, "prefill"))

    def best(self) -> np.ndarray:
        return self.logp_NV.argmax(axis=-1)


@contextmanager
def opened(entry: Entry) -> Iterator[Any]:
    """The engine of a row; a server is started first."""
    with ExitStack() as stack:
        kernel = dict(entry.kernel)
        if "url" not in kernel and entry.kernel["engine"] == "openai_http":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            port = servers.free_port()
            command = _command(entry.needs, port, folder)
            kernel["url"] = stack.enter_context(servers.running(command, port, folder / "log"))
        elif "model" in kernel:
            place = stack.enter_context(tempfile.TemporaryDirectory())
            kernel = servers.local_kernel(
                kernel.pop("engine"), kernel.pop("model"), place, **kernel
            )
        engine = spawn(Kernel(**kernel), entry.name)  # type: ignore[arg-type]
        stack.callback(engine.close)
        yield engine


def _command(server: str, port: int, folder: Path) -> list[str]:
    if server == "vllm_server":
        return servers.vllm_command(port)
    if server == "serve_kernel":
        return servers.kernel_command(port, f"transformers:{MODEL}@bfloat16")
    gguf = folder / "tiny-lm.gguf"
    subprocess.run(servers.gguf_command(gguf, "f16"), check=True)
    return servers.llama_command(port, gguf)


def rows(entry: Entry, reference: Reference) -> Iterator[Row]:
    """The paths of one engine.

    Raises:
        ServandaError, OSError, RuntimeError, SubprocessError: its environment, or what it needs, is
            not there.
    """
    golden = reference.golden
    with opened(entry) as engine:
        told = engine.describe()
        drawn = _pairs(engine, reference, lambda e: e.generate(reference.asked, NEUTRAL, SEED))
        if not told.scores:
            own, theirs = _on_its_own_draws(engine, reference)
            apart_N = np.abs(own - theirs)
            mean, p99 = float(apart_N.mean()), float(np.quantile(apart_N, 0.99))
            yield Row(entry.name, "draws", len(apart_N), mean, p99, drawn=drawn)
        for path in told.scores:
            trace = engine.score(golden, NEUTRAL, path)
            own_N = reference.logp_NV[np.arange(len(trace.token_N)), trace.token_N]
            apart_N = np.abs(own_N - trace.columns["logp"])
            yield Row(
                entry.name,
                path,
                len(apart_N),
                float(np.nanmean(apart_N)),
                float(np.nanquantile(apart_N, 0.99)),
                *_distances(engine, told, reference, path),
                _pairs(engine, reference, lambda e, p=path: e.score(golden, NEUTRAL, p)),
                drawn,
            )


def _on_its_own_draws(engine: Any, reference: Reference) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs of drawn tokens: as recorded, and scored by the reference."""
    asked = reference.asked
    trace = engine.generate(asked, NEUTRAL, SEED)
    given = Batch(asked.sequence_S, asked.prompts, asked.width, trace.continuations)
    scored = reference.engine.score(given, NEUTRAL, "prefill")
    return trace.columns["logp"], scored.columns["logp"]


def _pairs(engine: Any, reference: Reference, work: Callable[[Any], Trace]) -> float:
    """Tokens a second of an engine beside the reference: the median of pairs."""
    work(engine)  # the first call of a library does more than compute
    pairs = ([_speed(work, e) for e in (engine, reference.engine)] for _ in range(PAIRS))
    return statistics.median(own / theirs for own, theirs in pairs)


def _speed(work: Callable[[Any], Trace], engine: Any) -> float:
    begun = time.perf_counter()
    trace = work(engine)
    return len(trace.token_N) / (time.perf_counter() - begun)


def _logits(engine: Any, batch: Batch, path: How) -> np.ndarray:
    return np.concatenate([np.array(piece) for piece in engine.logits(batch, path)])


def _distances(
    engine: Any, told: Any, reference: Reference, path: How
) -> tuple[tuple[float, float], float]:
    """TV between its ends, and flips of the likeliest token."""
    logp_NV, best_N = reference.logp_NV, reference.best()
    if told.full_logits:
        own_NV = log_softmax(_logits(engine, reference.golden, path))
        tv = float((0.5 * np.abs(np.exp(own_NV) - np.exp(logp_NV)).sum(axis=-1)).mean())
        return (tv, tv), float((own_NV.argmax(axis=-1) != best_N).mean())
    if not told.top:
        return (np.nan, np.nan), np.nan
    ids_NK, near_NK = engine.top(reference.golden, path).best
    size = logp_NV.shape[1]
    whole_NV = np.argsort(-logp_NV, axis=-1)
    near = TopK(whole_NV, np.take_along_axis(logp_NV, whole_NV, axis=-1), size)
    ends_N2 = interval("tv", TopRows(near, TopK(ids_NK, near_NK, size, slack=1e-6)))
    low, high = np.nanmean(ends_N2, axis=0)
    return (float(low), float(high)), float((ids_NK[:, 0] != best_N).mean())


def table(found: list[Row], left_out: Mapping[str, str]) -> str:
    """Markdown, the nearest engines first."""
    lines = [
        "| kernel | path | n | mean \\|log ratio\\| | p99 | mean TV | flips | scores | draws |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(found, key=lambda row: row.mean):
        low, high = r.tv
        tv = f"{low:.1e}" if low == high else f"[{low:.1e}, {high:.1e}]"
        cells = [r.name, r.path, f"{r.n:,}", f"{r.mean:.1e}", f"{r.p99:.1e}"]
        cells.append("" if np.isnan(low) else tv)
        cells.append("" if np.isnan(r.flips) else f"{100 * r.flips:.1f} %")
        cells += ["" if np.isnan(x) else f"{x:.2g} ×" for x in (r.scored, r.drawn)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"| {name} | left out: {why} | | | | | | | |" for name, why in left_out.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="The table of docs/reference/engines.md.")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", help="names that contain this")
    asked = parser.parse_args()
    found: list[Row] = []
    left_out: dict[str, str] = {}
    reference = Reference()
    try:
        for entry in (e for e in ENTRIES if asked.only in e.name):
            begun = time.perf_counter()
            try:
                found += rows(entry, reference)
            except (ServandaError, OSError, RuntimeError, subprocess.SubprocessError) as error:
                left_out[entry.name] = str(error).splitlines()[0]
            print(f"{entry.name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    finally:
        reference.engine.close()
    text = table(found, left_out)
    print(text)
    if asked.write:
        committed.write(DOCS, text, "python -m benchmarks.engines --write", BEGIN, END)


if __name__ == "__main__":
    main()
