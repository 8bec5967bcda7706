# Models by their names on the Hub, from a cache in the layout that huggingface_hub writes.

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from servanda.contract.kernel_string import hub_parts, kernel_string, parse_kernel
from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines.folder import DOWNLOAD, checkpoint_folder
from servanda.errors import ContractError, MeasurementError
from servanda.runner.load import load
from tests.test_command_line import servanda

pytest.importorskip("huggingface_hub")
TINY = Path(__file__).parents[2] / "models" / "tiny-lm"
COMMIT, OLDER = "0123456789abcdef0123456789abcdef01234567", "f" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Blobs, links to them, and refs; main is COMMIT and v1 is OLDER."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))  # of a worker
    monkeypatch.delenv(DOWNLOAD, raising=False)
    place = tmp_path / "models--org--tiny"
    (place / "blobs").mkdir(parents=True)
    (place / "refs").mkdir()
    for name, commit in (("main", COMMIT), ("v1", OLDER)):
        (place / "refs" / name).write_text(commit)
        snapshot = place / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for file in TINY.iterdir():
            blob = place / "blobs" / f"{commit[:4]}-{file.name}"
            shutil.copy(file, blob)
            (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return place


@pytest.mark.parametrize(
    ("name", "commit"),
    [
        ("hf://org/tiny", COMMIT),
        ("hf://org/tiny@main", COMMIT),
        ("hf://org/tiny@v1", OLDER),
        (f"hf://org/tiny@{OLDER}", OLDER),
    ],
)
def test_a_name_is_the_folder_of_its_commit(cache, name, commit):
    assert checkpoint_folder(name) == cache / "snapshots" / commit


def test_a_model_by_its_name_is_the_model_of_the_folder(cache):
    by_name = open_engine(Kernel(engine="transformers", model="hf://org/tiny@v1"))
    by_path = open_engine(Kernel(engine="transformers", model=str(TINY)))

    assert by_name.describe().tensors == by_path.describe().tensors
    assert by_name.describe().fingerprint["revision"] == OLDER
    assert "revision" not in by_path.describe().fingerprint


@pytest.mark.slow
def test_a_contract_and_a_comparison_take_names(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": "1+1="}\n')
    options = ("--prompts", "prompts.jsonl", "--save-contract", "c.yaml", "--quiet", "--plan")
    kernels = ("transformers:hf://org/tiny@v1", "transformers:hf://org/tiny@bfloat16")

    done = servanda("compare", *kernels, *options)

    assert done.exit_code == 0, done.output
    kernels = load("c.yaml").kernels
    assert (kernels.train.model, kernels.infer.model) == ("hf://org/tiny@v1", "hf://org/tiny")


@pytest.mark.parametrize(
    ("text", "model", "dtype", "quantization"),
    [
        ("hf://org/tiny", "hf://org/tiny", "float32", None),
        ("hf://org/tiny@v1", "hf://org/tiny@v1", "float32", None),
        ("hf://org/tiny@bfloat16", "hf://org/tiny", "bfloat16", None),
        ("hf://org/tiny@v1@bfloat16+w8a8", "hf://org/tiny@v1", "bfloat16", "w8a8"),
        ('"hf://org/tiny@bfloat16"', "hf://org/tiny@bfloat16", "float32", None),
    ],
)
def test_a_kernel_string_tells_a_revision_from_a_dtype(text, model, dtype, quantization):
    kernel = parse_kernel(f"transformers:{text}", engines=["transformers"])

    assert (kernel.model, kernel.dtype, kernel.quantization) == (model, dtype, quantization)
    assert parse_kernel(kernel_string(kernel), engines=["transformers"]) == kernel


def test_a_wrong_dtype_after_a_revision_is_a_wrong_dtype():
    with pytest.raises(ContractError, match="no dtype is named 'bf16'"):
        parse_kernel("transformers:hf://org/tiny@v1@bf16", engines=["transformers"])


def test_what_is_not_cached_is_refused_with_what_there_is_and_the_command(cache):
    with pytest.raises(MeasurementError) as error:
        checkpoint_folder("hf://org/tiny@v2")

    assert str(error.value) == (
        f"'hf://org/tiny@v2' is not in the Hub's cache {cache.parent}, which has of it main, v1, "
        "0123456789ab, ffffffffffff\n"
        "  hint: run hf download org/tiny --revision v2, or set SERVANDA_HUB_DOWNLOAD=1 to let "
        "Servanda download it"
    )
    with pytest.raises(MeasurementError, match=r"cache \S+\n  hint: run hf download org/other, or"):
        checkpoint_folder("hf://org/other")


def test_a_download_that_is_not_complete_is_refused_with_the_missing_files(cache):
    snapshot = cache / "snapshots" / COMMIT
    shards = {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))

    with pytest.raises(MeasurementError) as error:
        checkpoint_folder("hf://org/tiny")

    assert str(error.value) == (
        f"the model folder '{snapshot}' has no model-00001.safetensors, model-00002.safetensors\n"
        f"  hint: the download is not complete: run hf download org/tiny --revision {COMMIT}"
    )


def test_a_download_that_fails_says_why(cache, monkeypatch):
    """There is no network here, or no such repository: either way the reason is shown."""
    monkeypatch.setenv(DOWNLOAD, "1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")

    with pytest.raises(MeasurementError, match="'hf://org/other' could not be downloaded: ") as at:
        checkpoint_folder("hf://org/other")
    assert at.value.problems[0].hint == "try hf download org/other, whose cache is read here"


def test_with_the_hub_offline_nothing_is_asked_for(cache, monkeypatch):
    monkeypatch.setenv(DOWNLOAD, "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(MeasurementError, match="'hf://org/other' is not in the Hub's cache"):
        checkpoint_folder("hf://org/other")


@pytest.mark.parametrize("name", ["hf://tiny", "hf://", "hf://a/b/c", "hf://a/b@", "hf://a/b@c@d"])
def test_another_form_of_name_is_refused(name):
    assert hub_parts(name) is None
    with pytest.raises(MeasurementError, match="is no name of a model on the Hub"):
        checkpoint_folder(name)
