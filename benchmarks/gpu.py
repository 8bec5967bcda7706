"""What runs on a GPU: its divergences, and what Servanda costs there.

Models have the shapes of published ones and random weights, with a head that makes logits spread
over a few nats.  Each part writes its numbers into one file; the page is made from it anywhere.

    python -m benchmarks.gpu [--only metrics monitor small check drill large] [-o FILE]
    python -m benchmarks.gpu --page FILE     # writes docs/results/gpu.md from such a file
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import committed
from servanda.contract.model import Kernel
from servanda.traces.trace import Batch

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "runs" / "gpu.json"
PAGE = ROOT / "docs" / "results" / "gpu.md"
DEVICE = "cuda"
SPREAD = 4.5  # standard deviation of the logits, nats: an entropy of about 2 nats
WIDTH = 32  # tokens of a response

# the shapes of Qwen2.5-0.5B and of Llama-3.1-8B; a tied head of random weights would only repeat
# its input, so that of the small one is its own
SMALL: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
LARGE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}

CONTRACT = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: gpu}}
kernels:
  train: {{engine: transformers, model: {model}, device: {device}, batch_size: 8}}
  infer: {{engine: transformers, model: {model}, device: {device}, dtype: bfloat16,
    attention: sdpa}}
workload:
  prompts: {root}/data/prompts.jsonl
  sampling: {{temperature: 1.0, max_new_tokens: {width}, seed: 7}}
statistical:
  - {{id: tv, metric: tv, aggregate: mean, at_most: 0.5}}
  - {{id: tail, metric: abs_log_ratio_nats, aggregate: p90, at_most: 2.0}}
promotion: {{offline: {{prompt_groups: [{groups}, {groups}]}}}}
"""


# models


def made(shape: Mapping[str, Any]) -> Any:
    """A model in bfloat16 of this shape, drawn on the GPU: the same one wherever it is made."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    own = {k: v for k, v in shape.items() if k != "model_type"}
    config = AutoConfig.for_model(
        shape["model_type"],
        **own,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
            else:
                scale = 1.0 if "embed" in name else 1.2 / weight.shape[-1] ** 0.5
                weight.normal_(0, scale)
        ids = torch.randint(1, own["vocab_size"], (2, 64))
        spread = model(input_ids=ids).logits.float().std()
        model.get_output_embeddings().weight.mul_(SPREAD / spread)
    return model


@contextmanager
def in_memory(shape: Mapping[str, Any]) -> Any:
    """A checkpoint of a made model with the tokenizer of tiny-lm, in memory where there is some."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        made(shape).save_pretrained(folder, max_shard_size="4GB")
        for file in (ROOT / "models" / "tiny-lm").glob("*token*.json"):
            shutil.copy(file, folder)
        yield Path(folder)


def opened(folder: Path, **kernel: Any) -> Any:
    from servanda.engines import open_engine

    options = {"engine": "transformers", "model": str(folder), "device": DEVICE, "batch_size": 8}
    return open_engine(Kernel(**options | kernel))


def prompts(vocabulary: int, count: int) -> Batch:
    rng = np.random.default_rng(1)
    lengths = rng.integers(32, 257, count)
    rows = tuple(tuple(rng.integers(1, vocabulary, n).tolist()) for n in lengths)
    return Batch(tuple(range(count)), rows, WIDTH)


# divergences

Variant = tuple[str, dict[str, Any]]
_BF16 = {"dtype": "bfloat16", "attention": "sdpa"}
_EAGER = ("bfloat16, eager", {"dtype": "bfloat16", "attention": "eager"})
VARIANTS: tuple[Variant, ...] = (
    ("float32, sdpa", {"attention": "sdpa"}),
    _EAGER,
    *(
        (f"float16, {attention}", {"dtype": "float16", "attention": attention})
        for attention in ("eager", "sdpa_math", "sdpa_efficient", "sdpa_cudnn")
    ),
    ("bfloat16, sdpa, int8 weights", {**_BF16, "quantization": "int8_weight_only"}),
    ("bfloat16, sdpa, int4 weights", {**_BF16, "quantization": "int4_g32"}),
)


def divergences(folder: Path, shape: Mapping[str, Any], variants: Iterable[Variant]) -> Any:
    """Each variant beside float32 with eager attention, on tokens that bfloat16 drew."""
    import torch

    drawer = opened(folder, **_BF16)
    some = prompts(shape["vocab_size"], 32)
    began = time.perf_counter()
    trace = drawer.generate(some, _plain(), 7)
    drawn_s = time.perf_counter() - began
    given = replace(some, continuations=trace.continuations)
    token = torch.tensor([t for row in given.continuations for t in row], device=DEVICE)
    reference = opened(folder)
    exact = _logits(reference, given, "prefill")
    rows = [
        _row("float32, eager, again", reference, given, exact, token),
        _row("float32, eager, one by one", reference, replace(given, together=1), exact, token),
        _row("float32, eager, decoding", reference, given, exact, token, "decode"),
    ]
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = True
    rows.append(_row("float32 by TF32, eager", reference, given, exact, token))
    matmul.allow_tf32 = False
    del reference
    for backend in ("sdpa_math", "sdpa_efficient", "sdpa_cudnn"):
        drawer.kernel = drawer.kernel.model_copy(update={"attention": backend})
        rows.append(_row(f"bfloat16, {backend}", drawer, given, exact, token))
    rows.append(_row("bfloat16, sdpa_cudnn, decoding", drawer, given, exact, token, "decode"))
    del drawer
    for name, kernel in variants:
        torch.cuda.empty_cache()
        rows.append(_row(name, opened(folder, **kernel), given, exact, token))
    entropy = float((-exact.log_softmax(-1).exp() * exact.log_softmax(-1)).sum(-1).mean())
    return {"drawn_s": drawn_s, "tokens": len(token), "entropy": entropy, "rows": rows}


def _plain() -> Any:
    from servanda.theory.sampling import Sampling

    return Sampling()


def _logits(engine: Any, batch: Batch, path: Any) -> Any:
    import torch

    chunks = batch.chunks(batch.together or engine.kernel.batch_size)
    parts = [part for chunk in chunks for part in engine.logits(chunk, path)]
    return torch.from_numpy(np.concatenate(parts)).to(DEVICE)


def _row(
    name: str, engine: Any, batch: Batch, exact: Any, token: Any, path: Any = "prefill"
) -> dict[str, Any]:
    import torch

    from servanda.engines.tensor_sums import metrics_of, row_sums_of

    began = time.perf_counter()
    own = _logits(engine, batch, path)
    took = time.perf_counter() - began
    blocks = [
        row_sums_of(exact[at], own[at], token[at])
        for at in (slice(i, i + 256) for i in range(0, len(token), 256))
    ]
    sums = {key: torch.cat([block[key] for block in blocks]) for key in blocks[0]}
    metrics = metrics_of(sums)
    ratio = (sums["logp_train"] - sums["logp_infer"]).abs().cpu().numpy()
    found = {
        "name": name,
        "tv": float(metrics["tv"].mean()),
        "kl": float(metrics["kl_nats"].mean()),
        "p99": float(np.quantile(ratio, 0.99)),
        "max": float(ratio.max()),
        "flip": float(metrics["top1_flip"].mean()),
        "seconds": took,
    }
    print(json.dumps(found), flush=True)
    return found


# what it costs


def metrics_part() -> Any:
    """Exact metrics of tensors beside one read of them, eager torch, and the C loop of a CPU."""
    from benchmarks.speed import gpu

    return [row.__dict__ for row in gpu(11)]


def monitor_part() -> Any:
    """A step of a trainer whose logprobs are on the GPU."""
    import torch

    from benchmarks.monitor import step
    from servanda.rl import Monitor

    found = []
    for shape in ((64, 512), (64, 8192)):
        arrays = step(False, shape)
        tensors = [torch.from_numpy(of).to(DEVICE) for of in arrays]
        labels = {"env": [f"env {b % 2}" for b in range(shape[0])]}
        groups = [str(b // 8) for b in range(shape[0])]

        def observing(given: Callable[[], Sequence[Any]], labels=labels, groups=groups) -> Any:  # noqa: ANN001
            monitor, steps = Monitor("verl-sync"), iter(range(1 << 30))

            def once() -> float:
                torch.cuda.synchronize()
                began = time.perf_counter()
                monitor.observe(*given(), groups=groups, labels=labels, weights=next(steps))
                return time.perf_counter() - began

            return once

        there = observing(lambda tensors=tensors: tensors)
        copied = observing(lambda tensors=tensors: [of.cpu() for of in tensors])
        rounds = [(there(), copied()) for _ in range(16)][5:]
        found.append(
            {
                "shape": list(shape),
                "device_ms": 1e3 * statistics.median(a for a, _ in rounds),
                "host_ms": 1e3 * statistics.median(b for _, b in rounds),
                "ratio": statistics.median(b / a for a, b in rounds),
            }
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def check() -> Any:
    with in_memory(SMALL) as folder:
        return check_of(folder)


def check_of(folder: Path, groups: int = 128) -> Any:
    """`servanda check` from its start to its end, beside the engines' own work in one process."""
    from servanda.engines import open_engine

    contract = folder / "gpu.kernelcontract.yaml"
    contract.write_text(
        CONTRACT.format(model=folder, root=ROOT, device=DEVICE, width=WIDTH, groups=groups)
    )
    began = time.perf_counter()
    command = [sys.executable, "-m", "servanda", "check", str(contract), "--format", "json"]
    done = subprocess.run([*command, "--run-dir", str(folder / "run")], capture_output=True)
    whole_s = time.perf_counter() - began
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr.decode())
    began = time.perf_counter()
    train, infer = (
        open_engine(Kernel(engine="transformers", model=str(folder), device=DEVICE, **kernel))
        for kernel in (
            {"attention": "eager", "batch_size": 8},
            {"dtype": "bfloat16", "attention": "sdpa"},
        )
    )
    opened_s = time.perf_counter() - began
    texts = [json.loads(line)["prompt"] for line in (ROOT / "data/prompts.jsonl").open()][:groups]
    ids = infer.encode(texts)
    some = Batch(tuple(range(len(ids))), tuple(map(tuple, ids)), WIDTH)
    began = time.perf_counter()
    trace = infer.generate(some, _plain(), 7)
    given = replace(some, continuations=trace.continuations)
    for engine, path in ((train, "prefill"), (infer, "decode")):
        for _ in engine.logits(given, path):
            pass
    floor_s = time.perf_counter() - began
    return {
        "exit": done.returncode,
        "groups": groups,
        "whole_s": whole_s,
        "opened_s": opened_s,
        "engines_s": floor_s,
        "ratio": whole_s / (opened_s + floor_s),
    }


def drill() -> Any:
    """The preflight test of a sync over CUDA IPC into another process on the same GPU."""
    import torch

    from benchmarks.gpu_server import ServedByIpc
    from servanda.engines.low_precision.model import take_over
    from servanda.engines.weight_sync import WeightSync
    from servanda.rl import Trainee, preflight

    engine = ServedByIpc(partial(made, LARGE), partial(take_over, dtype=torch.bfloat16))
    module = made(LARGE)
    syncs: list[float] = []
    sync = WeightSync(module, engine)

    def timed() -> None:
        began = time.perf_counter()
        sync()
        syncs.append(time.perf_counter() - began)
        print(f"sync {len(syncs)}: {syncs[-1]:.2f} s", flush=True)

    began = time.perf_counter()
    result = preflight(Trainee(module, timed, engine.score))
    took = time.perf_counter() - began
    engine.close()
    print(result)
    return {
        "exit": result.exit_code,
        "groups": len(result.groups),
        "parameters": sum(p.numel() for p in module.parameters()),
        "seconds": took,
        "syncs": len(syncs),
        "sync_s": statistics.median(syncs),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


# the parts


def small() -> Any:
    with in_memory(SMALL) as folder:
        return divergences(folder, SMALL, VARIANTS)


def large() -> Any:
    with in_memory(LARGE) as folder:
        return divergences(folder, LARGE, [_EAGER])


PARTS: dict[str, Callable[[], Any]] = {
    "metrics": metrics_part,
    "monitor": monitor_part,
    "small": small,
    "check": check,
    "drill": drill,
    "large": large,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("-o", "--output", type=Path, default=MEASURED)
    parser.add_argument("--page", type=Path)
    chosen = parser.parse_args()
    if chosen.page:
        from benchmarks import gpu_page

        committed.write(PAGE, gpu_page.text(json.loads(chosen.page.read_text())), "make bench-gpu")
        return
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU: run this on a machine that has one")
    import transformers

    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(chosen.output.read_text()) if chosen.output.exists() else {}
    for name in chosen.only:
        began = time.perf_counter()
        found[name] = {
            "found": PARTS[name](),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "took_s": time.perf_counter() - began,
        }
        chosen.output.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: {found[name]['took_s']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
