# Versions: what a claim about weights is refuted at.

import math
from types import SimpleNamespace

import pytest

from servanda.rl.monitor.ranks import Part, extras_of
from servanda.rl.monitor.statistics import wrong_versions
from servanda.theory.stats.version_fit import VersionFit

FITS = {
    ("a", 1): VersionFit(20, 0, 1.0, 2.0, (0, 0)),
    ("a", -1): VersionFit(0, 20, 2.0, 1.0, (0, 0)),
    ("b", 1): VersionFit(19, 0, 1.0, 2.0, (0, 0)),
}


@pytest.mark.parametrize(
    ("alpha", "named"),
    [
        (3 * 2.0**-20, {"a"}),
        (math.nextafter(3 * 2.0**-20, 0), set()),
        (3 * 2.0**-19, {"a", "b"}),
        (math.nextafter(3 * 2.0**-19, 0), {"a"}),
    ],
)
def test_all_comparisons_of_a_step_share_alpha(alpha, named):
    """20 of 20 fair tosses have a probability of 2^-20."""
    assert {*wrong_versions(FITS, 7, alpha)} == named


@pytest.mark.parametrize(("alpha", "count"), [(3 * 2.0**-20, 1), (2.9 * 2.0**-20, 0)])
def test_the_ranks_of_a_step_are_compared_at_the_alpha_of_its_plan(alpha, count):
    parts = [Part("", "", 7, versions={key: fit}) for key, fit in FITS.items()]
    *_, metrics = extras_of(SimpleNamespace(alpha=alpha), parts, 7)
    assert metrics["servanda/version/wrong_replicas"] == count
