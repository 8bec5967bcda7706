# Searches: the first bad build, and the fewest settings, with a test that may be undecided.

import itertools
import math

import pytest

from servanda.errors import MeasurementError
from servanda.runner.bisect.search import fewest_settings, first_bad


@pytest.mark.parametrize("n", [2, 3, 7, 16, 17])
def test_every_first_bad_build_is_found_in_log_n_probes(n):
    for first in range(1, n):
        asked = []

        def judge(i, first=first, asked=asked):
            asked.append(i)
            return "bad" if i >= first else "good"

        assert first_bad([*map(str, range(n))], judge) == (first - 1, first)
        assert len(asked) <= 2 + math.ceil(math.log2(n - 1)) and len(asked) == len({*asked})


def test_skipped_builds_are_never_taken_for_good_or_bad():
    n = 8
    for first in range(1, n):
        for skipped in itertools.combinations(range(1, n - 1), 3):

            def judge(i, first=first, skipped=skipped):
                return "skip" if i in skipped else "bad" if i >= first else "good"

            low, high = first_bad([*map(str, range(n))], judge)
            assert low < first <= high  # the truth is within, and what is between was skipped
            assert {*range(low + 1, high)} <= {*skipped}


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        (("bad", "bad"), "the first build, 0, has to be good, and it is bad"),
        (("good", "good"), "the last build, 1, has to be bad, and it is good"),
        (("skip", "bad"), "the first build, 0, has to be good, and it is not decided"),
    ],
)
def test_the_ends_are_tested(outcomes, message):
    with pytest.raises(MeasurementError, match=message):
        first_bad(["0", "1"], lambda i: outcomes[i])


SETTINGS = tuple("abcdefgh")


def test_any_two_settings_that_are_bad_together_are_found():
    for culprits in itertools.combinations(SETTINGS, 2):
        found = fewest_settings(
            SETTINGS, lambda some, c={*culprits}: "bad" if c <= {*some} else "good"
        )
        assert found.settings == culprits and found.undecided == ()


def test_settings_that_are_not_monotone_leave_a_set_from_which_none_can_go():
    def judge(some):
        """Bad with c, but e cures it, unless h is there, too."""
        return "bad" if "c" in some and ("e" not in some or "h" in some) else "good"

    found = fewest_settings(SETTINGS, judge)
    assert judge(found.settings) == "bad"
    assert all(
        judge(tuple(s for s in found.settings if s != gone)) == "good" for gone in found.settings
    )


def test_a_setting_whose_removal_is_undecided_is_said_to_be():
    def judge(some):
        if "c" in some and "d" not in some:
            return "skip"
        return "bad" if {"c", "d"} <= {*some} else "good"

    found = fewest_settings(SETTINGS, judge)
    assert found.settings == ("c", "d") and found.undecided == ("d",)


def test_a_kernel_that_is_bad_without_settings_is_refused():
    with pytest.raises(MeasurementError, match="without settings has to be good, and it is bad"):
        fewest_settings(SETTINGS, lambda _: "bad")
