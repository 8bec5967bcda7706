# The top-k intervals against the exact values, and against the pairs that attain their ends.

import importlib.util
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.errors import EvidenceError
from servanda.theory.divergence.base import DIVERGENCES, LogitRows, exact
from servanda.theory.divergence.topk import interval
from servanda.theory.divergence.topk_rows import TopK, TopRows

NAMES = [n for n, d in DIVERGENCES.items() if "topk" in d.forms]
BOUNDED = [n for n in NAMES if np.isfinite(DIVERGENCES[n].span_of("topk")[1])]

tables = st.integers(1, 9).flatmap(
    lambda v: st.tuples(
        st.lists(st.integers(1, 40), min_size=v, max_size=v),
        st.lists(st.integers(1, 40), min_size=v, max_size=v),
        st.integers(1, v),
        st.integers(1, v),
        st.booleans(),
    )
)


def top(p, k, vocabulary=None):
    """The k likeliest tokens of each row, ties by id."""
    ids = np.argsort(-p, axis=-1, kind="stable")[:, :k]
    return TopK(ids, np.log(np.take_along_axis(p, ids, axis=-1)), vocabulary)


def law(counts):
    return np.array([counts]) / sum(counts)


def logits(p, q):
    with np.errstate(divide="ignore"):
        return LogitRows(np.log(p), np.log(q))


def test_every_metric_that_a_top_k_can_bound_has_that_form():
    assert sorted(NAMES) == [
        "chi2",
        "hellinger2",
        "js_nats",
        "kl_nats",
        "kl_reverse_nats",
        "le_cam",
        "tv",
    ]


@given(tables)
def test_the_interval_holds_the_exact_value(case):
    """Any table, ties included, other k on each side, the vocabulary known or not."""
    train, infer, k, j, told = case
    p, q = law(train), law(infer)
    size = p.shape[1] if told else None
    rows = TopRows(top(p, k, size), top(q, j, size))
    for name in NAMES:
        lower, upper = interval(name, rows)[0]
        value = exact(name, logits(p, q))[0]
        assert lower <= value + 1e-12 and value <= upper + 1e-12, name


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0, 8.0])
def test_it_holds_for_unlike_kernels_too(sharpness):
    """Thousands of rows at once, from nearly uniform to nearly certain, near and far apart."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(3000, 12)) * sharpness
    apart = rng.choice([1e-3, 0.1, 1.0, 8.0], size=(3000, 1))
    p, q = (
        np.exp(x) / np.exp(x).sum(1, keepdims=True)
        for x in (z, z + apart * rng.normal(size=z.shape))
    )
    for k in (1, 2, 5, 11, 12):
        rows = TopRows(top(p, k, 12), top(q, k, 12))
        for name in NAMES:
            value, ends = exact(name, logits(p, q)), interval(name, rows)
            slack = 1e-12 + 1e-9 * value
            assert (ends[:, 0] <= value + slack).all(), (name, k)
            assert (value <= ends[:, 1] + slack).all(), (name, k)


@pytest.mark.slow
@given(tables)
def test_more_tokens_never_widen_it_and_the_whole_vocabulary_gives_the_exact_value(case):
    train, infer, *_ = case
    p, q = law(train), law(infer)
    size = p.shape[1]
    for name in NAMES:
        rows = [TopRows(top(p, k), top(q, k)) for k in range(1, size + 1)]
        ends = np.array([interval(name, row)[0] for row in rows])
        assert (np.diff(ends[:, 0]) >= -1e-9).all(), name
        if name in BOUNDED:
            assert (np.diff(ends[:, 1]) <= 1e-9).all(), name
        whole = interval(name, TopRows(top(p, size, size), top(q, size, size)))[0]
        value = exact(name, logits(p, q))[0]
        assert whole == pytest.approx([value, value], rel=1e-9, abs=1e-13), name


def hidden(p, q, k, spread=4000):
    """The completion at which the lower ends are reached, with room for the tails."""
    rows = TopRows(top(p, k), top(q, k))
    at_a, at_b = rows.log_ratios
    size = p.shape[1]
    whole_p, whole_q = (np.zeros((1, size + spread)) for _ in "pq")
    for whole, side in ((whole_p, rows.train), (whole_q, rows.infer)):
        np.put_along_axis(whole, side.ids_RK, side.p_RK, axis=-1)
    for whole, side, mass in (
        (whole_q, rows.train, rows.hidden_infer(at_a)),
        (whole_p, rows.infer, rows.hidden_train(at_b)),
    ):
        for token, m in zip(side.ids_RK[0], mass[0], strict=True):
            whole[0, token] += m
    for whole in (whole_p, whole_q):
        rest = 1 - whole.sum()
        assert rest > -1e-9
        # less is the rounding of a completion that leaves the rest nothing
        whole[0, size:] = rest / spread if rest > 1e-12 else 0
    return rows, whole_p, whole_q


@pytest.mark.parametrize("seed", range(40))
def test_the_lower_ends_are_attained_where_the_vocabulary_has_room(seed):
    """One completion that returns the same tokens hides the most from every metric."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(2, 8)) * rng.choice([0.5, 2.0, 5.0])
    p, q = (np.exp(x) / np.exp(x).sum() for x in z[:, None, :])
    rows, whole_p, whole_q = hidden(p, q, int(rng.integers(1, 7)))
    for whole, side in ((whole_p, rows.train), (whole_q, rows.infer)):
        others = np.delete(whole[0], side.ids_RK[0])
        assert others.max() <= side.least_R1[0, 0] * (1 + 1e-9)
    for name in NAMES:
        attained = exact(name, logits(whole_p, whole_q))[0]
        assert interval(name, rows)[0, 0] == pytest.approx(attained, rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("name", BOUNDED)
def test_the_upper_end_is_attained_by_tails_that_do_not_meet(name):
    p = np.array([[0.5, 0.3, 0.2, 0.0, 0.0, 0.0]])
    q = np.array([[0.4, 0.0, 0.0, 0.3, 0.2, 0.1]])
    rows = TopRows(top(p, 2), top(q, 2))
    assert interval(name, rows)[0, 1] == pytest.approx(exact(name, logits(p, q))[0])


needs_scipy = pytest.mark.skipif(
    importlib.util.find_spec("scipy") is None, reason="scipy solves the linear program"
)


def least_tv(rows, size):
    """The smallest TV of all pairs that return these tokens, by linear programming.

    Variables: p, q and the overlap min(p, q) of each token; the overlap is maximised.
    """
    from scipy.optimize import linprog

    bounds = []
    for side in (rows.train, rows.infer):
        known = dict(zip(side.ids_RK[0].tolist(), side.p_RK[0].tolist(), strict=True))
        most = side.least_R1[0, 0]
        bounds += [(known[t], known[t]) if t in known else (0, most) for t in range(size)]
    one, none = np.eye(size), np.zeros((size, size))
    sums = np.zeros((2, 3 * size))
    sums[0, :size] = sums[1, size : 2 * size] = 1
    found = linprog(
        np.repeat([0, 0, -1], size),
        A_ub=np.block([[-one, none, one], [none, -one, one]]),
        b_ub=np.zeros(2 * size),
        A_eq=sums,
        b_eq=[1, 1],
        bounds=[*bounds, *[(0, None)] * size],
    )
    assert found.success
    return 1 + found.fun


@needs_scipy
@pytest.mark.parametrize("seed", range(60))
def test_the_lower_end_of_tv_is_that_of_a_linear_program(seed):
    """Sharp at every size of the vocabulary, also where it has no room left."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 8))
    z = rng.normal(size=(2, size)) * rng.choice([0.5, 2.0, 5.0])
    p, q = (np.exp(x) / np.exp(x).sum() for x in z[:, None, :])
    k, j = rng.integers(1, size + 1, size=2)
    rows = TopRows(top(p, k, size), top(q, j, size))
    assert interval("tv", rows)[0, 0] == pytest.approx(least_tv(rows, size), abs=1e-7)


def test_disjoint_tokens_show_their_distance():
    """Each side is nearly sure of another token: the tails can hide almost nothing."""
    train = TopK([[1]], np.log([[0.99]]))
    infer = TopK([[2]], np.log([[0.99]]))
    rows = TopRows(train, infer)
    assert interval("tv", rows)[0] == pytest.approx([0.98, 1.0])
    for name in NAMES:
        assert interval(name, rows)[0, 0] > 0.5, name


def test_logprobs_in_float32_need_slack():
    """A softmax in float32 says 1 for 1 - 5e-8, and a ratio takes that for no tail at all."""
    p = np.array([[0.999, 0.001]])
    q = np.array([[1 - 5e-8, 5e-8]])
    value = exact("kl_reverse_nats", logits(p, q))[0]
    train = top(p, 2)
    believed = TopRows(train, TopK([[0]], [[0.0]]))
    doubted = TopRows(train, TopK([[0]], [[0.0]], slack=1e-6))
    assert interval("kl_reverse_nats", believed)[0, 0] > value
    assert 0 < interval("kl_reverse_nats", doubted)[0, 0] < value


def test_the_same_ids_on_both_sides_leave_the_smaller_tail_open():
    p = np.array([[0.5, 0.3, 0.15, 0.05]])
    q = np.array([[0.45, 0.35, 0.12, 0.08]])
    ids = [[0, 1, 2]]
    rows = TopRows(TopK(ids, np.log(p[:, :3])), TopK(ids, np.log(q[:, :3])))
    lower, upper = interval("tv", rows)[0]
    assert upper - lower == pytest.approx(0.05)
    assert lower == pytest.approx(np.abs(p - q).sum() / 2)


def test_what_was_not_computed_is_unknown_and_never_evidence():
    """-inf in a reply, or a filler id, is as if the token were not returned."""
    whole = TopK([[0, 1]], np.log([[0.6, 0.3]]))
    for ids in ([[0, 1, 2]], [[0, 1, -1]]):
        partial = TopK(ids, np.array([[*np.log([0.6, 0.3]), -math.inf]]))
        for name in NAMES:
            rows = TopRows(partial, TopK([[0, 2]], np.log([[0.7, 0.2]])))
            plain = TopRows(whole, TopK([[0, 2]], np.log([[0.7, 0.2]])))
            assert interval(name, rows).tolist() == interval(name, plain).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_row_has_no_interval_and_leaves_its_neighbours_alone(name):
    logp = np.log([[0.6, 0.3]] * 5)
    broken = logp.copy()
    broken[1, 0], broken[2, 0], broken[3] = math.nan, math.inf, [-math.inf, -math.inf]
    broken[4] = [0.0, 0.0]  # more mass than there is
    ids = [[0, 1]] * 5
    for rows in (
        TopRows(TopK(ids, broken), TopK(ids, logp)),
        TopRows(TopK(ids, logp), TopK(ids, broken)),
    ):
        ends = interval(name, rows)
        assert np.isnan(ends[1:]).all()
        assert ends[0, 0] == pytest.approx(0.0, abs=1e-12) and ends[0, 1] > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK([[0, 1]], np.log([[0.5]])), r"\(1, 2\) top-k ids for \(1, 1\) logprobs"),
        (lambda: TopK([[3, 3]], np.log([[0.5, 0.5]])), "row 0 returns a token id twice"),
        (lambda: TopK([[5]], np.log([[0.5]]), 4), "token id 5 in a vocabulary of 4 tokens"),
        (
            lambda: TopRows(TopK([[0]], [[0.0]]), TopK([[0], [1]], [[0.0], [0.0]])),
            "1 train rows of top-k for 2 infer rows",
        ),
        (
            lambda: TopRows(TopK([[0]], [[0.0]], 4), TopK([[0]], [[0.0]], 5)),
            "a vocabulary of 4 train tokens for 5 of infer",
        ),
    ],
)
def test_what_is_no_top_k_is_refused(make, message):
    with pytest.raises(EvidenceError, match=message):
        make()
