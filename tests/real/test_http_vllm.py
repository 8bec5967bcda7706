# A real vLLM behind a socket, against Transformers in float32 on the same weights.

import numpy as np
import pytest
from scripts import servers

from servanda.errors import MeasurementError
from servanda.theory.sampling import Sampling
from tests.real import serving
from tests.real.serving import drawn, furthest, needs_engines, opened, reference

pytestmark = needs_engines


@pytest.fixture(scope="module", params=["raw", "processed"])
def served(request, tmp_path_factory):
    """(url, what its logprobs are) of a server."""
    port = servers.free_port()
    mode = ("--logprobs-mode", f"{request.param}_logprobs")
    log = tmp_path_factory.mktemp("vllm") / "log"
    with servers.running(servers.vllm_command(port, *mode), port, log) as url:
        yield url, request.param


def test_what_vllm_draws_is_what_transformers_scores(served):
    url, meaning = served
    engine = opened(url, logprobs=meaning)
    trace, batch = drawn(engine)

    assert furthest(trace, reference().score(batch, Sampling(), "prefill")) < 1e-4
    assert furthest(trace, engine.score(batch, Sampling(), "prefill")) < 1e-4
    assert (np.diff(trace.best[1]) <= 0).all()
    engine.close()


def test_processed_logprobs_are_those_of_the_filtered_draw(served):
    url, meaning = served
    engine = opened(url, logprobs=meaning)
    sampling = Sampling(temperature=0.7, top_k=5)
    if meaning == "raw":
        with pytest.raises(MeasurementError, match="raw logprobs of drawn tokens"):
            drawn(engine, sampling)
    else:
        trace, batch = drawn(engine, sampling)
        assert furthest(trace, reference().score(batch, sampling, "prefill")) < 1e-4
    engine.close()


def test_the_likeliest_tokens_are_those_of_transformers(served):
    url, meaning = served
    engine = opened(url, logprobs=meaning)
    _, batch = drawn(engine)

    ids_NK, logp_NK = engine.top(batch, "prefill").best

    [*pieces] = reference().logits(batch, "prefill")
    logits_NV = np.concatenate(pieces).astype(np.float64)
    logp_NV = logits_NV - np.logaddexp.reduce(logits_NV, axis=-1, keepdims=True)
    assert np.abs(np.take_along_axis(logp_NV, ids_NK, axis=-1) - logp_NK).max() < 1e-4
    assert np.abs(-np.sort(-logp_NV)[:, :20] - logp_NK).max() < 1e-4
    engine.close()


def test_a_contract_with_vllm_holds(served, tmp_path):
    code, words = serving.checked(served[0], tmp_path)

    assert code == 0, words
