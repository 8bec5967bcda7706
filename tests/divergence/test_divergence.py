# Divergences against their definitions, exactly where enumeration allows it.

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.divergence import DIVERGENCES, LogitRows, exact, sampled
from servanda.errors import EvidenceError
from tests import oracles

vocabularies = st.integers(2, 7).flatmap(
    lambda v: st.tuples(
        st.lists(st.integers(1, 50), min_size=v, max_size=v),
        st.lists(st.integers(1, 50), min_size=v, max_size=v),
    )
)
with_zeros = st.integers(2, 7).flatmap(
    lambda v: st.tuples(
        st.lists(st.integers(0, 5), min_size=v, max_size=v).filter(any),
        st.lists(st.integers(0, 5), min_size=v, max_size=v).filter(any),
    )
)
logit_rows = st.integers(2, 9).flatmap(
    lambda v: st.tuples(*(st.lists(st.floats(-30, 30), min_size=v, max_size=v) for _ in "ab"))
)


def laws(counts):
    return tuple(np.array(c) / sum(c) for c in counts)


def log(p):
    with np.errstate(divide="ignore"):
        return np.log(p)


def rows(train, infer):
    return LogitRows(np.array([train], dtype=float), np.array([infer], dtype=float))


def enumerated(name, train, infer):
    """The metric at every token infer can draw, and their probabilities."""
    drawn = infer > 0
    columns = {"logp_train": log(train)[drawn], "logp_infer": log(infer)[drawn]}
    return infer[drawn], sampled(name, columns)


@given(with_zeros)
def test_the_mean_of_the_sampled_tv_is_the_tv_also_without_shared_support(counts):
    train, infer = laws(counts)
    q, values = enumerated("tv", train, infer)
    assert q @ values == pytest.approx(oracles.tv(train, infer), abs=1e-12)


@given(with_zeros)
def test_the_exact_tv_is_the_definition_also_without_shared_support(counts):
    train, infer = laws(counts)
    value = exact("tv", rows(log(train), log(infer)))[0]
    assert value == pytest.approx(oracles.tv(train, infer), rel=1e-9, abs=1e-12)


@given(vocabularies)
def test_the_mean_of_k3_is_the_kl_of_infer_from_train(counts):
    """Enumerate the vocabulary instead of sampling it, and the mean is exact."""
    train, infer = laws(counts)
    q, values = enumerated("k3_nats", train, infer)
    assert q @ values == pytest.approx(oracles.kl(infer, train), rel=1e-9, abs=1e-12)
    value = exact("k3_nats", rows(log(train), log(infer)))[0]
    assert value == pytest.approx(oracles.kl(infer, train), rel=1e-9, abs=1e-12)


@given(logit_rows)
def test_every_exact_metric_is_its_definition_on_softmax_rows(logits):
    train_z, infer_z = logits
    train, infer = oracles.softmax(train_z), oracles.softmax(infer_z)
    pair = rows(train_z, infer_z)
    drift = np.array(train_z) - np.array(infer_z)
    moved = (q * math.exp(d) for q, d in zip(infer, drift, strict=True))
    log_weight = drift - math.log(math.fsum(moved))
    assert exact("tv", pair)[0] == pytest.approx(oracles.tv(train, infer), rel=1e-7, abs=1e-12)
    assert exact("logit_osc_nats", pair)[0] == pytest.approx(drift.max() - drift.min())
    assert exact("abs_log_ratio_nats", pair)[0] == pytest.approx(
        np.abs(log_weight).max(), rel=1e-7, abs=1e-9
    )
    assert exact("top1_flip", pair)[0] == float(np.argmax(train_z) != np.argmax(infer_z))


@given(logit_rows, st.floats(-100, 100))
def test_a_common_shift_of_the_logits_changes_nothing(logits, shift):
    train_z, infer_z = logits
    for name in ("tv", "logit_osc_nats", "abs_log_ratio_nats", "k3_nats"):
        plain = exact(name, rows(train_z, infer_z))[0]
        moved = exact(name, rows([z + shift for z in train_z], infer_z))[0]
        assert moved == pytest.approx(plain, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", [*DIVERGENCES])  # a new metric is tested on arrival
def test_identical_kernels_do_not_diverge(name):
    logits = np.random.default_rng(0).normal(size=(5, 11)) * 4
    if "logits" in DIVERGENCES[name].forms:
        assert (exact(name, LogitRows(logits, logits.copy())) == 0).all()
    if "logprob" in DIVERGENCES[name].forms:
        assert (sampled(name, {"logp_train": logits[0], "logp_infer": logits[0]}) == 0).all()
    if "top1" in DIVERGENCES[name].forms:
        assert (sampled(name, {"top1_train": logits[0], "top1_infer": logits[0]}) == 0).all()


@pytest.mark.parametrize("sigma", [1e-4, 1e-3, 1e-2, 1e-1, 1.0])
@pytest.mark.parametrize("name", ["tv", "k3_nats", "abs_log_ratio_nats"])
def test_nearly_identical_rows_keep_their_digits(name, sigma):
    """float32 logits as engines give them, against 50-digit-safe sums in longdouble."""
    rng = np.random.default_rng(1)
    infer = (rng.normal(size=(4, 500)) * 3).astype(np.float32)
    train = (infer + sigma * rng.normal(size=infer.shape)).astype(np.float32)
    x, y = train.astype(np.longdouble), infer.astype(np.longdouble)
    logp = x - np.log(np.exp(x).sum(1, keepdims=True))
    logq = y - np.log(np.exp(y).sum(1, keepdims=True))
    d, q = logp - logq, np.exp(logq)
    truth = {
        "tv": np.abs(q * np.expm1(d)).sum(1) / 2,
        "k3_nats": (q * (np.expm1(d) - d)).sum(1),
        "abs_log_ratio_nats": np.abs(d).max(1),
    }[name]
    assert exact(name, LogitRows(train, infer)) == pytest.approx(truth.astype(float), rel=1e-9)


@pytest.mark.parametrize("name", ["tv", "k3_nats", "abs_log_ratio_nats"])
def test_a_gross_row_does_not_cost_its_neighbours_their_digits(name):
    rng = np.random.default_rng(2)
    infer = rng.normal(size=(3, 50)) * 3
    train = infer + 1e-7 * rng.normal(size=infer.shape)
    alone = exact(name, LogitRows(train, infer))
    train[1] += 5 * rng.normal(size=50)
    train[2, 7] = -np.inf
    assert exact(name, LogitRows(train, infer))[0] == alone[0]


def test_the_textbook_k3_in_float32_has_no_digit_left_and_ours_has_all():
    x = np.full(1000, 1e-4)
    textbook = np.exp(x.astype(np.float32)) - x.astype(np.float32) - 1
    ours = sampled("k3_nats", {"logp_train": x - 1.0, "logp_infer": np.full(1000, -1.0)})
    assert abs(textbook.mean() / 5e-9 - 1) > 0.5
    assert ours == pytest.approx(5.0002e-9, rel=1e-4)


def test_a_token_that_train_gives_no_mass_is_evidence():
    columns = {"logp_train": np.array([-np.inf]), "logp_infer": np.array([-1.0])}
    assert sampled("tv", columns).tolist() == [1.0]
    assert sampled("abs_log_ratio_nats", columns).tolist() == [math.inf]
    assert sampled("k3_nats", columns).tolist() == [math.inf]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_drawn_token_without_a_logprob_is_refused(broken):
    with pytest.raises(EvidenceError, match="no usable logprob"):
        sampled("tv", {"logp_train": np.array([-1.0]), "logp_infer": np.array([broken])})


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("name", [n for n, d in DIVERGENCES.items() if "logits" in d.forms])
def test_a_broken_row_has_no_value_and_leaves_its_neighbours_alone(name, broken):
    good = np.array([[0.0, 1.0, 2.0], [0.5, 1.0, 2.0]])
    bad = good.copy()
    bad[0, 1] = broken
    values = exact(name, LogitRows(bad, good))
    assert math.isnan(values[0]) and values[1] == 0.0
    dead = np.full((1, 3), -np.inf)
    assert math.isnan(exact(name, LogitRows(dead, good[:1]))[0])
