import numpy as np
import pytest
from benchmarks.experiment.seeds import Spread

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_the_interval_over_seeds_is_students(n):
    values = np.random.default_rng(n).standard_normal(n)

    found = Spread(tuple(values)).interval

    wanted = stats.t.interval(0.95, n - 1, loc=values.mean(), scale=stats.sem(values))
    assert found == pytest.approx(wanted, rel=2e-4)


def test_one_seed_has_no_interval():
    assert Spread((0.5,)).told() == "0.50"


def test_differences_are_taken_seed_by_seed():
    assert Spread((0.5, 0.7)).minus(Spread((0.25, 0.5))).values == pytest.approx((0.25, 0.2))


def test_more_seeds_than_quantiles_is_an_error():
    with pytest.raises(ValueError, match="11 seeds"):
        Spread((0.0,) * 11)
