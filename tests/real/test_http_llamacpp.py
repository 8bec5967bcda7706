# A real llama-server behind a socket, against Transformers in float32 on the same weights.

import pytest

from servanda.errors import MeasurementError
from servanda.theory.sampling import Sampling
from tests.real import serving
from tests.real.serving import drawn, furthest, needs_engines, opened, reference

pytestmark = needs_engines


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
def test_what_llama_server_draws_is_what_transformers_scores(llama_server, sampling):
    """With filters too: its samplers are asked for in the order of our own transform."""
    engine = opened(llama_server)
    trace, batch = drawn(engine, sampling)

    assert furthest(trace, reference().score(batch, sampling, "prefill")) < 1e-4
    engine.close()


def test_a_prompt_is_not_scored(llama_server):
    engine = opened(llama_server)
    _, batch = drawn(engine)

    with pytest.raises(MeasurementError, match="cannot score given tokens"):
        engine.score(batch, Sampling(), "prefill")
    engine.close()


def test_a_contract_with_llama_server_holds(llama_server, tmp_path):
    code, words = serving.checked(llama_server, tmp_path)

    assert code == 0, words
