# A clock that nobody sets.

import time

import pytest

from servanda.gateway.http.clock import SteadyClock


@pytest.mark.parametrize("set_by", [-86_400.0, 7_200.0, 1e9])
def test_it_goes_on_at_an_even_pace_when_the_systems_clock_is_set(set_by):
    wall, steady = [1_700_000_000.0], [40.0]
    clock = SteadyClock(lambda: wall[0], lambda: steady[0])
    assert (clock(), clock.moved_s) == (1_700_000_000.0, 0.0)
    wall[0] += 10.0 + set_by
    steady[0] += 10.0
    assert (clock(), clock.moved_s) == (1_700_000_010.0, set_by)


def test_it_begins_as_the_systems_clock_does():
    assert SteadyClock()() == pytest.approx(time.time(), abs=1.0)
