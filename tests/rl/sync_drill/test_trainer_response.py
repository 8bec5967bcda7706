# What a sync rounds to by mistake, seen through the error of an engine of few bits.

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from servanda.rl.sync_drill.response_slope import response_slope  # noqa: E402
from servanda.rl.sync_drill.trainer_response import cast_of  # noqa: E402


class Linear:
    """Weights of a layer whose outputs are the scores."""

    def __init__(self, tokens=640, width=64):
        rng = np.random.default_rng(0)
        self.kept = {"w": torch.tensor(rng.normal(size=width))}
        self.parameters = {"w": self.kept["w"].clone()}
        self.x_NW = rng.standard_t(3, (tokens, width))

    def cast(self, name):
        self.parameters["w"].copy_(self.kept["w"].to(getattr(torch, name)).to(self.kept["w"].dtype))

    def settle(self, names):
        for name in names:
            self.parameters[name].copy_(self.kept[name])

    def scores(self):
        return self.x_NW @ self.parameters["w"].numpy()


@pytest.mark.parametrize("other", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_a_cast_is_seen_beside_an_error_that_is_larger_than_it(name, other):
    weights = Linear()
    logp_N = weights.scores()
    kept = weights.kept["w"]
    weights.parameters["w"].copy_(kept.to(getattr(torch, name)).to(kept.dtype))
    rounding_N = weights.scores() - logp_N
    weights.settle(["w"])
    noise_N = np.random.default_rng(1).normal(size=len(logp_N)) * other * rounding_N.std()

    assert cast_of(weights, rounding_N + noise_N, logp_N, weights.scores) == name
    assert cast_of(weights, noise_N, logp_N, weights.scores) == ""
    if other > 2:  # as an engine of four bits has it: the slope is known to a tenth, no better
        assert response_slope(rounding_N, rounding_N + noise_N).spread > 0.1
