# The laws of engines, held against every real one that has an environment of its own.
#
# The built-in ones are held to them in tests/engines, and so is a served kernel.

import pytest
from scripts.servers import MODEL, local_kernel

from servanda.contract.model import Kernel
from servanda.engines.conformance import check_engine
from servanda.engines.worker import spawn
from tests.real.serving import needs_engines, opened

pytestmark = needs_engines

TEXTS = ["Snow lay on the roofs.", "12+34=", "def f(x):\n", "The list of"]
DRAWS = {
    *("rows_are_those_of_the_batch", "any_batch_can_be_drawn", "misfits_are_refused_by_name"),
    *("draws_follow_the_record", "a_seed_repeats", "batch_mates_do_not_matter"),
    "seconds_are_of_every_token",
}
FILTERS = {"the_record_is_processed", "top_k_of_one_is_greedy", "filtered_tokens_are_not_drawn"}
SCORES = {"scores_are_of_what_was_given", "nothing_scores_as_nothing", "prefill_is_near"}


def kept(engine, **options):
    """Holds an engine to all laws; which of them spoke of it."""
    report = check_engine(engine, TEXTS, sequences=32, width=8, **options)
    return {finding.law for finding in report.those("kept")}


def local(engine, place, python, **kernel):
    told = local_kernel(engine, MODEL, place, python=python, batch_size=8, **kernel)
    return lambda: spawn(Kernel(**told), "infer")


@pytest.mark.parametrize("kernel", [{}, {"quantization": "q8_0"}], ids=["f32", "q8_0"])
def test_llama_cpp_keeps_the_laws(venvs, kernel, tmp_path):
    laws = kept(local("llamacpp", tmp_path, str(venvs / "llamacpp"), **kernel))

    assert laws >= DRAWS | FILTERS | SCORES


def test_vllm_keeps_the_laws(vllm, tmp_path):
    # a second start takes half a minute
    assert kept(local("vllm", tmp_path, vllm), reopen=False) >= DRAWS | FILTERS | SCORES


def test_a_vllm_server_keeps_the_laws(vllm_server):
    """Its logprobs are raw, so filters are refused."""
    assert kept(lambda: opened(vllm_server)) >= DRAWS | SCORES


def test_a_llama_server_keeps_the_laws(llama_server):
    """It has no logprobs of a given text."""
    assert kept(lambda: opened(llama_server)) >= DRAWS | FILTERS


def test_a_served_model_keeps_the_laws(serving_kernel):
    url = serving_kernel(f"transformers:{MODEL}")

    assert kept(lambda: opened(url)) >= DRAWS | FILTERS | SCORES
