# Applied weights: the declared ones never differ, in any precision; others do, and are named.

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servanda.theory.bounds.applied_weights import Applied, differing, ends, error_of, fits
from servanda.theory.bounds.importance_weights import PSI
from servanda.theory.divergence.precision import rounded
from tests.drawn import examples

WEIGHTINGS = {
    "naive": PSI["naive"](),
    "is": PSI["is"](),
    "tis": PSI["tis"](1.5),
    "mis": PSI["mis"]((0.5, 2.0)),
    "reject": PSI["reject"]((0.8, 1.25)),
    "clip": PSI["clip"](0.2),
}
LENGTH = 64


def logprobs(seed, noise, size=32):
    """float32 logprobs of sequences of LENGTH tokens, one after another."""
    rng = np.random.default_rng(seed)
    infer_N = -rng.exponential(1.0, size * LENGTH).astype(np.float32)
    train_N = infer_N + rng.normal(0, noise, len(infer_N)).astype(np.float32)
    return np.minimum(train_N, 0).astype(np.float32), infer_N, np.repeat(np.arange(size), LENGTH)


def applied(train_N, infer_N, sequence_N, factor_N, mask_N=None):
    train_N, infer_N = train_N.astype(np.float64), infer_N.astype(np.float64)
    error_N = error_of(train_N, infer_N)
    return Applied.of(train_N - infer_N, error_N, factor_N, mask_N, sequence_N)


def computed(train_N, infer_N, psi, precision):
    """psi(w) as a loss of this precision computes it, each operation rounded."""

    def kept(values):
        return rounded(np.asarray(values, dtype=np.float64), precision)

    ratio_N = kept(kept(train_N) - kept(infer_N))
    return kept(psi.weight(kept(np.exp(ratio_N))))


@settings(max_examples=examples(60))
@given(
    name=st.sampled_from([*WEIGHTINGS]),
    precision=st.sampled_from(["float32", "bfloat16", "float16"]),
    noise=st.sampled_from([0.0, 1e-6, 1e-3, 0.02, 0.3]),
    seed=st.integers(0, 1000),
)
def test_the_declared_weights_never_differ_in_any_precision(name, precision, noise, seed):
    train_N, infer_N, sequence_N = logprobs(seed, noise)
    # a half-precision loss has logprobs of that precision, and they are what is recorded
    train_N, infer_N = (rounded(of.astype(np.float64), precision) for of in (train_N, infer_N))
    psi = WEIGHTINGS[name]
    factor_N = computed(train_N, infer_N, psi, precision)

    compared_N, differing_N = differing(applied(train_N, infer_N, sequence_N, factor_N), psi)

    assert compared_N.all()
    assert not differing_N.any()


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 1000), cap=st.floats(1.05, 3.0))
def test_exactly_the_tokens_beyond_the_cap_differ_if_it_was_not_applied(seed, cap):
    train_N, infer_N, sequence_N = logprobs(seed, 0.4)
    w_N = np.exp(train_N - infer_N)  # in float32
    beyond_N = w_N > cap * (1 + 1e-4)
    near_N = ~beyond_N & (w_N > cap * (1 - 1e-4))

    _, differing_N = differing(applied(train_N, infer_N, sequence_N, w_N), PSI["tis"](cap))

    assert differing_N[beyond_N].all()
    assert not differing_N[~beyond_N & ~near_N].any()


@settings(max_examples=examples(60))
@given(
    name=st.sampled_from([*WEIGHTINGS]),
    log_w=st.floats(-3, 3),
    error=st.sampled_from([0.0, 1e-6, 0.01, 0.2]),
)
def test_the_ends_are_those_of_every_weight_that_rounding_can_make(name, log_w, error):
    """Against every weight of a fine grid of the interval, and the bends in it."""
    psi, unit = WEIGHTINGS[name], 2.0**-24
    low, high = (end[0] for end in ends(np.array([log_w]), np.array([error]), unit, psi))
    first, last = np.exp(log_w - error), np.exp(log_w + error)
    bends = [b for b in psi.bends if first <= b <= last]
    every = psi.weight(np.array([*np.linspace(first, last, 501), *bends]))

    assert low <= every.min()
    assert high >= every.max()
    assert high - low <= every.max() - every.min() + 0.05 * (error + 1e-4) * max(high, 1.0)


def sequence_weights(ratio_N, sequence_N):
    return np.exp(np.bincount(sequence_N, ratio_N))[sequence_N]


W = {
    "all 1": lambda r, _: np.ones(len(r)),
    "the token's own w, as it is": lambda r, _: np.exp(r),
    "the token's own w, at most 1.2": lambda r, _: np.minimum(np.exp(r), 1.2),
    "the token's own w, cut to [": lambda r, _: np.clip(np.exp(r), 0.9, 1.1),
    "the token's own w, and 0 outside": lambda r, _: np.where(abs(r) < 0.2, np.exp(r), 0.0),
    "the token's own w, 1 inside a band": lambda r, _: (abs(r) < 0.2) * 1.0,
    "the product of w over the sequence, at most 2": lambda r, s: np.minimum(
        sequence_weights(r, s), 2.0
    ),
    "the product of w over the sequence, and 0": lambda r, s: np.where(
        sequence_weights(r, s) <= 3, sequence_weights(r, s), 0.0
    ),
    "the geometric mean of w over the sequence": lambda r, s: np.exp(
        np.bincount(s, r) / np.bincount(s)
    )[s],
    "w of the previous token": lambda r, _: np.minimum(np.exp(np.roll(r, 1)), 1.5),
    "1 / w": lambda r, _: np.exp(-r),
    "the declared weights, all times one constant": lambda r, _: 0.06 * np.minimum(np.exp(r), 1.5),
}


@pytest.mark.parametrize("words", [*W])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_wrong_weighting_is_flagged_and_named(words, precision):
    """Declared: min(w, 1.5), per token."""
    train_N, infer_N, sequence_N = logprobs(7, 0.2)
    ratio_N = train_N.astype(np.float64) - infer_N
    factor_N = rounded(W[words](ratio_N, sequence_N), precision)
    own, psi = applied(train_N, infer_N, sequence_N, factor_N), PSI["tis"](1.5)

    assert differing(own, psi)[1].mean() > 0.005
    assert fits(own, psi).best(0.999).startswith(words)


def test_weights_that_nothing_explains_have_no_name():
    train_N, infer_N, sequence_N = logprobs(8, 0.2)
    factor_N = np.random.default_rng(1).uniform(0.5, 1.5, len(train_N))

    assert fits(applied(train_N, infer_N, sequence_N, factor_N), PSI["tis"](2.0)).best(0.999) == ""


def test_fits_of_parts_add_up_to_those_of_the_whole():
    train_N, infer_N, sequence_N = logprobs(9, 0.2)
    factor_N = np.minimum(np.exp(train_N - infer_N), np.float32(1.3))
    psi = PSI["naive"]()
    half = sequence_N < 16

    def of(where):
        return fits(applied(*(c[where] for c in (train_N, infer_N, sequence_N, factor_N))), psi)

    both, whole = of(half) + of(~half), of(np.ones_like(half))

    assert (both.n, both.least, both.most) == (whole.n, whole.least, whole.most)
    assert both.best(1.0) == whole.best(1.0) == "the token's own w, at most 1.3"


def test_a_recorded_mask_alone_compares_what_was_kept():
    train_N, infer_N, sequence_N = logprobs(10, 0.5)
    inside_N = np.abs(train_N - infer_N) < np.log(2)
    psi = PSI["mis"]((0.5, 2.0))

    right = applied(train_N, infer_N, sequence_N, None, inside_N * 1.0)
    wrong = applied(train_N, infer_N, sequence_N, None, np.ones(len(train_N)))

    assert not differing(right, psi)[1].any()
    found_N = differing(wrong, psi)[1]
    assert not (found_N & inside_N).any()
    assert found_N.sum() > 0.9 * (~inside_N).sum()  # the others are at the edge, within rounding


def test_what_is_not_recorded_is_not_compared():
    train_N, infer_N, sequence_N = logprobs(11, 0.1)
    factor_N = np.where(sequence_N == 0, np.nan, 1.0)
    train_N[sequence_N == 1] = np.nan

    compared_N, differing_N = differing(
        applied(train_N, infer_N, sequence_N, factor_N), PSI["naive"]()
    )

    assert (compared_N == (sequence_N > 1)).all()
    assert not differing_N.any()


def test_whole_sequences_of_a_long_record_are_examined():
    train_N, infer_N, sequence_N = logprobs(12, 0.1, size=600)  # 38,400 tokens
    ratio_N = train_N.astype(np.float64) - infer_N
    factor_N = sequence_weights(ratio_N, sequence_N).astype(np.float32)

    found = fits(applied(train_N, infer_N, sequence_N, factor_N), PSI["naive"]())

    assert found.n == 512 * LENGTH
    assert found.best(1.0) == "the product of w over the sequence, as it is"
