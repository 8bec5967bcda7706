# A checkpoint read without torch is the checkpoint that torch reads.

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines.checkpoint import tensor_digest
from servanda.engines.folder import read_json
from servanda.engines.safetensors import read_stored, weights_digest
from servanda.errors import MeasurementError
from tests.engines.checkpoints import QWEN3 as TIED
from tests.engines.checkpoints import numbers, write_checkpoint, write_safetensors

MODEL = Path(__file__).parents[2] / "models" / "tiny-lm"

VALUES = [0.0, -0.0, 1.0, -2.5, 1e-8, 3.4e38, float("inf"), float("nan"), 1 / 3, 65504.0]


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float64", "int64", "int8", "uint8", "bool"]
)
def test_a_tensor_has_one_digest_with_torch_and_without(tmp_path, dtype):
    write_checkpoint(tmp_path)
    values = torch.tensor([0, 1, 2, 3] if "int" in dtype else VALUES)
    tensors = {
        "flat": values.to(getattr(torch, dtype)),
        "square": values[:4].reshape(2, 2).to(getattr(torch, dtype)).clone(),
        "number": torch.tensor(3).to(getattr(torch, dtype)),
        "none": torch.zeros((0, 2), dtype=getattr(torch, dtype)),
    }
    save_file(tensors, tmp_path / "model.safetensors")

    stored = read_stored(tmp_path)

    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert stored[name].digest == tensor_digest(tensor), name
        assert np.array_equal(
            stored[name].float32(), tensor.to(torch.float32).numpy(), equal_nan=True
        )


def test_the_digest_of_the_weights_is_that_of_the_kernel_that_loads_them():
    engine = open_engine(Kernel(engine="transformers", model=str(MODEL)))

    assert weights_digest(read_stored(MODEL), read_json(MODEL / "config.json")) == (
        engine.describe().weights
    )


def test_a_tied_head_that_was_saved_too_is_the_embedding_once_more(tmp_path):
    tensors = numbers(TIED)
    write_checkpoint(tmp_path, TIED, tensors)
    alone = weights_digest(read_stored(tmp_path), TIED)
    write_checkpoint(
        tmp_path, TIED, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    )

    assert weights_digest(read_stored(tmp_path), TIED) == alone


def broken(data):
    return {
        "its header": (data[:100], "the header of safetensors is not whole"),
        "its last tensor": (data[:-4], "the bytes of tensor 'lm_head.weight' are not whole"),
    }


@pytest.mark.parametrize("lost", [*broken(b"")])
def test_a_file_that_ends_early_is_named(tmp_path, lost):
    write_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    data, says = broken(file.read_bytes())[lost]
    file.write_bytes(data)

    with pytest.raises(MeasurementError) as told:
        read_stored(tmp_path)

    assert str(told.value) == (
        f"'{file}' cannot be read: {says}\n"
        "  hint: copy the folder again, or write it anew with save_pretrained"
    )


def test_a_dtype_that_is_not_read_is_named(tmp_path):
    write_checkpoint(tmp_path)
    eight = {"w": np.zeros(4, np.uint8)}
    write_safetensors(tmp_path / "model.safetensors", eight, {"w": "F8_E4M3"})

    with pytest.raises(MeasurementError, match="tensor 'w' is stored as F8_E4M3, which is not"):
        read_stored(tmp_path)
