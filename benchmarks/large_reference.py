# Peak memory of a kernel in one process, with offloaded layers, and sharded over ranks, on made
# models of 1 and of 24 equal layers: python -m benchmarks.large_reference
#
# A peak is of resident memory (VmHWM) of the process that holds the weights; of ranks, the largest.
# It contains the libraries and the activations, which the model of one layer shows.

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from servanda.contract.model import Kernel
from servanda.engines.rank_processes import ShardedEngine
from servanda.engines.worker import spawn
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch

LAYERS, HIDDEN, INNER, VOCABULARY = 24, 512, 2048, 4096
ROWS, PROMPT, GIVEN = 8, 64, 16  # sequences that are scored, and their tokens
MIB = 1 << 20
SIDES: tuple[dict[str, Any] | None, ...] = (None, {"offload": "layers"}, {"ranks": 2}, {"ranks": 4})


def make_model(folder: Path, layers: int) -> float:
    """Write a model with random weights in bfloat16; MiB of a layer in float32."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return sum(p.numel() for p in model.model.layers[0].parameters()) * 4 / MIB


def measured(folder: Path, options: dict[str, Any] | None) -> tuple[float, float, float]:
    """Peak in MiB, seconds of scoring, and the sum of the logprobs."""
    kernel = Kernel(engine="transformers", model=str(folder), options=options)  # type: ignore[call-arg]
    engine = ShardedEngine(kernel) if "ranks" in (options or {}) else spawn(kernel, "one")
    try:
        engine.describe()
        ids = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, PROMPT + GIVEN))
        prompts, given = (
            tuple(tuple(row) for row in part.tolist())
            for part in (ids[:, :PROMPT], ids[:, PROMPT:])
        )
        batch = Batch(tuple(range(ROWS)), prompts, GIVEN, given)
        begun = time.perf_counter()
        trace = engine.score(batch, Sampling(), "prefill")  # type: ignore[call-arg]
        seconds = time.perf_counter() - begun
        pids = engine.pids if isinstance(engine, ShardedEngine) else [engine.pid]
        return max(map(peak, pids)) / MIB, seconds, float(trace.columns["logp"].sum())
    finally:
        engine.close()


def peak(pid: int) -> int:
    """The most bytes that were resident."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as all_:
        make_model(Path(one), 1)
        layer = make_model(Path(all_), LAYERS)
        print(f"{LAYERS} layers of {layer:.0f} MiB in float32; peaks of 1 and of {LAYERS} layers")
        for options in SIDES:
            few, _, _ = measured(Path(one), options)
            most, seconds, total = measured(Path(all_), options)
            print(
                f"{options or 'one process'}: {few:.0f} and {most:.0f} MiB, {most - few:.0f} more; "
                f"{seconds:.1f} s, logp {total:.6f}"
            )


if __name__ == "__main__":
    main()
