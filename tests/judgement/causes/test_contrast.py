# Where the drift sits: the edge that was put there is the edge that is found.

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.judgement.causes.drift_location import FIELDS, contrast, parted
from servanda.judgement.token_profile import EDGES, Portrait, Sums

edges = st.sampled_from([(f, i) for f in FIELDS for i in range(len(EDGES[f]))])


def portrait(field, means, n=1000):
    return Portrait(by={field: tuple(Sums(n=n, tv=n * m) for m in means)})


def stepped(field, at, low, high, above=True):
    means = [low if (i <= at) == above else high for i in range(len(EDGES[field]) + 1)]
    return portrait(field, means)


@given(edges, st.booleans())
def test_a_step_is_found_where_it_is(edge, above):
    field, at = edge
    found = contrast(stepped(field, at, 0.002, 0.1, above))
    assert (found.field, found.edge, found.above) == (field, EDGES[field][at], above)
    assert found.ratio == pytest.approx(50)


def test_the_deviance_is_that_of_two_poisson_means():
    found = contrast(stepped("position", 6, 0.01, 0.05))
    a, b = 7 * 10.0, 8 * 50.0  # sums of TV; 7,000 and 8,000 tokens
    mean = (a + b) / 15000
    expected = 2 * (a * math.log(0.01 / mean) + b * math.log(0.05 / mean))
    assert found.deviance == pytest.approx(expected)


def test_where_bins_are_empty_the_edge_is_nearest_to_what_drifts():
    bins = [Sums()] * (len(EDGES["prompt_tokens"]) + 1)
    bins[3], bins[6] = Sums(n=5000, tv=10.0), Sums(n=1000, tv=170.0)
    found = contrast(Portrait(by={"prompt_tokens": tuple(bins)}))
    assert found.words == "prompts of about 512 tokens and more"
    bins[3], bins[6] = bins[6], bins[3]
    found = contrast(Portrait(by={"prompt_tokens": tuple(bins)}))
    assert found.words == "prompts of fewer than about 128 tokens"


@pytest.mark.parametrize("field", FIELDS)
def test_what_is_flat_has_no_contrast(field):
    assert contrast(portrait(field, [0.01] * (len(EDGES[field]) + 1))) is None


def test_noise_has_no_contrast():
    rng = np.random.default_rng(3)
    for _ in range(50):
        tv = rng.exponential(0.01, size=(len(EDGES["position"]) + 1, 200)).clip(max=1).sum(axis=1)
        bins = tuple(Sums(n=200, tv=float(t)) for t in tv)
        assert contrast(Portrait(by={"position": bins})) is None


def test_a_few_tokens_are_no_contrast():
    bins = [Sums(n=5000, tv=5.0)] + [Sums()] * len(EDGES["position"])
    bins[-1] = Sums(n=20, tv=20.0)
    assert contrast(Portrait(by={"position": tuple(bins)})) is None


def test_what_was_sampled_is_not_searched():
    assert contrast(stepped("probability", 3, 0.001, 0.5)) is None
    assert contrast(Portrait()) is None


def test_drift_on_one_side_only_is_an_infinite_ratio():
    assert contrast(stepped("entropy_nats", 4, 0.0, 0.1)).ratio == math.inf


def test_other_tokens_are_parted_at_the_same_edge():
    found = contrast(stepped("position", 6, 0.01, 0.05))
    assert parted(stepped("position", 6, 0.001, 0.003), found) == pytest.approx(3)
    assert parted(stepped("position", 6, 0.0, 0.003), found) is None
    assert parted(Portrait(), found) is None
