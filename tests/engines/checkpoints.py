# Small checkpoints written by hand, without torch: a header, and the bytes of every tensor.

import json

import numpy as np

LLAMA = {
    "model_type": "llama",
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
    "eos_token_id": [0, 3],
    "bos_token_id": 1,
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "tie_word_embeddings": True}
_ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {"id": 0, "content": "<eos>", "special": True, **_ADDED},
        {"id": 10, "content": "<tool>", "special": False, **_ADDED},
    ],
    "normalizer": None,
    "pre_tokenizer": {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "use_regex": True,
        "trim_offsets": True,
    },
    "model": {
        "type": "BPE",
        "vocab": {token: i for i, token in enumerate(["<eos>", "a", "b", "c", "Ġ", "ab", "Ġa"])},
        "merges": [["a", "b"], ["Ġ", "a"]],
    },
}


def shapes(config):
    """Name -> shape of every tensor that Transformers gives a model of this config."""
    hidden, wide, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    found = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (heads * head, hidden),
            "self_attn.k_proj": (keys * head, hidden),
            "self_attn.v_proj": (keys * head, hidden),
            "self_attn.o_proj": (hidden, heads * head),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
        }
        if config["model_type"] == "qwen3":
            layer |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
        found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    found["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    return found


def numbers(config, seed=1):
    """Name -> random float32 values of every tensor."""
    rng = np.random.default_rng(seed)
    made = shapes(config).items()
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in made}


def write_safetensors(path, tensors, dtypes=None):
    """Tensors as one file; `dtypes` names those that numpy does not know."""
    header, data = {}, b""
    for name, values in tensors.items():
        dtype = (dtypes or {}).get(name, f"{values.dtype.kind.upper()}{8 * values.dtype.itemsize}")
        offsets = [len(data), len(data) + values.nbytes]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
        data += values.tobytes()
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_checkpoint(folder, config=LLAMA, tensors=None, tokenizer=TOKENIZER):
    """A folder as save_pretrained leaves it; returns its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = numbers(config) if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    write_safetensors(folder / "model.safetensors", tensors)
    return tensors
