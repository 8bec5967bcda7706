# Weights quantized by torchao, one way of running beside another: the largest difference of a
# logprob, in nats.  What quantization itself changes is not counted.

from __future__ import annotations

from typing import Any

import torch
import torchao.quantization as ao
from torchao.quantization import PerAxis, PerGroup

from benchmarks.hunt import architectures
from benchmarks.hunt.ways import apart

NAMES = ("llama", "llama-tied", "qwen3", "gemma2", "mixtral")
SCHEMES: dict[str, Any] = {
    "int8, weights": ao.Int8WeightOnlyConfig(),
    "int8, weights and activations": ao.Int8DynamicActivationInt8WeightConfig(),
    "int8 by row, weights": ao.IntxWeightOnlyConfig(torch.int8, granularity=PerAxis(0)),
    "int4 in groups of 32, weights": ao.IntxWeightOnlyConfig(torch.int4, granularity=PerGroup(32)),
    "int4 in groups of 32, int8 activations": ao.Int8DynamicActivationIntxWeightConfig(
        torch.int4, weight_granularity=PerGroup(32)
    ),
    "float8, weights": ao.Float8WeightOnlyConfig(),
}


@torch.no_grad()
def measured(name: str) -> dict[str, float | str]:
    """Of each scheme: decode beside prefill, in company beside alone, as dequantized weights."""
    noise = torch.Generator().manual_seed(3)
    ids, mates = (torch.randint(1, 1000, (n, 29), generator=noise) for n in (1, 7))
    found: dict[str, float | str] = {}
    for scheme, config in SCHEMES.items():
        model = architectures.model(name)
        ao.quantize_(model, config)
        whole = model(ids, use_cache=False).logits
        out = model(ids[:, :10], use_cache=True)
        parts = [out.logits]
        for at in range(10, 29):
            out = model(ids[:, at : at + 1], cache=out.cache, use_cache=True)
            parts.append(out.logits)
        found[f"{scheme}: decode"] = apart(torch.cat(parts, 1), whole)
        company = model(torch.cat([ids, mates]), use_cache=False).logits[:1]
        found[f"{scheme}: company"] = apart(company, whole)
        plain, modules = architectures.model(name), dict(model.named_modules())
        for place, module in plain.named_modules():
            weight = getattr(modules[place], "weight", None)
            if isinstance(module, torch.nn.Linear) and hasattr(weight, "dequantize"):
                values = weight if type(weight) is torch.nn.Parameter else weight.dequantize()
                module.weight = torch.nn.Parameter(values.to(torch.float32))
        dequantized = plain(ids, use_cache=False).logits
        found[f"{scheme}: dequantized"] = apart(dequantized, whole)
    return {way: float(f"{value:.3g}") for way, value in found.items()}
