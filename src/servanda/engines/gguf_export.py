# GGUF, the file of llama.cpp, written from a checkpoint's own tensors.
#
# f32, f16 and bf16 are written here; the quantised kinds are made from f32 by llama.cpp's own
# quantiser.  Norms stay float32 in every kind.  Llama's query and key rows are permuted:
# llama.cpp rotates neighbouring pairs of a head, Transformers its two halves.
# The file says what it was made from (servanda.weights_from) and by what.
# To make one by hand, for llama-server: python -m servanda.engines.gguf_export FOLDER FILE KIND

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from servanda.contract.identity import digest_of
from servanda.engines.cache import alone, cache_folder, whole_file
from servanda.engines.folder import checkpoint_folder, end_tokens, read_json, token_digest
from servanda.engines.gguf_layout import (
    TensorLayout,
    layout,
    rope_theta,
    token_ids,
    write_tokenizer,
)
from servanda.engines.llama_model import last_error, llama
from servanda.engines.safetensors import StoredTensor, read_stored, weights_digest
from servanda.errors import MeasurementError, ServandaError

CONVERTER = "servanda-gguf 1"  # raised when the same checkpoint makes another file

KINDS = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
    "q4_k_m": LlamaFileType.MOSTLY_Q4_K_M,
}
_WRITTEN = {
    "f32": GGMLQuantizationType.F32,
    "f16": GGMLQuantizationType.F16,
    "bf16": GGMLQuantizationType.BF16,
}


def write_gguf(folder: Path, path: Path, kind: str) -> None:
    """Write a checkpoint as GGUF; the file is there whole or not at all.

    Args:
        folder: config.json, tokenizer.json and safetensors of a Llama or a Qwen3.
        kind: one of KINDS.

    Raises:
        MeasurementError: the folder or the file cannot be used, the model has a part that is
            not written, a value has no place in `kind`, or the quantiser refuses.
    """
    if kind not in KINDS:
        raise MeasurementError(
            f"no GGUF file of kind {kind!r} is written", hint=f"there are {', '.join(KINDS)}"
        )
    folder = checkpoint_folder(str(folder))
    config, stored = read_json(folder / "config.json"), read_stored(folder)
    with whole_file(path) as made:
        if kind in _WRITTEN:
            _write(folder, config, stored, made, kind)
            return
        with whole_file(path.with_suffix(".f32")) as plain:
            _write(folder, config, stored, plain, "f32")
            _quantize(plain, made, kind)
            plain.unlink()


def cached_gguf(folder: Path, weights: str, kind: str) -> Path:
    """The GGUF file of a checkpoint in the cache, written there if it is not.

    Its name holds the digests of all that the file is made of, so a file never describes
    another checkpoint.

    Args:
        weights: `weights_digest` of the folder.
    """
    rules = [read_json(folder / name) for name in ("config.json", "tokenizer.json")]
    digest = digest_of([*rules, end_tokens(folder, rules[0])])
    by = CONVERTER.replace(" ", "-")
    if kind not in _WRITTEN:
        by += f"-llama.cpp-{llama().llama_version().decode()}"
    path = cache_folder("gguf") / f"{weights}-{digest[:8]}-{by}-{kind}.gguf"
    if not path.is_file():
        with alone(path):
            if not path.is_file():  # another process may have written it meanwhile
                write_gguf(folder, path, kind)
    return path


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
            hint="q8_0 and q4_0 need widths that 32 divides, q4_k_m such that 256 does",
        )


def main(argv: list[str]) -> int:
    if len(argv) != 3:
        print("usage: python -m servanda.engines.gguf_export FOLDER FILE KIND", file=sys.stderr)
        return 2
    try:
        write_gguf(Path(argv[0]), Path(argv[1]), argv[2])
    except ServandaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
