# GGUF files are read back with gguf's own reader, and hold the checkpoint and nothing else.

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripts.export_gguf import (
    CONVERTER,
    main,
    pre_tokenizer,
    rounded,
    token_ids,
    write_gguf,
)

from servanda.engines.folder import read_json, token_digest
from servanda.engines.safetensors import read_stored, weights_digest
from servanda.errors import MeasurementError
from tests.engines.checkpoints import LLAMA, QWEN3, TOKENIZER, numbers, write_checkpoint

MODEL = Path(__file__).parents[2] / "models" / "tiny-lm"
CONFIGS = {
    "llama": LLAMA,
    "llama, tied": {**LLAMA, "tie_word_embeddings": True},
    "qwen3, tied": QWEN3,
    "qwen3": {**QWEN3, "tie_word_embeddings": False},
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def name_in_gguf(name):
    parts = name.removesuffix(".weight").split(".")
    if parts[:2] == ["model", "layers"]:
        return f"blk.{parts[2]}.{NAMES['.'.join(parts[3:])]}.weight"
    return NAMES[".".join(parts)] + ".weight"


def rotated_in_pairs(rows, heads):
    """Row 2i of a head is the i-th of its first half, row 2i + 1 the i-th of its second."""
    size = len(rows) // heads
    moved = np.empty_like(rows)
    for head in range(heads):
        for i in range(size // 2):
            moved[head * size + 2 * i] = rows[head * size + i]
            moved[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return moved


def bfloat16_by_search(value):
    """The nearest float32 whose lower half is zero, ties to the even one."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    low = bits & 0xFFFF0000
    near = [struct.unpack("<f", struct.pack("<I", b))[0] for b in (low, low + 0x10000)]
    gaps = [abs(float(value) - n) for n in near]
    if gaps[0] == gaps[1]:
        return near[(low >> 16) & 1]
    return near[gaps.index(min(gaps))]


def values_of(tensor):
    """Values of a tensor in a GGUF file, in float64; numpy has no bfloat16."""
    shape = tuple(tensor.shape[::-1].tolist())
    if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
        bits = np.ascontiguousarray(tensor.data).view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(shape).astype(np.float64)
    return tensor.data.reshape(shape).astype(np.float64)


def expected(name, values, config, kind):
    if config["model_type"] == "llama" and "q_proj" in name:
        values = rotated_in_pairs(values, config["num_attention_heads"])
    if config["model_type"] == "llama" and "k_proj" in name:
        values = rotated_in_pairs(values, config["num_key_value_heads"])
    if values.ndim == 1 or kind == "f32":
        return values.astype(np.float64)
    half = {
        "f16": lambda v: struct.unpack("<e", struct.pack("<e", v))[0],
        "bf16": bfloat16_by_search,
    }[kind]
    return np.array([half(v) for v in values.ravel().tolist()]).reshape(values.shape)


def field(reader, key):
    return reader.get_field(key).contents()


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("name", [*CONFIGS])
def test_every_tensor_of_the_file_is_the_checkpoints_own(tmp_path, name, kind):
    config = CONFIGS[name]
    tensors = write_checkpoint(tmp_path / "m", config)

    write_gguf(tmp_path / "m", tmp_path / "m.gguf", kind)

    read = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert read.keys() == {name_in_gguf(name) for name in tensors}
    for name, values in tensors.items():
        found = values_of(read[name_in_gguf(name)])
        assert np.array_equal(found, expected(name, values, config, kind)), name


@given(st.floats(-(2.0**127), 2.0**127, width=32))
def test_bfloat16_is_the_nearest_number_it_has(value):
    (bits,) = rounded(np.array([value], np.float32), "bf16", "w").tolist()

    found = struct.unpack("<f", struct.pack("<I", bits << 16))[0]

    assert struct.pack("<f", found) == struct.pack("<f", bfloat16_by_search(value))


def test_what_is_no_number_stays_none():
    odd = np.array([np.nan, np.inf, -np.inf], np.float32)

    bits = rounded(odd, "bf16", "w").astype(np.uint32) << 16

    assert np.array_equal(bits.view(np.float32), odd, equal_nan=True)
    assert np.array_equal(rounded(odd, "f16", "w").astype(np.float32), odd, equal_nan=True)


def test_the_file_says_what_it_is_and_what_it_was_made_from(tmp_path):
    write_checkpoint(tmp_path / "policy")

    write_gguf(tmp_path / "policy", tmp_path / "m.gguf", "bf16")

    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    said = {key: field(reader, key) for key in reader.fields if not key.startswith("GGUF.")}
    assert said == {
        "general.architecture": "llama",
        "general.name": "policy",
        "general.file_type": int(gguf.LlamaFileType.MOSTLY_BF16),
        "servanda.weights_from": weights_digest(read_stored(tmp_path / "policy"), LLAMA),
        "servanda.converter": CONVERTER,
        "servanda.tokens": token_digest(token_ids(TOKENIZER), TOKENIZER),
        "servanda.eos": "[0, 3]",
        "servanda.tokenizes": True,
        "llama.vocab_size": 12,
        "llama.context_length": 64,
        "llama.embedding_length": 8,
        "llama.block_count": 2,
        "llama.feed_forward_length": 6,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 4,
        "llama.attention.value_length": 4,
        "llama.attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "llama.rope.dimension_count": 4,
        "llama.rope.freq_base": 500000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [
            *("<eos>", "a", "b", "c", "Ġ", "ab", "Ġa"),
            *("<7>", "<8>", "<9>", "<tool>", "<11>"),
        ],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1, 5, 5, 5, 4, 5],
        "tokenizer.ggml.merges": ["a b", "Ġ a"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
    }


def test_a_tokenizer_that_llama_cpp_does_not_have_leaves_a_file_of_ids(tmp_path):
    words = {**TOKENIZER, "model": {"type": "WordLevel", "vocab": {"a": 0}}}
    write_checkpoint(tmp_path / "m", tokenizer=words)

    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "f32")

    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert field(reader, "tokenizer.ggml.model") == "no_vocab"
    assert field(reader, "servanda.tokenizes") is False
    assert not [key for key in reader.fields if key.startswith("tokenizer.ggml.to")]


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT = {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("steps", "model", "normalizer", "name"),
    [
        ([BYTES], {}, None, "gpt-2"),
        ([DIGITS, BYTES], {}, None, "smollm"),
        ([SPLIT, {**BYTES, "use_regex": False}], {}, {"type": "NFC"}, "qwen2"),
        ([SPLIT, {**BYTES, "use_regex": False}], {"ignore_merges": True}, None, None),
        ([{**DIGITS, "individual_digits": False}, BYTES], {}, None, None),
        ([{**BYTES, "add_prefix_space": True}], {}, None, None),
        ([BYTES], {}, {"type": "Lowercase"}, None),
        ([BYTES], {"byte_fallback": True}, None, None),
        ([BYTES], {"type": "Unigram"}, None, None),
        ([{"type": "Whitespace"}], {}, None, None),
        ([], {}, None, None),
    ],
)
def test_a_way_of_cutting_texts_is_named_only_where_llama_cpp_has_it(
    steps, model, normalizer, name
):
    tokenizer = {
        "model": {"type": "BPE", **model},
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if steps else None,
    }

    assert pre_tokenizer(tokenizer) == name


def test_the_shipped_tokenizer_is_one_that_llama_cpp_has():
    assert pre_tokenizer(read_json(MODEL / "tokenizer.json")) == "smollm"


def test_a_file_that_cannot_be_finished_is_not_there(tmp_path):
    tensors = numbers(LLAMA)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = 1e6
    write_checkpoint(tmp_path / "m", tensors=tensors)
    file = tmp_path / "out" / "m.gguf"
    write_gguf(tmp_path / "m", file, "f32")
    before = file.read_bytes()

    with pytest.raises(MeasurementError) as told:
        write_gguf(tmp_path / "m", file, "f16")

    assert str(told.value) == (
        "the tensor 'model.layers.1.mlp.up_proj.weight' holds a value beyond the range of f16\n"
        "  hint: use float32 for this checkpoint, or bfloat16"
    )
    assert [*file.parent.iterdir()] == [file]
    assert file.read_bytes() == before


# refusals

ELSE = "\n  hint: llama.cpp's convert_hf_to_gguf.py may convert it"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2', which is not written to GGUF (llama and "),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu', which is not written to GGUF ('silu' is)"),
        ({"attention_bias": True}, "attention_bias True, which is not written to GGUF (False is)"),
        ({"use_sliding_window": True}, "use_sliding_window True, which is not written to GGUF"),
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope_type 'yarn', which is not written to GGUF ('default' is)",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear"}},
            "rope_type 'linear', which is not written to GGUF ('default' is)",
        ),
    ],
)
def test_what_is_not_written_is_refused_by_name(tmp_path, change, says):
    write_checkpoint(tmp_path / "m", tensors=numbers(LLAMA))
    (tmp_path / "m" / "config.json").write_text(json.dumps({**LLAMA, **change}))

    with pytest.raises(MeasurementError) as told:
        write_gguf(tmp_path / "m", tmp_path / "m.gguf", "f32")

    assert str(told.value).startswith(f"the model '{tmp_path / 'm'}' has {says}")
    assert str(told.value).endswith(ELSE)


def test_tensors_that_do_not_belong_to_the_config_are_named(tmp_path):
    def said(tensors):
        write_checkpoint(tmp_path / "m", tensors=tensors)
        with pytest.raises(MeasurementError) as told:
            write_gguf(tmp_path / "m", tmp_path / "m.gguf", "f32")
        return str(told.value)

    tensors, q = numbers(LLAMA), "model.layers.0.self_attn.q_proj"
    checkpoint = f"the checkpoint '{tmp_path / 'm'}'"
    hint = "\n  hint: config.json and weights must come from one save_pretrained"

    lacking = {name: values for name, values in tensors.items() if name != "lm_head.weight"}
    assert said(lacking) == f"{checkpoint} lacks the tensor 'lm_head.weight'{hint}"
    more = {**tensors, f"{q}.bias": np.zeros(16, np.float32)}
    assert said(more) == (
        f"{checkpoint} has a tensor that is not written to GGUF, '{q}.bias'{ELSE}"
    )
    wide = {**tensors, f"{q}.weight": np.zeros((8, 8), np.float32)}
    assert said(wide) == (
        f"{checkpoint} has another shape than config.json for '{q}.weight': [8, 8], not [16, 8]"
        f"{hint}"
    )


def test_a_config_that_lacks_a_size_is_named(tmp_path):
    write_checkpoint(tmp_path / "m")
    config = {name: value for name, value in LLAMA.items() if name != "hidden_size"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))

    with pytest.raises(MeasurementError) as told:
        write_gguf(tmp_path / "m", tmp_path / "m.gguf", "f32")

    assert str(told.value) == (
        f"the config.json of '{tmp_path / 'm'}' has no hidden_size\n"
        "  hint: write the folder anew with save_pretrained"
    )


def test_the_command_writes_a_type_and_says_what_is_wrong(tmp_path, capsys):
    write_checkpoint(tmp_path / "m")

    assert main([str(tmp_path / "m"), str(tmp_path / "m.gguf"), "--type", "f16"]) == 0
    assert (tmp_path / "m.gguf").is_file()
    assert main([str(tmp_path / "n"), str(tmp_path / "n.gguf")]) == 4
    assert capsys.readouterr().err.startswith(f"the model folder '{tmp_path / 'n'}' does not exist")


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    write_checkpoint(tmp_path / "m")
    (tmp_path / "file").write_text("")

    with pytest.raises(MeasurementError) as told:
        write_gguf(tmp_path / "m", tmp_path / "file" / "m.gguf", "f32")

    assert str(told.value) == (
        f"'{tmp_path / 'file' / 'm.gguf'}' cannot be written: File exists\n"
        "  hint: free space, or name another file"
    )
