# Engines that live in environments of their own: run only when asked for, `make test-engines`.
#
# SERVANDA_VENVS names the folder with the environments, default .venvs.

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from scripts import servers

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config, items):
    asked = any("real" in str(arg) for arg in config.args)
    if not asked:
        reason = pytest.mark.skip(reason="make test-engines")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(reason)


@pytest.fixture(scope="session")
def venvs():
    return Path(os.environ.get("SERVANDA_VENVS", ".venvs")).absolute()


@pytest.fixture(scope="session")
def real_model(venvs):
    """The folder of the real language model, with its GGUF."""
    folder = venvs / "real-model"
    if not (folder / "float32" / "model.safetensors").is_file():
        pytest.skip("the real language model is not here: make real-model")
    return folder


@pytest.fixture(scope="session")
def vllm(venvs):
    """The environment with vLLM, as kernels.*.python names it."""
    return str(venvs / "vllm")


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory):
    """The url of a vLLM in float32, which reports raw logprobs."""
    port, log = servers.free_port(), tmp_path_factory.mktemp("vllm") / "log"
    with servers.running(servers.vllm_command(port), port, log) as url:
        yield url


@pytest.fixture(scope="session")
def llama_server(tmp_path_factory):
    """The url of a llama-server in float32; SERVANDA_GGUF names a file that is there already."""
    folder = tmp_path_factory.mktemp("llamacpp")
    gguf = os.environ.get("SERVANDA_GGUF")
    if gguf is None:
        gguf = folder / "tiny-lm.gguf"
        subprocess.run(servers.gguf_command(gguf, "f32"), check=True)
    port = servers.free_port()
    with servers.running(servers.llama_command(port, gguf), port, folder / "log") as url:
        yield url


@pytest.fixture(scope="session")
def serving_kernel(tmp_path_factory):
    """Starts `servanda tools serve-kernel` of a kernel string, once each, and says where it is."""
    with ExitStack() as stack:
        urls = {}

        def url_of(kernel):
            if kernel not in urls:
                port, log = servers.free_port(), tmp_path_factory.mktemp("kernel") / "log"
                command = servers.kernel_command(port, kernel)
                urls[kernel] = stack.enter_context(servers.running(command, port, log))
            return urls[kernel]

        yield url_of
