# The laws of engines, held against every real one that has an environment of its own.
#
# The built-in ones are held to them in tests/engines, and so is a served kernel.

import pytest
from scripts.servers import MODEL

from servanda.contract import Kernel
from servanda.engines.worker import spawn
from servanda.testing import check_engine
from tests.real.serving import needs_engines, opened

pytestmark = needs_engines

TEXTS = ["Snow lay on the roofs.", "12+34=", "def f(x):\n", "The list of"]
LESS = {"sequences": 32, "width": 8}


def kept(engine, texts=None, **options):
    """Holds an engine to all laws; what was skipped, and why."""
    report = check_engine(engine, texts, **LESS | options)
    return {f.law: f.said.partition(":")[0] for f in report.those("skipped")}


def local(engine, python, **kernel):
    told = Kernel(engine=engine, model=str(MODEL), python=python, batch_size=8, **kernel)
    return lambda: spawn(told, "infer")


@pytest.mark.parametrize("kernel", [{}, {"quantization": "q8_0"}], ids=["f32", "q8_0"])
def test_llama_cpp_keeps_the_laws(venvs, kernel, tmp_path, monkeypatch):
    monkeypatch.setenv("SERVANDA_CACHE", str(tmp_path))
    print(kept(local("llamacpp", str(venvs / "llamacpp"), **kernel), TEXTS))


def test_vllm_keeps_the_laws(vllm):
    print(kept(local("vllm", vllm), TEXTS, reopen=False))


def test_a_vllm_server_keeps_the_laws(vllm_server):
    print(kept(lambda: opened(vllm_server), TEXTS))


def test_a_llama_server_keeps_the_laws(llama_server):
    print(kept(lambda: opened(llama_server), TEXTS))


def test_a_served_model_keeps_the_laws(serving_kernel):
    url = serving_kernel(f"transformers:{MODEL}")
    print(kept(lambda: opened(url), TEXTS))
