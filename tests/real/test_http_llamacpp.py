# A real llama-server behind a socket, against Transformers in float32 on the same weights.
#
# SERVANDA_GGUF names models/tiny-lm as a GGUF of float32; without it one is written.

import os
import subprocess

import pytest
from scripts import servers

from servanda.errors import MeasurementError
from servanda.sampling import Sampling
from tests.real import serving
from tests.real.serving import drawn, furthest, needs_engines, opened, reference

pytestmark = needs_engines


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llamacpp")
    gguf = os.environ.get("SERVANDA_GGUF")
    if gguf is None:
        gguf = folder / "tiny-lm.gguf"
        python = servers.VENVS / "llamacpp" / "bin" / "python"
        write = [python, "-m", "servanda.engines.gguf_file", servers.MODEL, gguf, "f32"]
        subprocess.run(list(map(str, write)), check=True)
    port = servers.free_port()
    command = servers.llama_command(port, gguf)
    with servers.running(command, port, folder / "log") as url:
        yield url


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(temperature=1.3, top_k=5),
        Sampling(top_p=0.9),
        Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02),
    ],
    ids=str,
)
def test_what_llama_server_draws_is_what_transformers_scores(url, sampling):
    """With filters too: its samplers are asked for in the order of our own transform."""
    engine = opened(url)
    trace, batch = drawn(engine, sampling)

    assert furthest(trace, reference().score(batch, sampling, "prefill")) < 1e-4
    engine.close()


def test_a_prompt_is_not_scored(url):
    engine = opened(url)
    _, batch = drawn(engine)

    with pytest.raises(MeasurementError, match="cannot score given tokens"):
        engine.score(batch, Sampling(), "prefill")
    engine.close()


def test_a_contract_with_llama_server_holds(url, tmp_path):
    code, words = serving.checked(url, tmp_path)

    assert code == 0, words
