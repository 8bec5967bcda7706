# Divergences against their definitions, exactly where enumeration allows it.

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.errors import EvidenceError
from servanda.theory.divergence.base import DIVERGENCES, LogitRows, divergence, exact, sampled
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


@given(vocabularies, st.sampled_from([*oracles.EXACT]))
def test_every_exact_metric_is_its_definition(counts, name):
    train, infer = (np.log(c) for c in counts)
    truth = float(oracles.exactly(name, train, infer, digits=30))
    assert exact(name, rows(train, infer))[0] == pytest.approx(truth, rel=1e-9, abs=1e-14)


@given(with_zeros, st.sampled_from([n for n in oracles.EXACT if "log" not in n and "k3" not in n]))
def test_every_exact_metric_is_its_definition_also_without_shared_support(counts, name):
    train, infer = laws(counts)
    truth = float(oracles.EXACT[name](train.tolist(), infer.tolist()))
    value = exact(name, rows(log(train), log(infer)))[0]
    assert value == pytest.approx(truth, rel=1e-7, abs=1e-7)


def test_every_exact_metric_has_a_definition():
    exact_names = {n for n, d in DIVERGENCES.items() if "logits" in d.forms}
    assert exact_names == {*oracles.EXACT, "top1_flip"}


@given(logit_rows)
def test_a_flip_is_a_difference_of_the_best_tokens(logits):
    train_z, infer_z = logits
    flipped = float(np.argmax(train_z) != np.argmax(infer_z))
    assert exact("top1_flip", rows(train_z, infer_z))[0] == flipped


UNBIASED = {
    "tv": "tv",
    "le_cam": "le_cam",
    "chi2": "chi2",
    "k1_nats": "kl_nats",
    "k3_nats": "kl_nats",
    "kl_reverse_nats": "kl_reverse_nats",
}


@given(vocabularies, st.sampled_from([*UNBIASED]))
def test_the_mean_of_a_sampled_metric_is_the_exact_one(counts, name):
    """Enumerate the vocabulary instead of sampling it, and the mean is exact."""
    train, infer = laws(counts)
    q, values = enumerated(name, train, infer)
    truth = exact(UNBIASED[name], rows(log(train), log(infer)))[0]
    assert q @ values == pytest.approx(truth, rel=1e-9, abs=1e-12)


@given(with_zeros, st.sampled_from(["tv", "le_cam"]))
def test_two_means_need_no_shared_support(counts, name):
    train, infer = laws(counts)
    q, values = enumerated(name, train, infer)
    truth = exact(name, rows(log(train), log(infer)))[0]
    assert q @ values == pytest.approx(truth, rel=1e-9, abs=1e-12)


@given(vocabularies)
def test_the_bias_of_k2_is_what_its_page_says(counts):
    """KL = E (w - 1 - log w), of which k2 is the first term of the series."""
    train, infer = laws(counts)
    q, values = enumerated("k2_nats", train, infer)
    x = log(train) - log(infer)
    beyond = q @ (np.expm1(x) - x - x**2 / 2)
    assert q @ values == pytest.approx(oracles.kl(infer, train) - beyond, rel=1e-7, abs=1e-12)


def test_k2_is_near_the_kl_for_near_kernels_only():
    infer = np.full(4, 0.25)
    for shift, near in ((1e-3, True), (0.2, False)):
        train = infer + shift * np.array([1, 0.2, -0.2, -1])
        q, values = enumerated("k2_nats", train, infer)
        assert (abs(q @ values / oracles.kl(infer, train) - 1) < 0.01) == near


@given(with_zeros, st.sets(st.integers(0, 6)))
def test_on_a_slice_of_outcomes_the_means_are_a_mass_gap_and_a_share_of_the_tv(counts, inside):
    """Over all tokens, with 0 outside the slice; only what infer can draw is seen."""
    train, infer = laws(counts)
    drawn = np.flatnonzero(infer > 0)
    in_slice = np.isin(drawn, [*inside])
    moved = [train[t] - infer[t] for t in drawn if t in inside]
    q, gaps = enumerated("mass_gap", train, infer)
    _, shares = enumerated("tv_contribution", train, infer)
    assert q @ np.where(in_slice, gaps, 0) == pytest.approx(math.fsum(moved), abs=1e-12)
    assert q @ np.where(in_slice, shares, 0) == pytest.approx(
        math.fsum(map(abs, moved)) / 2, abs=1e-12
    )


def test_half_of_every_rare_token_gone_is_seen_on_their_slice_and_not_by_the_tv_metric():
    infer = np.array([0.5, 0.372, 0.064, 0.064])
    train = np.array([0.436, 0.308, 0.128, 0.128])
    q, plain = enumerated("tv", train, infer)
    _, gaps = enumerated("mass_gap", train, infer)
    assert q[2:] @ plain[2:] == 0.0
    assert q[2:] @ gaps[2:] == pytest.approx(0.128)


@given(logit_rows, st.floats(-100, 100))
def test_a_common_shift_of_the_logits_changes_nothing(logits, shift):
    train_z, infer_z = logits
    for name in oracles.EXACT:
        plain = exact(name, rows(train_z, infer_z))[0]
        moved = exact(name, rows([z + shift for z in train_z], infer_z))[0]
        assert moved == pytest.approx(plain, rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("name", [*DIVERGENCES])  # a new metric is tested on arrival
def test_identical_kernels_do_not_diverge(name):
    logits = np.random.default_rng(0).normal(size=(5, 11)) * 4
    if "logits" in DIVERGENCES[name].forms:
        assert (exact(name, LogitRows(logits, logits.copy())) == 0).all()
    if "logprob" in DIVERGENCES[name].forms:
        assert (sampled(name, {"logp_train": logits[0], "logp_infer": logits[0]}) == 0).all()
    if "top1" in DIVERGENCES[name].forms:
        assert (sampled(name, {"top1_train": logits[0], "top1_infer": logits[0]}) == 0).all()
    if "routes" in DIVERGENCES[name].forms:
        same = {side: logits[:, :6].reshape(5, 3, 2) for side in ("routes_train", "routes_infer")}
        assert (sampled(name, same) == 0).all()


@pytest.mark.parametrize("name", [*oracles.EXACT])
def test_a_gross_row_does_not_cost_its_neighbours_their_digits(name):
    rng = np.random.default_rng(2)
    infer = rng.normal(size=(3, 50)) * 3
    train = infer + 1e-7 * rng.normal(size=infer.shape)
    alone = exact(name, LogitRows(train, infer))
    train[1] += 5 * rng.normal(size=50)
    train[2, 7] = -np.inf
    assert exact(name, LogitRows(train, infer))[0] == alone[0]


@pytest.mark.parametrize("name", ["tv", "js_nats", "hellinger2", "le_cam", "entropy_nats"])
@pytest.mark.parametrize("mask", [np.finfo(np.float32).min, -1e9])
def test_a_token_masked_on_one_side_by_a_large_number_is_as_one_without_mass(name, mask):
    """Once its gap swallowed every other digit of the row: js_nats of unlike rows was 0."""
    rows = np.random.default_rng(3).normal(size=(2, 6)) * 3
    masked, without = rows.copy(), rows.copy()
    masked[:, 2], without[:, 2] = mask, -np.inf
    for found, expected in (
        (LogitRows(masked, rows), LogitRows(without, rows)),
        (LogitRows(rows, masked), LogitRows(rows, without)),
    ):
        assert exact(name, found) == pytest.approx(exact(name, expected), rel=1e-12)


def test_the_textbook_k3_in_float32_has_no_digit_left_and_ours_has_all():
    x = np.full(1000, 1e-4)
    textbook = np.exp(x.astype(np.float32)) - x.astype(np.float32) - 1
    ours = sampled("k3_nats", {"logp_train": x - 1.0, "logp_infer": np.full(1000, -1.0)})
    assert abs(textbook.mean() / 5e-9 - 1) > 0.5
    assert ours == pytest.approx(5.0002e-9, rel=1e-4)


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


EXACT_NAMES = [n for n, d in DIVERGENCES.items() if "logits" in d.forms]
# train and infer share no token: what each metric then is
APART = {
    "abs_log_ratio_nats": math.inf,
    "chi2": math.inf,
    "entropy_nats": 0.0,
    "hellinger2": 1.0,
    "js_nats": math.log(2),
    "k3_nats": math.inf,
    "kl_nats": math.inf,
    "kl_reverse_nats": math.inf,
    "le_cam": 1.0,
    "logit_linf_nats": math.inf,
    "logit_osc_nats": math.inf,
    "top1_flip": 1.0,
    "tv": 1.0,
}


@pytest.mark.parametrize("name", EXACT_NAMES)
def test_kernels_that_share_no_token_are_as_far_apart_as_can_be(name):
    gone = -math.inf
    pair = rows([1.0, 1.0, gone, gone], [gone, gone, 2.0, 2.0])
    assert exact(name, pair)[0] == pytest.approx(APART[name], abs=1e-12)


@pytest.mark.parametrize("name", EXACT_NAMES)
def test_a_token_that_only_train_has_and_one_that_only_infer_has(name):
    """Infinite where a ratio is, in that direction, and finite elsewhere."""
    gone = -math.inf
    only_train = exact(name, rows([0.0, 1.0, 0.5], [0.0, 1.0, gone]))[0]
    only_infer = exact(name, rows([0.0, 1.0, gone], [0.0, 1.0, 0.5]))[0]
    either = {"abs_log_ratio_nats", "logit_osc_nats", "logit_linf_nats"}
    assert (only_train == math.inf) == (name in either | {"kl_reverse_nats", "chi2"})
    assert (only_infer == math.inf) == (name in either | {"kl_nats", "k3_nats"})


@pytest.mark.parametrize("name", EXACT_NAMES)
def test_a_token_that_neither_kernel_has_changes_nothing(name):
    """Padded rows of a vocabulary, beside logits with a common shift."""
    rng = np.random.default_rng(4)
    infer = rng.normal(size=(2, 6))
    train = infer + 0.1 * rng.normal(size=(2, 6)) + 0.5
    pad = np.full((2, 2), -np.inf)
    padded = exact(name, LogitRows(np.hstack([train, pad]), np.hstack([infer, pad])))
    assert padded == pytest.approx(exact(name, LogitRows(train, infer)), rel=1e-12)


@pytest.mark.parametrize("name", EXACT_NAMES)
@pytest.mark.parametrize("size", [700.0, 1e4, 1e30])
def test_no_size_of_logits_makes_a_metric_nan(name, size):
    for train, infer in (([size, 0.0], [0.0, size]), ([0.0, 1.0], [0.0, size])):
        low, high = DIVERGENCES[name].span_of("logits")
        for a, b in ((train, infer), (infer, train)):
            assert low <= exact(name, rows(a, b))[0] <= high


@given(logit_rows)
def test_every_exact_value_lies_within_its_span(logits):
    for name in EXACT_NAMES:
        low, high = DIVERGENCES[name].span_of("logits")
        assert low <= exact(name, rows(*logits))[0] <= high, name


LOG_RATIOS = [-math.inf, -1e4, -800.0, -1.0, -1e-9, 0.0, 1e-9, 1.0, 800.0, 1e4]


@pytest.mark.parametrize("name", [n for n, d in DIVERGENCES.items() if "logprob" in d.forms])
def test_every_sampled_value_lies_within_its_span(name):
    train = np.array(LOG_RATIOS)
    values = sampled(name, {"logp_train": train, "logp_infer": np.zeros(len(train))})
    metric = DIVERGENCES[name]
    low, high = metric.span_of("logprob")
    assert ((low <= values) & (values <= high)).all()
    assert metric.signed == (values < 0).any()
    assert metric.bounded == np.isfinite(values).all()


def test_a_token_without_mass_on_train_counts_its_limit():
    columns = {"logp_train": np.array([-np.inf]), "logp_infer": np.array([-1.0])}
    values = {
        n: float(sampled(n, columns)[0]) for n, d in DIVERGENCES.items() if "logprob" in d.forms
    }
    assert values == {
        "abs_log_ratio_nats": math.inf,
        "chi2": 1.0,
        "k1_nats": math.inf,
        "k2_nats": math.inf,
        "k3_nats": math.inf,
        "kl_reverse_nats": 1.0,
        "le_cam": 1.0,
        "mass_gap": -1.0,
        "tv": 1.0,
        "tv_contribution": 0.5,
    }


def test_each_form_has_a_span_of_its_own_and_callers_get_the_sampled_one():
    le_cam = DIVERGENCES["le_cam"]
    assert le_cam.span_of("logits") == (0.0, 1.0)
    assert le_cam.span == le_cam.span_of("logprob") == (-1.0, 1.0)
    assert le_cam.bounded and le_cam.signed
    assert DIVERGENCES["js_nats"].span == (0.0, math.log(2))
    assert not DIVERGENCES["k1_nats"].bounded
    assert {n for n, d in DIVERGENCES.items() if d.outcome} == {"mass_gap", "tv_contribution"}


def test_two_forms_of_one_metric_agree_on_its_unit():
    with pytest.raises(ValueError, match="'tv' differ in unit or outcome"):
        divergence("tv", needs="topk", unit="nat", span=(0.0, 1.0), source="")(lambda: None)


def test_le_cam_brackets_hellinger_and_jensen_shannon():
    rng = np.random.default_rng(5)
    pair = LogitRows(rng.normal(size=(200, 8)) * 3, rng.normal(size=(200, 8)) * 3)
    twice = 2 * exact("le_cam", pair)
    for name, top in (("hellinger2", 0.5), ("js_nats", math.log(2) / 2)):
        assert (twice / 4 <= exact(name, pair) + 1e-12).all()
        assert (exact(name, pair) <= top * twice + 1e-12).all()


@pytest.mark.parametrize("nats", [40.0, 1e3, 9e15, 1e300])
def test_a_token_that_train_hardly_has_counts_one_in_the_reverse_kl(nats):
    values = sampled(
        "kl_reverse_nats", {"logp_train": np.array([-nats]), "logp_infer": np.zeros(1)}
    )
    assert values == pytest.approx([1.0], abs=1e-15)
