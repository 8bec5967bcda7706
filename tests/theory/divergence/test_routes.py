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


def drift(train, infer):
    sides = {"gates_train": np.array(train, float), "gates_infer": np.array(infer, float)}
    return sampled("gate_drift", sides).tolist()


gate = st.floats(1e-3, 10)
side = st.lists(
    st.dictionaries(st.integers(0, 4), gate, min_size=2, max_size=2), min_size=3, max_size=3
)


@given(side, side)
def test_gate_drift_is_half_of_all_differences_of_the_shares(train, infer):
    apart = []
    for a, b in zip(train, infer, strict=True):
        shares = [[gates.get(e, 0) / sum(gates.values()) for e in range(5)] for gates in (a, b)]
        apart.append(sum(abs(p - q) for p, q in zip(*shares, strict=True)) / 2)
    assert drift(
        [[[*gates.items()] for gates in train]], [[[*gates.items()] for gates in infer]]
    ) == ([pytest.approx(sum(apart) / 3, abs=1e-12)])


@given(side, st.floats(0.1, 10))
def test_gates_without_drift_have_no_other_value_whatever_their_order_and_scale(gates, scale):
    ours = [[*layer.items()] for layer in gates]
    assert drift([ours], [ours]) == [0]
    theirs = [[(e, w * scale) for e, w in reversed(layer)] for layer in ours]
    assert drift([ours], [theirs]) == pytest.approx([0], abs=1e-12)


@pytest.mark.parametrize("weights", [(0, 0), (2, -1), (np.nan, 1)])
def test_weights_that_are_no_shares_have_no_value(weights):
    ours = [[list(zip(range(2), weights, strict=True))]]
    assert np.isnan(drift(ours, ours)).all()


def test_a_route_that_one_side_did_not_record_has_no_value():
    infer = np.zeros((2, LAYERS, EXPERTS)) + np.arange(EXPERTS)
    train = infer.copy()
    train[1, 2, 0] = np.nan
    for name in ("router_flip", "router_distance", "router_touched"):
        assert values(name, train, infer)[0] == 0 and np.isnan(values(name, train, infer)[1])
    known, unknown = drift(*(np.stack([side, np.ones_like(side)], -1) for side in (train, infer)))
    assert known == 0 and np.isnan(unknown)


def test_routes_of_two_models_are_refused():
    with pytest.raises(ValueError, match=r"routes of \(1, 3, 2\) and of \(1, 4, 2\)"):
        values("router_flip", np.zeros((1, 3, 2)), np.zeros((1, 4, 2)))
    with pytest.raises(ValueError, match=r"routes of \(1, 3, 2\) and of \(1, 4, 2\)"):
        drift(np.ones((1, 3, 2, 2)), np.ones((1, 4, 2, 2)))
