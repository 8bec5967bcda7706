# Alpha: the parts of one whole add up to at most the whole, and each is what the definition says.

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.theory.stats.alpha import (
    attempt_alpha,
    log_price,
    log_shared,
    look_alpha,
    next_look,
    shared,
    step_alpha,
)

# share of the n-th of a series, and what the first n leave of the whole, in closed form
SERIES = {
    look_alpha: (lambda k: Fraction(1, k * (k + 1)), lambda n: Fraction(1, n + 1)),
    step_alpha: (lambda t: Fraction(2, (t + 1) * (t + 2)), lambda n: Fraction(2, n + 2)),
    attempt_alpha: (
        lambda r: Fraction(1, 10 * (r - 1) * r) if r > 1 else Fraction(9, 10),
        lambda n: Fraction(1, 10 * n),
    ),
}


@pytest.mark.parametrize("series", SERIES)
def test_all_of_a_series_spend_the_whole_once(series):
    share, left = SERIES[series]
    exact = [share(n) for n in range(1, 200)]
    assert all(sum(exact[:n]) == 1 - left(n) for n in (1, 2, 50, 199))
    assert [series(1.0, n) for n in range(1, 200)] == pytest.approx([*map(float, exact)], rel=1e-14)


@given(st.floats(1e-12, 1), st.lists(st.sampled_from([shared, *SERIES]), max_size=4), st.data())
def test_parts_of_parts_add_up_to_at_most_the_whole(alpha, ways, data):
    """A tree: of each level one part is divided again, and the others are spent."""
    spent, part = 0.0, alpha
    for way in ways:
        n = data.draw(st.integers(1, 30))
        parts = [part / n] * n if way is shared else [way(part, k) for k in range(1, n + 1)]
        assert way is not shared or shared(part, n) == parts[0]
        chosen = data.draw(st.integers(0, n - 1))
        spent += math.fsum(parts) - parts[chosen]
        part = parts[chosen]
    assert spent + part <= alpha * (1 + 1e-12)


@given(st.floats(1e-12, 1), st.integers(1, 10**6))
def test_a_look_knows_the_next_and_several_need_more_evidence(alpha, n):
    assert next_look(look_alpha(alpha, n), n) == pytest.approx(look_alpha(alpha, n + 1), rel=1e-12)
    assert math.exp(-log_price(alpha)) == pytest.approx(alpha, rel=1e-12)
    assert log_price(shared(alpha, n)) == pytest.approx(log_price(alpha) + log_shared(n), rel=1e-12)


def test_no_decision_leaves_the_whole_and_attempts_begin_at_1():
    assert (shared(0.05, 0), log_shared(0)) == (0.05, 0.0)
    with pytest.raises(ValueError, match="the first attempt is number 1, not 0"):
        attempt_alpha(0.05, 0)
