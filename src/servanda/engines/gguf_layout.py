# Where each tensor of a checkpoint goes in GGUF; what has no place there is refused by name.
#
# Axes: O rows (out features) of a weight, I its columns.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.engines.safetensors import StoredTensor
from servanda.errors import MeasurementError

ARCHITECTURES = ("llama", "qwen3")
_NEEDED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "max_position_embeddings", "rms_norm_eps"),
)
_ELSE = "use engine 'transformers' or 'vllm', or name a .gguf file that was converted elsewhere"


@dataclass(frozen=True)
class TensorLayout:
    """One tensor in GGUF: its name, its shape, and the heads whose rows are permuted, if any."""

    name: str
    shape: tuple[int, ...]
    heads: int | None = None

    def arranged(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """The rows of each head in the order that llama.cpp rotates them in."""
        if self.heads is None:
            return values
        halves = values.reshape(self.heads, 2, -1, *values.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def layout(
    folder: Path, config: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> dict[str, TensorLayout]:
    """The place of each tensor of a checkpoint, in the order in which they are written.

    Raises:
        MeasurementError: another architecture, an option of it that is not written, or
            tensors that do not belong to config.json.
    """
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise _unwritten(folder, f"model_type {kind!r}", f"{' and '.join(ARCHITECTURES)} are")
    for name in _NEEDED:
        if name not in config:
            raise MeasurementError(
                f"the config.json of {str(folder)!r} has no {name}",
                hint="write the folder anew with save_pretrained",
            )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for found, wanted, name in (
        (config.get("hidden_act", "silu"), "silu", "hidden_act"),
        (rope.get("rope_type", rope.get("type", "default")), "default", "rope_type"),
        (rope.get("partial_rotary_factor", 1.0), 1.0, "partial_rotary_factor"),
        (bool(config.get("attention_bias")), False, "attention_bias"),
        (bool(config.get("mlp_bias")), False, "mlp_bias"),
        (bool(config.get("use_sliding_window")), False, "use_sliding_window"),
    ):
        if found != wanted:
            raise _unwritten(folder, f"{name} {found!r}", f"{wanted!r} is")
    layouts = _layouts(kind, config)
    says = f"the checkpoint {str(folder)!r}"
    hint = "config.json and weights must come from one save_pretrained"
    spare: set[str] = set()
    if config.get("tie_word_embeddings"):
        spare = {"lm_head.weight"}
        del layouts["lm_head.weight"]
    for name in sorted(layouts.keys() - stored.keys()):
        raise MeasurementError(f"{says} lacks the tensor {name!r}", hint=hint)
    for name in sorted(stored.keys() - layouts.keys() - spare):
        raise MeasurementError(
            f"{says} has a tensor that is not written to GGUF, {name!r}", hint=_ELSE
        )
    for name, place in layouts.items():
        if stored[name].shape != place.shape:
            raise MeasurementError(
                f"{says} has another shape than config.json for {name!r}: "
                f"{list(stored[name].shape)}, not {list(place.shape)}",
                hint=hint,
            )
    return layouts


def _unwritten(folder: Path, part: str, written: str) -> MeasurementError:
    return MeasurementError(
        f"the model {str(folder)!r} has {part}, which is not written to GGUF ({written})",
        hint=_ELSE,
    )


def rope_theta(config: Mapping[str, Any]) -> float:
    """The base of the rotations, where either layout of config.json has it."""
    rope = config.get("rope_parameters") or {}
    return float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)


def _layouts(kind: str, config: Mapping[str, Any]) -> dict[str, TensorLayout]:
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    keys = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    turned = kind == "llama"
    of_layer = {
        "input_layernorm": ("attn_norm", (hidden,)),
        "self_attn.q_proj": ("attn_q", (heads * head_dim, hidden), heads),
        "self_attn.k_proj": ("attn_k", (keys * head_dim, hidden), keys),
        "self_attn.v_proj": ("attn_v", (keys * head_dim, hidden)),
        "self_attn.o_proj": ("attn_output", (hidden, heads * head_dim)),
        "post_attention_layernorm": ("ffn_norm", (hidden,)),
        "mlp.gate_proj": ("ffn_gate", (wide, hidden)),
        "mlp.up_proj": ("ffn_up", (wide, hidden)),
        "mlp.down_proj": ("ffn_down", (hidden, wide)),
    }
    if kind == "qwen3":
        of_layer["self_attn.q_norm"] = ("attn_q_norm", (head_dim,))
        of_layer["self_attn.k_norm"] = ("attn_k_norm", (head_dim,))
    embedding = (config["vocab_size"], hidden)
    layouts = {"model.embed_tokens.weight": TensorLayout("token_embd.weight", embedding)}
    for layer in range(config["num_hidden_layers"]):
        for theirs, (ours, shape, *permuted) in of_layer.items():
            layouts[f"model.layers.{layer}.{theirs}.weight"] = TensorLayout(
                f"blk.{layer}.{ours}.weight", shape, permuted[0] if permuted and turned else None
            )
    layouts["model.norm.weight"] = TensorLayout("output_norm.weight", (hidden,))
    layouts["lm_head.weight"] = TensorLayout("output.weight", embedding)
    return layouts
