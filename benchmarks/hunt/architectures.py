# Small models with random weights, of every causal language model of Transformers that was
# surveyed: architectures.json has what a configuration needs besides the usual sizes.

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
VOCABULARY = 1000  # ids of texts; a few rows of the embedding are never used
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "expert_ffn_size": 32,
}
WIDTHS = {  # what grows with the width of a model
    *("hidden_size", "intermediate_size", "head_dim", "n_embd", "dff", "rotary_dim"),
    *("moe_intermediate_size", "expert_ffn_size"),
    *("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
}
SPREAD = 2.5  # standard deviation of the logits, nats: sharp enough that an error shows


def names() -> list[str]:
    """The architectures, and variants of them, in alphabetical order."""
    return sorted(_table())


def _table() -> dict[str, dict[str, Any]]:
    return json.loads((HERE / "architectures.json").read_text(encoding="utf-8"))


def config(name: str, width: int = 1) -> Any:
    """Its small configuration, without dropout and without noise in the router.

    `width` multiplies hidden sizes and those of heads: engines have kernels for some sizes only.

    Raises:
        KeyError: the table has no such name.
        ValueError: this version of Transformers has no such model.
    """
    own = dict(_table()[name])
    kind = own.pop("model_type", name)
    sizes = {k: v for k, v in SIZES.items() if k not in own.pop("without", ())}
    base = AutoConfig.for_model(kind)
    known = {*base.to_dict(), *getattr(type(base), "attribute_map", {})}
    if own.pop("experts", False):
        own = {**EXPERTS, **own}
    given = {k: v for k, v in sizes.items() if k in known or k.endswith("token_id")}
    noise = {
        k: 0.0
        for k, v in base.to_dict().items()
        if isinstance(v, float) and any(w in k for w in ("drop", "jitter"))
    }
    chosen = {**noise, **given, **own}
    return AutoConfig.for_model(
        kind, **{k: width * v if k in WIDTHS and v else v for k, v in chosen.items()}
    )


def model(name: str, seed: int = 0, width: int = 1) -> Any:
    """The model in float32, for inference."""
    torch.manual_seed(seed)
    built = AutoModelForCausalLM.from_config(config(name, width), dtype=torch.float32).eval()
    return _randomised(built, torch.Generator().manual_seed(seed))


@torch.no_grad()
def _randomised(built: Any, noise: torch.Generator) -> Any:
    # usually matrices are near 0, biases 0 and norms 1: most errors would vanish
    for name, weight in built.named_parameters():
        draw = torch.randn(weight.shape, generator=noise)
        if weight.ndim == 1:
            scale = 1.0 if weight.abs().max() == 0 else weight.abs().clamp(0.5, 2)
            weight.add_(0.1 * scale * draw)
        elif "A_log" in name or "conv" in name:
            weight.add_(0.05 * draw)
        else:
            inputs = any(word in name for word in ("embed", "wte"))
            weight.copy_(draw * (1.0 if inputs else 1.2 / math.sqrt(min(weight.shape[-2:]))))
    ids = torch.randint(1, VOCABULARY, (2, 24), generator=noise)
    spread = built(input_ids=ids, use_cache=False).logits.std()
    head = built.get_output_embeddings()
    if head is not None and torch.isfinite(spread):
        factor = SPREAD / float(spread)
        tied = built.config.get_text_config().tie_word_embeddings
        head.weight.mul_(min(factor, 1.0) if tied else factor)
    return built


if __name__ == "__main__":  # python -m benchmarks.hunt.architectures NAME FOLDER
    model(sys.argv[1]).save_pretrained(sys.argv[2])
