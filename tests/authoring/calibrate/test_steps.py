# Limits of two significant digits: exactly those, in order, and never rounded down.

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from servanda.authoring.calibrate import rounding

positive = st.floats(1e-10, 1e10)


@given(positive)
def test_a_limit_is_the_next_number_of_two_digits(x):
    found = rounding.value(rounding.at_or_above(x))
    before = rounding.value(rounding.at_or_above(x) - 1)

    assert before < x <= found
    assert len(Decimal(repr(found)).normalize().as_tuple().digits) <= 2


@given(st.integers(rounding.LOWEST, 900))
def test_a_number_of_two_digits_is_its_own_step(step):
    assert rounding.at_or_above(rounding.value(step)) == step


@given(st.floats(0.001, 90.0), st.floats(0.001, 90.0))
def test_the_first_step_that_meets_is_found(edge, top):
    high = rounding.at_or_above(top)
    one_by_one = [
        s for s in range(rounding.at_or_above(1e-4), high + 1) if rounding.value(s) >= edge
    ]

    found = rounding.first(rounding.at_or_above(1e-4), high, lambda limit: limit >= edge)

    assert found == (one_by_one[0] if one_by_one else None)
