# The record from vocabulary shards, against that of whole rows.

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from servanda.theory.sampling import Sampling, columns_of, processed_logprobs
from servanda.theory.vocabulary_shards import columns_of_shards, summary_of, summed_up, sums_of


def summary(shards):
    return summed_up(np.stack([summary_of(*shard) for shard in shards]))


def cut(logits_RV, token_R, cuts):
    edges = [0, *cuts, logits_RV.shape[1]]
    return [(logits_RV[:, start:stop], token_R, start) for start, stop in pairwise(edges)]


@st.composite
def cases(draw):
    """Logits with ties and tokens without mass, one token of each row, and cuts anywhere."""
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    # eighths: two logits that differ still do once a normaliser is taken from both
    values = st.just(-np.inf) | st.integers(-400, 400).map(lambda n: n / 8)
    logits_RV = draw(arrays.arrays(np.float64, shape, elements=values))
    logits_RV[:, draw(st.integers(0, shape[1] - 1))] = 1.0  # some mass
    token_R = np.array([draw(st.integers(0, shape[1] - 1)) for _ in range(shape[0])])
    return logits_RV, token_R, sorted(draw(st.lists(st.integers(0, shape[1]), max_size=4)))


@given(cases())
def test_shards_cut_anywhere_have_the_record_of_the_whole_vocabulary(case):
    logits_RV, token_R, cuts = case
    expected = columns_of(processed_logprobs(logits_RV, Sampling()), token_R)
    shards = cut(logits_RV, token_R, cuts)

    whole = summary(shards)
    found = columns_of_shards(whole, sum(sums_of(*shard, whole) for shard in shards))

    assert found.keys() == expected.keys()
    for name, value_R in expected.items():
        exact = name in ("top1", "rank") or name.startswith("id.")
        error = 0.0 if exact else 1e-12
        np.testing.assert_allclose(found[name], value_R, rtol=error, atol=error, err_msg=name)


@pytest.mark.parametrize("odd", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 3, 5])
def test_a_row_that_no_shard_can_normalise_has_no_finite_normaliser(odd, at):
    logits_RV = np.zeros((2, 6))
    logits_RV[1, at] = odd

    whole = summary(cut(logits_RV, np.array([0, 0]), [2, 4]))

    assert np.isfinite(whole.log_z_R).tolist() == [True, False]


def test_a_row_without_mass_has_no_finite_normaliser():
    whole = summary(cut(np.full((1, 6), -np.inf), np.array([0]), [2, 4]))

    assert not np.isfinite(whole.log_z_R).any()
