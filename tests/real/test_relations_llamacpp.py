# `servanda relations` on a real llama-server: healthy, and with faults in llama.cpp itself.

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest
from scripts import servers

from tests.real.serving import needs_engines
from tests.real.test_relations_vllm import again, relations

pytestmark = needs_engines

ROUNDING = ("--rounding", "float32")
# fault -> the relation that finds it
FAULTS = {"lost_cell": "prefix-cache", "batch": "batching", "lost_block_end": "prompt-length"}


@pytest.fixture(scope="module")
def preload(tmp_path_factory):
    """The library with the faults."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    built = tmp_path_factory.mktemp("faults") / "llama_faults.so"
    source = Path(__file__).with_name("llama_faults.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", built, source, "-ldl"], check=True)
    return built


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny-lm.gguf"
    subprocess.run(servers.gguf_command(path, "f32"), check=True)
    return path


@contextlib.contextmanager
def llama(folder, gguf, **extra):
    port = servers.free_port()
    command = servers.llama_command(port, gguf)
    with servers.running(command, port, folder / "log", extra) as url:
        yield url


def test_a_healthy_server_holds_within_rounding_and_is_undecided_by_bits(tmp_path, gguf):
    with llama(tmp_path, gguf) as url:
        code, seen = relations(url, *ROUNDING)
        open_, bits = relations(url)
    assert code == 0, seen
    assert {r["outcome"] for r in seen.values()} == {"holds", "untestable"}
    assert open_ in (0, 3) and "violated" not in {r["outcome"] for r in bits.values()}


def test_a_real_model_in_4_bits_holds_within_the_rounding_of_its_engine(tmp_path, real_model):
    with llama(tmp_path, real_model / "SmolLM2-135M-Instruct.Q4_1.gguf") as url:
        code, seen = relations(url, "--longest", "96", "--rounding", "8-bit")  # of activations
    assert code == 0, seen
    assert {r["outcome"] for r in seen.values()} == {"holds", "untestable"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_its_relation_and_by_one_command(tmp_path, gguf, preload, fault):
    name = FAULTS[fault]
    extra = {"LD_PRELOAD": str(preload), "LLAMA_FAULT": fault, "LLAMA_VOCAB": "1024"}
    with llama(tmp_path, gguf, **extra) as url:
        code, seen = relations(url, *ROUNDING)
        once_more, alone = again(seen[name])
    assert code == 1 and seen[name]["outcome"] == "violated", seen
    if fault != "batch":  # which requests run together is a race
        assert (once_more, alone[name]["outcome"]) == (1, "violated")
    assert {seen[other]["outcome"] for other in ("replay", "sampling")} == {"holds"}, seen
