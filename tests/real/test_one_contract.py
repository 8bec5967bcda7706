# One contract of examples/, unchanged but for its `infer:` line, on every real engine.

import json
import re
import subprocess
import sys

import pytest
from scripts.servers import MODEL, ROOT, local_kernel

from tests.real.serving import needs_engines

pytestmark = needs_engines

NAME = "tiny-engines.kernelcontract.yaml"
TEXT = (ROOT / "examples" / NAME).read_text(encoding="utf-8")
LINE = re.compile(r"^  infer: .*$", re.MULTILINE)
# llama-server has no logprobs of a given text: the contract without its golden texts
DRAWN_ALONE = re.sub(r"^golden: .*\n|^numerical:\n(?:  .*\n)+", "", TEXT, flags=re.MULTILINE)

LOCAL = {
    "transformers bfloat16": {"engine": "transformers", "dtype": "bfloat16"},
    "onnxruntime float32": {"engine": "onnxruntime"},
    "onnxruntime int8": {"engine": "onnxruntime", "quantization": "int8_dynamic"},
    "llamacpp float16": {"engine": "llamacpp", "dtype": "float16"},
    "llamacpp q8_0": {"engine": "llamacpp", "quantization": "q8_0"},
    "vllm bfloat16": {"engine": "vllm", "dtype": "bfloat16"},
}
BFLOAT16 = f"transformers:{MODEL}@bfloat16"


@pytest.fixture
def check(tmp_path):
    """Runs the contract with another `infer:` line: exit code, and all that was said."""
    for folder in ("models", "data"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "examples").mkdir()

    def checked(kernel, text=TEXT):
        text, edits = LINE.subn(f"  infer: {json.dumps(kernel)}", text)
        assert edits == 1
        path = tmp_path / "examples" / NAME
        path.write_text(text, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "servanda", "check", path, "--run-dir", tmp_path / "run"],
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    return checked


@pytest.fixture
def local(tmp_path, venvs):
    """A kernel of an engine in its environment, on the file that it reads."""

    def kernel_of(engine, **kernel):
        python = {"python": str(venvs / engine)} if engine in ("llamacpp", "vllm") else {}
        return local_kernel(engine, MODEL, tmp_path, **python, **kernel)

    return kernel_of


def served(url):
    return {"engine": "openai_http", "url": url}


@pytest.mark.parametrize("kernel", LOCAL.values(), ids=LOCAL)
def test_the_contract_holds_on_an_engine_in_its_environment(check, local, kernel):
    code, words = check(local(**kernel))

    assert code == 0, words
    assert "HOLDS: 6 of 6 enforced cells" in words


def test_the_contract_holds_on_a_vllm_server(check, vllm_server):
    code, words = check(served(vllm_server))

    assert code == 0, words
    assert "HOLDS: 6 of 6 enforced cells" in words


def test_the_contract_holds_on_a_served_kernel(check, serving_kernel):
    code, words = check(served(serving_kernel(BFLOAT16)))

    assert code == 0, words
    assert "HOLDS: 6 of 6 enforced cells" in words
    assert "weights derived" in words


def test_golden_texts_are_refused_on_a_llama_server(check, llama_server):
    code, words = check(served(llama_server))

    assert code == 4, words
    assert "the infer engine cannot give full logits, which `numerical` needs" in words
    assert "leave out `golden:` and the numerical section" in words


def test_what_a_llama_server_draws_holds(check, llama_server):
    code, words = check(served(llama_server), DRAWN_ALONE)

    assert code == 0, words
    assert "HOLDS: 5 of 5 enforced cells" in words


def test_four_bits_break_a_tighter_limit(check, local):
    tighter = TEXT.replace(
        "tv, aggregate: mean, at_most: 0.05", "tv, aggregate: mean, at_most: 0.004"
    )
    code, words = check(local("llamacpp", quantization="q4_k_m"), tighter)

    assert code == 1, words
    assert "VIOLATED: tv on all." in words


def test_a_temperature_that_a_served_kernel_hides_is_found(check, serving_kernel):
    kernel = f"{BFLOAT16},fault=undisclosed_temperature:0.7"
    code, words = check(served(serving_kernel(kernel)))

    assert code == 1, words
    assert "VIOLATED: fidelity on all" in words
