# A kernel whose layers stay in their files, against the same kernel in memory: bit for bit.

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from servanda.engines import open_engine
from servanda.errors import MeasurementError
from tests.engines import large

OFFLOAD = {"offload": "layers"}
KINDS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    # experts that the file has one by one and the model has merged
    "mixture": {"kind": "Qwen3Moe", "moe_intermediate_size": 16, "num_experts": 4}
    | {"num_experts_per_tok": 2},
    "softcap": {"kind": "Gemma2", "final_logit_softcapping": 5.0, "tie_word_embeddings": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_offloaded_layers_compute_the_same_bits(tmp_path, kind):
    folder = large.save_model(tmp_path, **KINDS[kind])
    expected, one = large.in_one_process(folder, large.launched(), dtype="float32")

    engine = open_engine(large.kernel(folder, OFFLOAD, dtype="float32"))
    found = large.everything(engine, large.launched())

    large.assert_alike(found, expected, 0.0)
    assert engine.describe() == one
    held = {name: p.device.type for name, p in engine.model.named_parameters()}
    assert {device for name, device in held.items() if "layers" in name} == {"meta"}
    assert held["model.embed_tokens.weight"] == "meta" and held["model.norm.weight"] == "cpu"


def test_a_layer_is_forgotten_when_its_forward_fails(tmp_path):
    engine = open_engine(large.kernel(large.save_model(tmp_path), OFFLOAD))
    layer = engine.model.model.layers[1]
    layer.mlp.forward = lambda *_: 1 / 0

    with pytest.raises(ZeroDivisionError):
        engine.generate(large.launched(), large.PLAIN, 0)

    assert all(p.device.type == "meta" for p in layer.parameters())


def spoil(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def test_tensors_that_are_not_those_of_the_config_are_named(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    odd, more = {name: torch.ones(2, 2)}, {"model.layers.9.x.weight": torch.ones(2)}
    cases = {
        f"lacks the tensor '{name}' (1 such)": lambda tensors: tensors.pop(name),
        f"has another shape than config.json for '{name}'": lambda tensors: tensors.update(odd),
        "does not know, 'model.layers.9.x.weight'": lambda tensors: tensors.update(more),
    }
    for number, (text, change) in enumerate(cases.items()):
        folder = large.save_model(tmp_path / str(number))
        spoil(folder, change)
        with pytest.raises(MeasurementError) as refused:
            open_engine(large.kernel(folder, OFFLOAD))
        assert text in str(refused.value) and "one save_pretrained" in str(refused.value)


def test_a_head_that_is_said_to_be_tied_and_is_not_is_refused(tmp_path):
    folder = large.save_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))

    with pytest.raises(MeasurementError, match=r"ties 'lm_head") as refused:
        open_engine(large.kernel(folder, OFFLOAD))
    assert "tie_word_embeddings to false" in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"options": {"offload": "half"}}, "options.offload is 'half', and layers are what"),
        ({"options": OFFLOAD, "quantization": "int8_weight_only"}, "quantization needs the whole"),
        ({"options": OFFLOAD, "fault": {"bf16_positions": True}}, "fault needs the whole model"),
        ({"options": {"offlaod": "layers"}}, "engine 'transformers' takes no option 'offlaod'"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(tmp_path, keys, text):
    folder = large.save_model(tmp_path)

    with pytest.raises(MeasurementError) as refused:
        open_engine(large.kernel(folder, **keys))

    assert text in str(refused.value) and refused.value.problems[0].hint


def test_an_offloaded_kernel_takes_over_no_weights(tmp_path):
    engine = open_engine(large.kernel(large.save_model(tmp_path), OFFLOAD))

    with pytest.raises(MeasurementError, match="loaded in parts takes over no weights"):
        engine.load([])
