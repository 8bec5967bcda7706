# Graphs of ONNX Runtime at each level of optimization, beside Transformers: the largest difference
# of a logprob, in nats.

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnxruntime import GraphOptimizationLevel as Level

from benchmarks.hunt import architectures
from benchmarks.hunt.ways import apart

NAMES = ("gemma2", "gpt2", "gpt_neox", "llama", "olmo2", "phi3", "qwen3", "starcoder2")
LEVELS = {
    "no optimization": Level.ORT_DISABLE_ALL,
    "basic": Level.ORT_ENABLE_BASIC,
    "extended": Level.ORT_ENABLE_EXTENDED,
    "all": Level.ORT_ENABLE_ALL,
}


class Logits(torch.nn.Module):
    """Only the logits of a model, and no cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, vocabulary]."""
        return self.model(input_ids=ids_BT, use_cache=False).logits


@torch.no_grad()
def measured(name: str) -> dict[str, float | str]:
    """Of each level the difference in nats, for a text that is longer than that of the export."""
    noise = torch.Generator().manual_seed(3)
    ids, traced = (torch.randint(1, 1000, shape, generator=noise) for shape in ((3, 29), (2, 12)))
    model = architectures.model(name)
    file = Path(tempfile.mkdtemp()) / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", max=256)}
        torch.onnx.export(
            Logits(model), (traced,), file, dynamo=True, dynamic_shapes=(sizes,), verbose=False
        )
    expected, found = model(ids, use_cache=False).logits, {}
    for level, option in LEVELS.items():
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = option
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        entry = session.get_inputs()[0].name
        (logits,) = session.run(None, {entry: ids.numpy().astype(np.int64)})
        found[level] = float(f"{apart(torch.from_numpy(logits), expected):.3g}")
    return found
