# Tests of the real language model that `make real-model` converts: only when asked for, with
# `make test-real-model`.  SERVANDA_REAL_MODEL names its folder, default .venvs/real-model.

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOLDER = Path(os.environ.get("SERVANDA_REAL_MODEL", HERE.parents[1] / ".venvs" / "real-model"))


def pytest_collection_modifyitems(config, items):
    asked = any("real_model" in str(arg) for arg in config.args)
    reason = "the real language model is not here: make real-model"
    if not asked:
        reason = "make test-real-model"
    elif (FOLDER / "float32" / "model.safetensors").is_file():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def folder():
    """The folder of the model; one thread of torch."""
    import torch

    torch.set_num_threads(1)
    return FOLDER.absolute()


@pytest.fixture(scope="session")
def model(folder):
    return loaded(folder / "float32", "float32")


@pytest.fixture(scope="session")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "float32")


def loaded(folder, dtype, **options):
    import torch
    from transformers import AutoModelForCausalLM

    from servanda.engines.checkpoint import quiet

    with quiet():
        dtype = getattr(torch, dtype)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()
