# Metrics on routes of experts, against sets in plain Python.

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.theory.divergence.base import sampled

LAYERS, EXPERTS = 3, 2
route = st.lists(st.integers(0, 4), min_size=EXPERTS, max_size=EXPERTS, unique=True)
routes = st.lists(st.lists(route, min_size=LAYERS, max_size=LAYERS), min_size=1, max_size=5)


def values(name, train, infer):
    columns = {"routes_train": np.array(train, float), "routes_infer": np.array(infer, float)}
    return sampled(name, columns).tolist()


@given(routes, st.randoms(use_true_random=False))
def test_they_are_those_of_the_sets_of_each_layer(infer, random):
    train = [[random.sample(range(5), EXPERTS) for _ in token] for token in infer]
    pairs = [
        [(set(a), set(b)) for a, b in zip(x, y, strict=True)]
        for x, y in zip(train, infer, strict=True)
    ]
    flips = [sum(a != b for a, b in layers) / LAYERS for layers in pairs]
    missing = [sum(len(b - a) / EXPERTS for a, b in layers) / LAYERS for layers in pairs]

    assert values("router_flip", train, infer) == pytest.approx(flips)
    assert values("router_distance", train, infer) == pytest.approx(missing)
    assert values("router_touched", train, infer) == [float(share > 0) for share in flips]


def test_a_route_that_one_side_did_not_record_has_no_value():
    infer = np.zeros((2, LAYERS, EXPERTS)) + np.arange(EXPERTS)
    train = infer.copy()
    train[1, 2, 0] = np.nan
    for name in ("router_flip", "router_distance", "router_touched"):
        assert values(name, train, infer)[0] == 0 and np.isnan(values(name, train, infer)[1])


def test_routes_of_two_models_are_refused():
    with pytest.raises(ValueError, match=r"routes of \(1, 3, 2\) and of \(1, 4, 2\)"):
        values("router_flip", np.zeros((1, 3, 2)), np.zeros((1, 4, 2)))
