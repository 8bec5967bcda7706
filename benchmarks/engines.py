# One contract's kernels on real engines: how far each lies from the trainer's, and how fast.
#
#     python -m benchmarks.engines             prints the table (minutes; see --only)
#     python -m benchmarks.engines --write     writes docs/reference/engines.md
#
# Every kernel scores the same given tokens, those of data/golden.jsonl, and is held against
# Transformers in float32, eager.  Teacher forced: no row speaks of tokens that it would draw.
# Engines of other environments are found under SERVANDA_VENVS (default .venvs, where
# `make test-engines` puts them); what is not there is left out, and said.

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scripts import servers

from servanda.contract import Kernel
from servanda.contract import Path as How
from servanda.corpus import Corpus
from servanda.divergence import TopK, TopRows, interval
from servanda.engines.worker import spawn
from servanda.errors import ServandaError
from servanda.sampling import Sampling, log_softmax
from servanda.trace import Batch, Trace

ROOT = Path(__file__).parents[1]
MODEL = str(ROOT / "models" / "tiny-lm")
GOLDEN = ROOT / "data" / "golden.jsonl"
DOCS = ROOT / "docs" / "reference" / "engines.md"
REPEATS = 3
WIDTH = 24  # new tokens of a drawn sequence
DRAWN = 64  # sequences
NEUTRAL = Sampling()  # type: ignore[call-arg]
REFERENCE = Kernel(engine="transformers", model=MODEL)  # type: ignore[call-arg]


@dataclass(frozen=True)
class Entry:
    """A row: an `infer:` line, and what has to be there for it.

    Args:
        needs: an environment, or a server that is started for it.
    """

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
    Entry("vllm server fp32", {"engine": "openai_http"}, "vllm_server"),
    Entry("serve-kernel bf16", {"engine": "openai_http"}, "serve_kernel"),
)


@dataclass(frozen=True)
class Row:
    """One engine by one path.  NaN: the engine cannot tell.

    Args:
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
    tv: tuple[float, float]
    flips: float
    scored: float
    drawn: float


def golden() -> Batch:
    """The golden texts, each after its first token."""
    corpus = Corpus.parse(GOLDEN.read_text(encoding="utf-8"), str(GOLDEN))
    engine = spawn(REFERENCE, "reference")
    try:
        ids = engine.encode([p.text for p in corpus.prompts])
    finally:
        engine.close()
    ids.sort(key=len)
    return Batch(
        tuple(range(len(ids))),
        tuple((tokens[0],) for tokens in ids),
        max(map(len, ids)) - 1,
        tuple(tuple(tokens[1:]) for tokens in ids),
    )


@contextmanager
def opened(entry: Entry, stack: ExitStack) -> Iterator[Any]:
    """The engine of a row; a server is started first."""
    kernel = dict(entry.kernel)
    if entry.needs == "vllm_server":
        port, log = servers.free_port(), _log(stack)
        kernel["url"] = stack.enter_context(servers.running(servers.vllm_command(port), port, log))
    elif entry.needs == "serve_kernel":
        port, log = servers.free_port(), _log(stack)
        kernel["url"] = stack.enter_context(servers.running(_serving(port), port, log))
    engine = spawn(Kernel(**kernel), entry.name)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        engine.close()


def _log(stack: ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"


def _serving(port: int) -> list[str]:
    kernel = f"transformers:{MODEL}@bfloat16"
    servanda = str(Path(sys.executable).parent / "servanda")
    return [servanda, "serve-kernel", kernel, "--port", str(port)]


def rows(entry: Entry, batch: Batch, reference: Any) -> Iterator[Row]:
    """The paths of one engine.

    Raises:
        ServandaError: its environment, or what it needs, is not there.
    """
    with ExitStack() as stack, opened(entry, stack) as engine:
        told = engine.describe()
        exact = _logits(reference, batch, "prefill")
        drawn = _pairs(engine, reference, _draw(batch))
        for path in told.scores:
            trace = engine.score(batch, NEUTRAL, path)
            own = log_softmax(exact)[np.arange(len(trace.token_N)), trace.token_N]
            apart_N = np.abs(own - trace.columns["logp"])
            tv, flips = _distances(engine, told, batch, path, exact)
            yield Row(
                entry.name,
                path,
                len(apart_N),
                float(np.nanmean(apart_N)),
                float(np.nanquantile(apart_N, 0.99)),
                tv,
                flips,
                _pairs(engine, reference, lambda e, p=path: e.score(batch, NEUTRAL, p)),
                drawn,
            )


def _draw(batch: Batch) -> Any:
    few = Batch(
        tuple(range(DRAWN)),
        tuple((p[0], *c[:8]) for p, c in zip(batch.prompts, batch.continuations, strict=True)),
        WIDTH,
    )
    return lambda engine: engine.generate(few, NEUTRAL, 7)


def _pairs(engine: Any, reference: Any, work: Any) -> float:
    """Tokens a second of an engine beside the reference: the median of pairs."""
    work(engine)  # the first call of a library does more than compute
    ratios = []
    for _ in range(REPEATS):
        speeds = [_speed(work, e) for e in (engine, reference)]
        ratios.append(speeds[0] / speeds[1])
    return statistics.median(ratios)


def _speed(work: Any, engine: Any) -> float:
    begun = time.perf_counter()
    trace: Trace = work(engine)
    return len(trace.token_N) / (time.perf_counter() - begun)


def _logits(engine: Any, batch: Batch, path: How) -> np.ndarray:
    return np.concatenate([np.array(piece) for piece in engine.logits(batch, path)])


def _distances(
    engine: Any, told: Any, batch: Batch, path: How, exact: np.ndarray
) -> tuple[tuple[float, float], float]:
    """TV between its ends, and flips of the likeliest token."""
    best_R, p = exact.argmax(axis=-1), np.exp(log_softmax(exact))
    if told.full_logits:
        own = _logits(engine, batch, path)
        tv = float((0.5 * np.abs(np.exp(log_softmax(own)) - p).sum(axis=-1)).mean())
        return (tv, tv), float((own.argmax(axis=-1) != best_R).mean())
    if not told.top:
        return (np.nan, np.nan), np.nan
    ids_RK, logp_RK = engine.top(batch, path).best
    whole = np.argsort(-p, axis=-1)
    near = TopK(whole, np.take_along_axis(np.log(p), whole, axis=-1), p.shape[1])
    ends_R2 = interval("tv", TopRows(near, TopK(ids_RK, logp_RK, p.shape[1], slack=1e-6)))
    low, high = np.nanmean(ends_R2, axis=0)
    return (float(low), float(high)), float((ids_RK[:, 0] != best_R).mean())


def table(found: list[Row], left_out: Mapping[str, str]) -> str:
    """Markdown, the nearest engines first."""
    lines = [
        "| kernel | path | mean \\|log ratio\\| | p99 | mean TV | flips | scores, × | draws, × |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(found, key=lambda row: row.mean):
        tv = f"{r.tv[0]:.1e}" if r.tv[0] == r.tv[1] else f"[{r.tv[0]:.1e}, {r.tv[1]:.1e}]"
        tv = "not told" if np.isnan(r.tv[0]) else tv
        flips = "not told" if np.isnan(r.flips) else f"{100 * r.flips:.1f} %"
        lines.append(
            f"| {r.name} | {r.path} | {r.mean:.1e} | {r.p99:.1e} | {tv} | {flips} "
            f"| {r.scored:.2g} | {r.drawn:.2g} |"
        )
    lines += [f"| {name} | | left out: {why} | | | | | |" for name, why in left_out.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="The table of docs/reference/engines.md.")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", help="names that contain this")
    asked = parser.parse_args()
    batch, found, left_out = golden(), [], {}
    reference = spawn(REFERENCE, "reference")
    try:
        for entry in ENTRIES:
            if asked.only and asked.only not in entry.name:
                continue
            print(entry.name, file=sys.stderr, flush=True)
            try:
                found += rows(entry, batch, reference)
            except (ServandaError, OSError, RuntimeError) as error:
                left_out[entry.name] = str(error).splitlines()[0]
    finally:
        reference.close()
    text = table(found, left_out)
    print(text)
    if asked.write:
        page = DOCS.read_text(encoding="utf-8")
        head, _, rest = page.partition("<!-- table -->\n")
        _, _, tail = rest.partition("<!-- end of table -->")
        DOCS.write_text(
            f"{head}<!-- table -->\n{text}\n<!-- end of table -->{tail}", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
