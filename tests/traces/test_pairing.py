# sv.pair: arrays of a trainer -> the tokens that it learns from, on both sides.

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import servanda as sv
from servanda.errors import EvidenceError
from servanda.traces.trace import Batch, Trace, without_mass_beyond


def lists(draw_mask):
    """Mask [B, T] -> (turn, turn_position, length) of each trained token, one by one."""
    found = []
    for row in draw_mask:
        turn = since = 0
        before = False
        for i, inside in enumerate(row):
            if inside:
                turn, since = (turn, since + 1) if before else (turn + 1, 0)
                found.append((turn, since, i))
            before = inside
    return found


@given(
    st.integers(1, 8).flatmap(
        lambda t: st.lists(st.lists(st.booleans(), min_size=t, max_size=t), min_size=1, max_size=5)
    )
)
def test_turns_are_the_stretches_of_the_mask(mask):
    logp = np.zeros(np.shape(mask)) - 1.0

    pair = sv.pair(logp, logp, mask)

    columns = pair.infer.columns
    made = zip(
        *(columns[name].tolist() for name in ("turn", "turn_position", "length")), strict=True
    )
    assert list(made) == lists(mask)
    assert pair.infer.length_S.tolist() == [sum(row) for row in mask]
    firsts = [row.index(True) if any(row) else len(row) for row in mask]
    assert pair.infer.prompt_tokens_S.tolist() == firsts


def test_padded_and_flat_arrays_are_the_same_pair():
    train, infer = np.array([[-1.0, -2.0], [-3.0, -4.0]]), np.array([[-1.5, -2.5], [-3.5, -4.5]])
    mask = np.array([[0, 1], [1, 1]])

    padded = sv.pair(train, infer, mask, groups=["a", "b"], labels={"env": ["x", "y"]})
    flat = sv.pair(train.ravel(), infer.ravel(), mask.ravel(), lengths=[2, 2], groups=["a", "b"])

    for side in ("train", "infer"):
        assert np.array_equal(
            getattr(padded, side).columns["logp"], getattr(flat, side).columns["logp"]
        )
    assert padded.train.columns["logp"].tolist() == [-2.0, -3.0, -4.0]
    assert padded.group_S == flat.group_S == ("a", "b")
    assert padded.labels == {"env": ("x", "y")}


def test_an_absent_logprob_is_missing_and_never_zero():
    pair = sv.pair([[np.nan, -1.0]], [[-1.0, -1.0]], [[1, 1]])

    assert pair.usable_N.tolist() == [False, True]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: sv.pair([[0.0]], [[0.0, 1.0]], [[1]]),
            "logp_infer has shape (1, 2), and the mask (1, 1)",
        ),
        (
            lambda: sv.pair([0.0], [0.0], [1]),
            "a mask of shape (1,) does not say where sequences end\n"
            "  hint: give [sequences, tokens], or lengths=",
        ),
        (
            lambda: sv.pair([0.0], [0.0], [1], lengths=[2]),
            "the lengths add up to 2 tokens, and the mask has shape (1,)",
        ),
        (
            lambda: sv.pair([[0.0]], [[0.0]], [[1]], groups=["a", "b"]),
            "1 sequences have 2 values of groups",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(call, message):
    with pytest.raises(EvidenceError) as caught:
        call()
    assert str(caught.value) == message


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5), min_size=1, max_size=4))
def test_a_kernel_gives_no_mass_to_what_it_does_not_draw(responses):
    """Kernel ends at 3; the one that drew ends at 4, or at either."""
    trace = Trace.of(
        Batch(tuple(range(len(responses))), ((0,),) * len(responses), 5),
        [len(tokens) for tokens in responses],
        [token for tokens in responses for token in tokens],
        {"logp": np.full(sum(map(len, responses)), -1.0)},
    )

    found = without_mass_beyond(trace, (3,), (3, 4), 5).columns["logp"]

    expected = []
    for tokens in responses:
        for i, token in enumerate(tokens):
            after = 3 in tokens[:i]
            stops = token == 4 and i == len(tokens) - 1 < 4
            expected.append(-math.inf if after or stops else -1.0)
    assert found.tolist() == expected
    assert without_mass_beyond(trace, (), (4,), 5) is trace
