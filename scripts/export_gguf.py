"""Writes a checkpoint folder as GGUF, the file of llama.cpp, from the checkpoint's own tensors.

    python scripts/export_gguf.py models/tiny-lm tiny-lm-f16.gguf --type f16

For tests and benchmarks, of a Llama or a Qwen3; llama.cpp's convert_hf_to_gguf.py converts more
architectures.  f32, f16 and bf16 are written here; the quantised types are made from f32 by
llama.cpp's own quantiser, which needs llama-cpp-python.  The file names the weights that it was
made from (servanda.weights_from), and by what (servanda.converter).
"""

# Norms stay float32 in every type.  Llama's query and key rows are permuted: llama.cpp rotates
# neighbouring pairs of a head, Transformers its two halves.
#
# A tensor that has no place in GGUF is refused by name, and a tokenizer that llama.cpp has none
# like is left out.  Token ids are what kernels speak: a file whose texts llama.cpp cannot cut is a
# whole kernel.  It then says so (servanda.tokenizes false).
#
# Axes: O rows (out features) of a weight, I its columns.

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from servanda.contract.text_file import whole
from servanda.engines.folder import checkpoint_folder, end_tokens, read_json, token_digest
from servanda.engines.llamacpp import last_error, llama
from servanda.engines.safetensors import StoredTensor, read_stored, weights_digest
from servanda.errors import MeasurementError, ServandaError

HINT = "free space, or name another file"
CONVERTER = "servanda-gguf 1"  # raised when the same checkpoint makes another file

KINDS = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
    "q4_1": LlamaFileType.MOSTLY_Q4_1,
    "q4_k_m": LlamaFileType.MOSTLY_Q4_K_M,
}
_WRITTEN = {
    "f32": GGMLQuantizationType.F32,
    "f16": GGMLQuantizationType.F16,
    "bf16": GGMLQuantizationType.BF16,
}
ARCHITECTURES = ("llama", "qwen3")
_NEEDED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "max_position_embeddings", "rms_norm_eps"),
)
_ELSE = "llama.cpp's convert_hf_to_gguf.py may convert it"
# name in llama.cpp -> pattern of a Split before bytes
_SPLITS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


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


def write_gguf(folder: Path, path: Path, kind: str) -> None:
    """Write a checkpoint as GGUF; the file is there whole or not at all.

    Args:
        folder: config.json, tokenizer.json and safetensors of a Llama or a Qwen3.
        kind: one of KINDS.

    Raises:
        MeasurementError: the folder or the file cannot be used, the model has a part that is
            not written, a value has no place in `kind`, or the quantiser refuses.
    """
    folder = checkpoint_folder(str(folder))
    config, stored = read_json(folder / "config.json"), read_stored(folder)
    with _writing(path) as made:
        if kind in _WRITTEN:
            _write(folder, config, stored, made, kind)
            return
        with _writing(path.with_suffix(".f32")) as plain:
            _write(folder, config, stored, plain, "f32")
            _quantize(plain, made, kind)
        path.with_suffix(".f32").unlink()


@contextmanager
def _writing(path: Path) -> Iterator[Path]:
    with MeasurementError.of_system(f"{str(path)!r} cannot be written", hint=HINT):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as made:
            yield made


def _write(
    folder: Path,
    config: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    path: Path,
    kind: str,
) -> None:
    layouts = layout(folder, config, stored)
    tokenizer, eos = read_json(folder / "tokenizer.json"), end_tokens(folder, config)
    with closing(GGUFWriter(path, config["model_type"])) as writer:
        writer.add_name(folder.resolve().name)
        writer.add_file_type(KINDS[kind])
        writer.add_string("servanda.weights_from", weights_digest(stored, config))
        writer.add_string("servanda.converter", CONVERTER)
        writer.add_string("servanda.tokens", token_digest(token_ids(tokenizer), tokenizer))
        writer.add_string("servanda.eos", json.dumps(eos))  # llama.cpp does not tell arrays
        _add_shape(writer, config)
        write_tokenizer(writer, tokenizer, config, eos)
        for place in layouts.values():
            flat = _kind_of(place, kind)
            bits = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[flat]
            size = int(np.prod(place.shape)) * np.dtype(bits).itemsize
            writer.add_tensor_info(place.name, place.shape, np.dtype(bits), size, _WRITTEN[flat])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, place in layouts.items():
            values = place.arranged(stored[name].float32())
            writer.write_tensor_data(rounded(values, _kind_of(place, kind), name))


def _kind_of(place: TensorLayout, kind: str) -> str:
    return kind if len(place.shape) > 1 else "f32"


def rounded(values: NDArray[np.float32], kind: str, name: str) -> NDArray[Any]:
    """Values in f32, f16 or bf16 (its bits), to the nearest, ties to even.

    Raises:
        MeasurementError: a finite value is beyond the format's range.
    """
    with np.errstate(over="ignore"):
        half = quantize(values, _WRITTEN[kind])
    back = dequantize(half, _WRITTEN[kind])
    if (np.isinf(back) & np.isfinite(values)).any():
        raise MeasurementError(
            f"the tensor {name!r} holds a value beyond the range of {kind}",
            hint="use float32 for this checkpoint, or bfloat16",
        )
    return half.view(np.uint16) if kind == "bf16" else half


def _add_shape(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _quantize(plain: Path, made: Path, kind: str) -> None:
    lib = llama()
    options = lib.llama_model_quantize_default_params()
    options.nthread = 1
    options.ftype = int(KINDS[kind])
    if lib.llama_model_quantize(os.fsencode(plain), os.fsencode(made), options):
        raise MeasurementError(
            f"llama.cpp cannot quantise to {kind}: {last_error()}",
            hint="q8_0, q4_0 and q4_1 need widths that 32 divides, q4_k_m such that 256 does",
        )


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


def token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Token -> id of a tokenizer.json, with the tokens that were added to its model."""
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    pairs = (
        vocab.items() if isinstance(vocab, Mapping) else ((t[0], i) for i, t in enumerate(vocab))
    )
    return {**dict(pairs), **{t["content"]: t["id"] for t in tokenizer.get("added_tokens") or ()}}


def pre_tokenizer(tokenizer: Mapping[str, Any]) -> str | None:
    """What llama.cpp calls the way texts are cut before byte-level BPE; None: not one it has."""
    model = tokenizer.get("model") or {}
    plain = not any(
        model.get(key)
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    )
    steps = tokenizer.get("pre_tokenizer") or {"type": "Sequence", "pretokenizers": []}
    steps = steps["pretokenizers"] if steps["type"] == "Sequence" else [steps]
    if model.get("type") != "BPE" or not plain or not steps or steps[-1]["type"] != "ByteLevel":
        return None
    normalizer = tokenizer.get("normalizer")
    if steps[-1].get("add_prefix_space"):
        return None
    before = steps[:-1]
    if steps[-1].get("use_regex", True):
        if normalizer is not None or model.get("ignore_merges"):
            return None
        if not before:
            return "gpt-2"
        alone = before == [{"type": "Digits", "individual_digits": True}]
        return "smollm" if alone else None
    if len(before) == 1 and before[0]["type"] == "Split" and not before[0].get("invert"):
        pattern = (before[0].get("pattern") or {}).get("Regex")
        name = next((name for name, split in _SPLITS.items() if split == pattern), None)
        if bool(model.get("ignore_merges")) != (name == "llama-bpe"):
            return None
        # Qwen's texts are normalised (NFC), which llama.cpp leaves to anyone who sends them
        return name if normalizer is None or normalizer == {"type": "NFC"} else None
    return None


def write_tokenizer(
    writer: GGUFWriter,
    tokenizer: Mapping[str, Any],
    config: Mapping[str, Any],
    eos: tuple[int, ...],
) -> None:
    """Add vocabulary, merges and special ids; a model without byte-level BPE has ids alone."""
    name = pre_tokenizer(tokenizer)
    writer.add_bool("servanda.tokenizes", name is not None)
    if name is None:
        writer.add_tokenizer_model("no_vocab")
        return
    size = config["vocab_size"]
    tokens = [f"<{i}>".encode() for i in range(size)]  # an id without a token is never drawn
    types = [TokenType.UNUSED] * size
    added = {t["id"]: t for t in tokenizer.get("added_tokens") or ()}
    for token, i in token_ids(tokenizer).items():
        if i < size:
            tokens[i], types[i] = token.encode(), TokenType.NORMAL
            if i in added:
                special = added[i].get("special")
                types[i] = TokenType.CONTROL if special else TokenType.USER_DEFINED
    merges = tokenizer["model"].get("merges") or []
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    if eos:
        writer.add_eos_token_id(eos[0])
    for key, add in (
        ("bos_token_id", writer.add_bos_token_id),
        ("pad_token_id", writer.add_pad_token_id),
    ):
        if isinstance(config.get(key), int):
            add(config[key])
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument("--type", choices=KINDS, default="f32")
    given = parser.parse_args(argv)
    try:
        write_gguf(given.folder, given.path, given.type)
    except ServandaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
