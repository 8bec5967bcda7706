# What engine `llamacpp` refuses before llama.cpp is there; what it computes is in tests/real.

import sys

import pytest

from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines.llama_model import llama
from servanda.engines.llamacpp import KIND_OF, QUANTIZED, kind_of, refuse_other_kind
from servanda.errors import MeasurementError
from tests.engines.checkpoints import write_checkpoint


def said(**kernel):
    with pytest.raises(MeasurementError) as told:
        open_engine(Kernel(engine="llamacpp", **kernel))
    return str(told.value)


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    llama.cache_clear()
    yield
    llama.cache_clear()


def test_a_kernel_runs_the_file_of_its_quantization_or_else_of_its_dtype():
    for dtype, kind in KIND_OF.items():
        assert kind_of(Kernel(engine="llamacpp", dtype=dtype)) == kind
    for kind in QUANTIZED:
        assert kind_of(Kernel(engine="llamacpp", dtype="float16", quantization=kind)) == kind


def test_a_precision_that_is_not_of_gguf_is_refused_before_anything_is_read():
    assert said(model="nowhere", quantization="int4_g32") == (
        "engine 'llamacpp' has no quantization 'int4_g32'\n"
        "  hint: it has q8_0, q4_0, q4_k_m; leave the key out for none"
    )
    assert said(model="nowhere", dtype="float64") == (
        "engine 'llamacpp' has no dtype 'float64'\n  hint: it has float32, float16, bfloat16"
    )


def test_a_file_that_holds_something_else_is_refused_with_what_to_write(tmp_path):
    def told(found, kind):
        with pytest.raises(MeasurementError) as refused:
            refuse_other_kind(tmp_path / "m.gguf", found, kind)
        return str(refused.value).replace(str(tmp_path), "")

    refuse_other_kind(tmp_path / "m.gguf", "q8_0", "q8_0")
    assert told("q8_0", "f32") == (
        "'/m.gguf' holds q8_0, and the kernel's dtype says f32\n"
        "  hint: write quantization: q8_0 for this file, or name one that holds f32"
    )
    assert told("f16", "q8_0") == (
        "'/m.gguf' holds f16, and the kernel's quantization says q8_0\n"
        "  hint: write dtype: float16 for this file, or name one that holds q8_0"
    )
    assert told("iq2_xs", "q8_0") == (
        "'/m.gguf' holds iq2_xs, and the kernel's quantization says q8_0\n"
        "  hint: engine 'llamacpp' runs files of f32, f16, bf16, q8_0, q4_0, q4_k_m"
    )


def test_without_llama_cpp_the_next_move_is_to_install_it(tmp_path, nothing_installed):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")

    text = said(model=str(tmp_path / "m.gguf"))

    assert text.startswith("engine 'llamacpp' cannot import llama-cpp-python: No module named")
    assert text.endswith(
        "hint: pip install 'servanda[llamacpp]' into the environment that runs it, and name it "
        "as kernels.*.python"
    )


def test_quantising_needs_llama_cpp_too(tmp_path, nothing_installed):
    from servanda.engines.gguf_export import write_gguf

    write_checkpoint(tmp_path / "m")

    with pytest.raises(MeasurementError, match="cannot import llama-cpp-python"):
        write_gguf(tmp_path / "m", tmp_path / "m.gguf", "q8_0")

    assert not [*tmp_path.glob("*.gguf"), *tmp_path.glob(".m*")]


def test_a_folder_that_is_not_there_is_named_as_for_every_engine(tmp_path):
    assert said(model=str(tmp_path / "m")) == (
        f"the model folder '{tmp_path / 'm'}' does not exist\n"
        "  hint: name a folder, or a model of the Hub as hf://ORGANISATION/NAME"
    )
