# What engine `llamacpp` reads and refuses without llama.cpp; what it computes is in tests/real.

import sys
from types import SimpleNamespace

import gguf
import pytest
from scripts.export_gguf import CONVERTER, write_gguf

from servanda.contract.identity import Description, same_policy
from servanda.contract.model import Kernel
from servanda.engines import llamacpp, open_engine
from servanda.engines.folder import file_digest
from servanda.engines.llamacpp import KIND_OF, QUANTIZED, kind_of, llama, refuse_other_kind
from servanda.engines.safetensors import read_stored, weights_digest
from servanda.errors import MeasurementError
from tests.engines.checkpoints import LLAMA, write_checkpoint


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
        "  hint: it has q8_0, q4_0, q4_1, q4_k_m; leave the key out for none"
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
        "  hint: engine 'llamacpp' runs files of f32, f16, bf16, q8_0, q4_0, q4_1, q4_k_m"
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
    write_checkpoint(tmp_path / "m")

    with pytest.raises(MeasurementError, match="cannot import llama-cpp-python"):
        write_gguf(tmp_path / "m", tmp_path / "m.gguf", "q8_0")

    assert not [*tmp_path.glob("*.gguf"), *tmp_path.glob(".m*")]


def test_a_folder_without_a_gguf_file_or_with_several_is_refused(tmp_path):
    write_checkpoint(tmp_path / "m")
    assert said(model=str(tmp_path / "m")) == (
        f"llama.cpp reads GGUF files, and '{tmp_path / 'm'}' holds none\n"
        "  hint: convert the checkpoint with llama.cpp's convert_hf_to_gguf.py, and name the file "
        "or its folder"
    )
    for kind in ("f32", "f16"):
        write_gguf(tmp_path / "m", tmp_path / "m" / f"m-{kind}.gguf", kind)
    assert said(model=str(tmp_path / "m")) == (
        f"'{tmp_path / 'm'}' holds several .gguf files: m-f16.gguf, m-f32.gguf\n"
        "  hint: name one of them"
    )
    assert said(model=str(tmp_path / "elsewhere")) == (
        f"the model '{tmp_path / 'elsewhere'}' does not exist\n"
        "  hint: name a .gguf file, or a folder that holds one"
    )
    assert said(model=str(tmp_path / "m" / "m-f8.gguf")) == (
        f"the model '{tmp_path / 'm' / 'm-f8.gguf'}' does not exist\n"
        f"  hint: did you mean '{tmp_path / 'm' / 'm-f32.gguf'}'?"
    )


class Held:
    """A model in memory, as far as it describes itself."""

    vocab_size, context, ends = 12, 64, (0, 3)

    def __init__(self, file, cache, flash):
        reader = gguf.GGUFReader(file)
        self.told = {key: reader.get_field(key).contents() for key in reader.fields}
        self.kind = self.told["general.file_type"]

    def metadata(self, key):
        value = self.told.get(key, "")
        return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.fixture
def held(monkeypatch):
    bindings = SimpleNamespace(
        llama_ftype_name={0: b"all F32", 1: b"F16"}.get,
        llama_version=lambda: b"b1",
        llama_print_system_info=lambda: b"cpu",
    )
    monkeypatch.setattr(llamacpp, "LlamaModel", Held)
    monkeypatch.setattr(llamacpp, "llama", lambda: bindings)
    monkeypatch.setattr(llamacpp, "version", lambda _: "0")


def test_a_file_is_derived_from_the_weights_that_it_names_or_else_declared(tmp_path, held):
    write_checkpoint(tmp_path / "m")
    write_gguf(tmp_path / "m", tmp_path / "m.gguf", "f32")
    weights = weights_digest(read_stored(tmp_path / "m"), LLAMA)
    train = Description({}, {}, "", 0, (), weights_from=weights)

    def described(**kernel):
        return open_engine(Kernel(engine="llamacpp", model=str(tmp_path), **kernel)).describe()

    derived = described()
    assert (derived.weights, same_policy(train, derived)) == (weights, "derived")
    assert derived.fingerprint["converter"] == CONVERTER
    assert derived.fingerprint["file"] == file_digest(tmp_path / "m.gguf")
    with pytest.raises(MeasurementError, match=rf"was made from weights {weights[:8]}, and"):
        described(weights_from="0" * 32)

    bare = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")  # as another converter leaves it
    bare.add_file_type(0)
    bare.write_header_to_file()
    bare.write_kv_data_to_file()
    bare.close()
    found = described()
    assert (found.weights, found.tokens, same_policy(train, found)) == ("", "", "declared")
    assert found.fingerprint["converter"] == "unknown"
    assert described(weights_from=weights).weights == weights
