# The tally of a training step against counting its tokens one at a time.

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.errors import EvidenceError
from servanda.theory.stats.histogram import BINS, bin_of, edges
from servanda.theory.stats.tally import tally

LEAST_K, MOST_K = edges()
ODD = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -3e38, 3e38, -1e-9)
logprobs = st.sampled_from(ODD) | st.floats(-40, 0, width=32)
tokens = st.tuples(logprobs, logprobs, st.booleans(), st.integers(0, 3))
steps = st.lists(st.lists(tokens, min_size=3, max_size=3), min_size=1, max_size=20)


def one_by_one(train, infer, mask, atom, atoms):
    """The definition."""
    count = np.zeros((atoms, BINS + 1), dtype=np.int64)
    for p, q, trained, a in zip(*map(np.ravel, (train, infer, mask, atom)), strict=True):
        if trained:
            usable = math.isfinite(q) and not math.isnan(p) and p < math.inf
            count[a, bin_of([float(p) - float(q)])[0] if usable else BINS] += 1
    return count


def columns(step):
    return [np.array(c) for c in zip(*(zip(*row, strict=True) for row in step), strict=True)]


@given(steps)
def test_a_tally_is_what_counting_one_by_one_gives(step):
    train, infer, mask, atom = columns(step)
    found = tally(train, infer, mask, atom, 4)
    assert (found == one_by_one(train, infer, mask, atom, 4)).all()


@given(logprobs, logprobs)
def test_a_float32_token_lies_in_its_bin_though_its_difference_was_rounded(train, infer):
    (count_W,) = tally(*(np.array([[v]], dtype=np.float32) for v in (train, infer)), [[True]])
    k = int(count_W.argmax())
    if k == BINS:
        assert one_by_one([train], [infer], [True], [0], 1)[0, BINS] == 1
    else:
        train, infer = float(np.float32(train)), float(np.float32(infer))
        assert LEAST_K[k] <= train - infer <= MOST_K[k]


@given(steps, st.integers(0, 20))
def test_tallies_of_parts_add_up_to_that_of_the_whole(step, cut):
    given_step = columns(step)
    parts = [tally(*(c[part] for c in given_step), 4) for part in (slice(cut), slice(cut, None))]
    assert (sum(parts) == tally(*given_step, 4)).all()


def test_many_blocks_are_counted_as_one(monkeypatch):
    rng = np.random.default_rng(1)
    infer = -rng.exponential(1.0, (7, 50)).astype(np.float32)
    train = infer + rng.normal(0, 0.1, (7, 50)).astype(np.float32)
    mask, atom = rng.random((7, 50)) < 0.7, rng.integers(0, 3, (7, 50))
    infer[0, :9] = np.nan
    whole = tally(train, infer, mask, atom, 3)
    monkeypatch.setattr("servanda.theory.stats.tally._BLOCK_BYTES", 4 * 13)
    monkeypatch.setattr("servanda.theory.stats.tally._COUNT", 40)
    assert (tally(train, infer, mask, atom, 3) == whole).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_nothing_is_read_of_a_token_that_the_mask_leaves_out(dtype):
    train = np.array([[-1.0, math.nan, math.inf, 3.0]], dtype=dtype)
    infer = np.array([[-1.5, -1.0, math.inf, -math.inf]], dtype=dtype)
    found = tally(train, infer, [[1, 0, 0, 0]], [[0, -5, 99, 7]], 1)
    assert found.sum() == 1 and found[0, bin_of([0.5])[0]] == 1


@pytest.mark.parametrize(
    ("train", "infer", "usable"),
    [
        (-1.0, math.nan, False),
        (math.nan, -1.0, False),
        (-1.0, -math.inf, False),
        (-math.inf, -math.inf, False),
        (math.inf, -1.0, False),
        (-1.0, math.inf, False),
        (-math.inf, math.inf, False),
        (-math.inf, -1.0, True),
        (-3e38, 3e38, True),
        (3e38, -3e38, True),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_only_train_without_mass_is_evidence(train, infer, usable, dtype):
    found = tally(np.array([[train]], dtype=dtype), np.array([[infer]], dtype=dtype), [[True]])
    assert found[0, BINS] == (not usable)
    if usable:
        assert found[0, 0 if train < infer else BINS - 1] == 1


def test_half_precision_is_subtracted_in_full():
    train, infer = np.array([[-4.004]], dtype=np.float16), np.array([[-1e-3]], dtype=np.float16)
    found = tally(train, infer, [[1]])
    assert found[0, bin_of(train.astype(float) - infer.astype(float))[0, 0]] == 1


@pytest.mark.parametrize("name", ["logp_infer", "mask", "atom"])
def test_shapes_that_differ_are_refused(name):
    given = {n: np.zeros((2, 3), dtype=int) for n in ("logp_infer", "mask", "atom")}
    given[name] = np.zeros((3, 2), dtype=int)
    with pytest.raises(EvidenceError, match=rf"{name} has shape \(3, 2\), and logp_train \(2, 3\)"):
        tally(np.zeros((2, 3)), *given.values(), 1)


@pytest.mark.parametrize("atom", [-1, 4])
def test_an_atom_that_is_not_there_is_refused(atom):
    with pytest.raises(EvidenceError, match=f"a token lies in atom {atom}, and there are 4 from 0"):
        tally([[0.0, 0.0]], [[0.0, 0.0]], [[1, 1]], [[0, atom]], 4)


def test_no_tokens_are_no_evidence():
    assert tally(np.zeros((0, 5)), np.zeros((0, 5)), np.zeros((0, 5))).sum() == 0
    assert tally(np.zeros((2, 5)), np.zeros((2, 5)), np.zeros((2, 5))).sum() == 0
