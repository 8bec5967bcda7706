# The rank rule against an enumeration of all orders, and against its definition in fractions.

import math
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.runner.run_history.rank_rule import margin, scores, worse

RUNS = st.integers(2, 5)


def tables(values):
    """Values of some runs in some cells, and their noise floors."""
    shape = st.tuples(RUNS, st.integers(1, 3))
    return shape.flatmap(
        lambda rc: st.tuples(
            *(
                st.lists(
                    st.lists(of, min_size=rc[1], max_size=rc[1]), min_size=rc[0], max_size=rc[0]
                )
                for of in (values, st.sampled_from([0, 0, 1]))
            )
        )
    )


def oracle(value_RC, floor_RC):
    """The rule by its definition: (gap above the others) / (largest - smallest), exact."""
    found = []
    for r, row in enumerate(value_RC):
        shares = [Fraction(0)]
        for c, x in enumerate(row):
            column = [other[c] for other in value_RC]
            rest = column[:r] + column[r + 1 :]
            gap = Fraction(x) - max(map(Fraction, rest))
            if gap > 0 and gap > floor_RC[r][c]:
                shares.append(gap / (Fraction(x) - min(map(Fraction, column))))
        found.append(max(shares))
    return all(found[-1] > other for other in found[:-1])


@given(tables(st.integers(0, 6)))
def test_the_rule_is_its_definition(table):
    value_RC, floor_RC = table
    assert worse(value_RC, floor_RC) == oracle(value_RC, floor_RC)


@given(tables(st.integers(0, 4)))
def test_of_all_orders_of_the_runs_at_most_one_in_n_is_called_worse(table):
    """Exchangeable runs: each order is equally likely, so the share is the probability."""
    value_RC, floor_RC = table
    orders = [*permutations(range(len(value_RC)))]

    called = sum(
        worse([value_RC[i] for i in order], [floor_RC[i] for i in order]) for order in orders
    )

    assert Fraction(called, len(orders)) <= Fraction(1, len(value_RC))


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_without_ties_and_floors_the_probability_is_exactly_one_in_n(n):
    """Powers of other bases in three cells have no two equal shares."""
    value_RC = [
        [float(base ** ((k * step) % n)) for base, step in ((2, 1), (3, 1), (5, 1))]
        for k in range(n)
    ]
    zero_RC = [[0.0] * 3 for _ in range(n)]
    assert len({*scores(value_RC, zero_RC)} - {0.0}) >= 1

    called = sum(worse([value_RC[i] for i in order], zero_RC) for order in permutations(range(n)))

    assert Fraction(called, math.factorial(n)) == Fraction(1, n)


def test_values_that_are_all_equal_and_infinite_ones_have_an_answer():
    assert not worse([[1.0], [1.0], [1.0]], [[0.0]] * 3)
    assert worse([[1.0], [1.0], [math.inf]], [[0.0]] * 3)
    assert not worse([[1.0], [math.inf], [math.inf]], [[0.0]] * 3)
    assert margin(math.inf, [math.inf, 1.0]) == 0.0


@pytest.mark.parametrize(
    ("cells", "shift", "low", "high"),
    [(13, 0, 0.05, 0.14), (13, 3, 0.37, 0.52), (13, 5, 0.76, 0.89), (1, 3, 0.85, 0.95)],
)
def test_how_often_a_rise_of_one_cell_is_found(cells, shift, low, high):
    """Normal values, in standard deviations between good runs; the page has these numbers."""
    rng, repeats = np.random.default_rng(1), 400
    zero_RC = [[0.0] * cells for _ in range(11)]
    found = 0
    for value_RC in rng.standard_normal((repeats, 11, cells)):
        value_RC[-1, 0] += shift
        found += worse(value_RC.tolist(), zero_RC)
    assert low < found / repeats < high
