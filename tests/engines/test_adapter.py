# LoRA adapters: the engine against PEFT by itself, and adapters of other models.

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from servanda.contract.identity import same_policy
from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines.checkpoint import CONFIG, WEIGHTS
from servanda.errors import IdentityError, MeasurementError
from servanda.traces.trace import Batch

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # of PEFT
MODELS = Path(__file__).parents[2] / "models"
TEXT = (5, 9, 40, 7, 300, 12, 8)
BATCH = Batch(prompts=(TEXT[:2],), sequence_S=(0,), continuations=(TEXT[2:],), width=5)
ADAPTERS = {
    "attention": {"r": 4, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "use_rslora": True},
    "dora": {"r": 4, "target_modules": ["down_proj"], "use_dora": True},
    "another norm": {
        "r": 4,
        "target_modules": ["o_proj"],
        "modules_to_save": ["model.norm"],
    },
}


def written(folder, model="tiny-lm", **config):
    """An adapter whose weights are random, and the logits that PEFT computes with it."""
    base = AutoModelForCausalLM.from_pretrained(
        MODELS / model, dtype="float32", attn_implementation="eager"
    )
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for _, parameter in wrapped.named_parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape)
    wrapped.save_pretrained(folder)
    with torch.inference_mode():
        logits = wrapped.eval()(torch.tensor([TEXT])).logits[0, 1:-1]
    return logits.numpy()


def opened(adapter, **keys):
    keys = {"model": str(MODELS / "tiny-lm"), "adapter": str(adapter)} | keys
    return open_engine(Kernel(engine="transformers", **keys))


def logits_of(engine, path="prefill"):
    return np.concatenate(list(engine.logits(BATCH, path)))


@pytest.mark.parametrize("name", [*ADAPTERS])
def test_the_logits_are_those_of_peft(tmp_path, name):
    expected = written(tmp_path, **ADAPTERS[name])
    plain = open_engine(Kernel(engine="transformers", model=str(MODELS / "tiny-lm")))

    engine = opened(tmp_path)

    np.testing.assert_allclose(logits_of(engine), expected, atol=2e-5)
    np.testing.assert_allclose(logits_of(engine, "decode"), expected, atol=2e-5)
    assert np.abs(logits_of(plain) - expected).max() > 0.1  # which the base model does not give


def test_the_weights_are_those_of_model_and_adapter(tmp_path):
    written(tmp_path, **ADAPTERS["attention"])
    plain = open_engine(Kernel(engine="transformers", model=str(MODELS / "tiny-lm"))).describe()

    found = opened(tmp_path).describe()

    own = {name for name in found.tensors if name.startswith("adapter.")}
    assert len(own) == len(load_file(tmp_path / WEIGHTS))
    assert {n: d for n, d in found.tensors.items() if n not in own} == plain.tensors
    with pytest.raises(IdentityError):
        same_policy(plain, found)
    assert same_policy(found, opened(tmp_path).describe()) == "verified"


def test_a_quantised_base_keeps_its_adapter_in_the_dtype(tmp_path):
    expected = written(tmp_path, **ADAPTERS["attention"])

    engine = opened(tmp_path, quantization="int8_weight_only")

    kinds = {type(m).__name__ for n, m in engine.model.named_modules() if ".lora_A." in n}
    assert kinds == {"Linear"}
    assert 0 < np.abs(logits_of(engine) - expected).max() < 0.5
    with pytest.raises(MeasurementError, match="a kernel with the key adapter takes over no"):
        engine.load({"model.norm.weight": torch.ones(8)}.items())


def test_an_adapter_of_another_model_is_refused(tmp_path):
    written(tmp_path, "tiny-qwen3", **ADAPTERS["attention"])

    with pytest.raises(MeasurementError) as error:
        opened(tmp_path)

    assert "the adapter" in str(error.value) and error.value.problems[0].hint


@pytest.mark.parametrize("change", ["renamed", "missing"])
def test_tensors_that_reach_no_layer_are_refused_by_name(tmp_path, change):
    """PEFT would leave the layer as it was initialised, which is the base model."""
    written(tmp_path, **ADAPTERS["attention"])
    tensors = load_file(tmp_path / WEIGHTS)
    first = min(tensors)
    tensor = tensors.pop(first)
    if change == "renamed":
        tensors[first.replace("layers.0", "layers.99")] = tensor
    save_file(tensors, tmp_path / WEIGHTS)

    with pytest.raises(MeasurementError) as error:
        opened(tmp_path)

    says = "layers that the model does not have" if change == "renamed" else "lacks tensors"
    assert says in str(error.value) and "layers." in str(error.value)


def test_an_incomplete_folder_is_refused_with_the_file(tmp_path):
    written(tmp_path, **ADAPTERS["attention"])
    shutil.move(tmp_path / WEIGHTS, tmp_path / "adapter_model.bin")

    with pytest.raises(MeasurementError) as error:
        opened(tmp_path)

    assert str(error.value) == (
        f"the adapter '{tmp_path}' has no adapter_model.safetensors\n"
        "  hint: adapter_model.bin is a pickle and is not read: save it as safetensors"
    )


def test_another_kind_of_adapter_is_refused(tmp_path):
    written(tmp_path, **ADAPTERS["attention"])
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"peft_type": "LOHA"}))

    with pytest.raises(MeasurementError, match="is of type 'LOHA', and only LORA is supported"):
        opened(tmp_path)


def test_engines_without_adapters_refuse_the_key():
    with pytest.raises(MeasurementError) as error:
        open_engine(Kernel(engine="table", model="p.json", adapter="a"))

    assert str(error.value) == (
        "engine 'table' takes no adapter: adapter=a\n"
        "  hint: merge the adapter into the checkpoint, or use engine: transformers or vllm"
    )
