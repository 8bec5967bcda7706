# The guard rescored_ratio: how much of what infer served was scored again.

from dataclasses import replace

import pytest

from servanda.contract.stages import Leg
from servanda.runner.run import check, in_process
from tests import kit, serving
from tests.promotion.run.test_looking import SHADOW, at, cell

GUARD = "observability: {{clauses: [{{id: coverage, metric: scoring_rate, {}}}]}}"


def write(folder, clause="at_least: 0.05", **more):
    return kit.write(folder, golden=GUARD.format(clause), limit=0.3, **more)[0]


def traffic(path, n=160):
    """Every tenth request is logged, one a second from second 1000 on."""
    return serving.log(path.parent, serving.rows(path, "shadow", n))


def test_enough_of_the_traffic_was_scored(tmp_path):
    path = write(tmp_path)

    found = cell(at(path, traffic(path)), "coverage")

    assert (found.outcome, found.value, found.limit) == ("holds", 0.1, 0.05)
    assert (found.n, found.units, found.slice) == (1600, "requests", "all")


def test_too_little_is_inconclusive_and_never_a_pass(tmp_path):
    """It is nothing against the kernel: so it holds a promotion, and rolls none back."""
    path = write(tmp_path, "at_least: 0.2")

    found = at(path, traffic(path))

    coverage = cell(found, "coverage")
    assert (coverage.outcome, coverage.open, coverage.value) == ("inconclusive", True, 0.1)
    assert coverage.note == (
        "160 of 1,600 requests that infer served were scored again: log a larger sample of them"
    )
    assert cell(found, "tv").outcome == "holds"
    assert found.verdict.outcome == "inconclusive"


def test_too_little_does_not_cover_up_what_was_found(tmp_path):
    path = write(tmp_path, "at_least: 0.2", q={"": kit.moved(kit.BASE, 0.34)})
    path.write_text(path.read_text().replace("at_most: 0.3", "at_most: 0.1"))

    found = at(path, traffic(path))

    assert found.verdict.outcome == "violated"


def test_what_arrived_and_was_not_scored_yet_is_served_all_the_same(tmp_path):
    path = write(tmp_path)

    found = cell(at(path, traffic(path, 100)), "coverage")

    assert (found.value, found.n) == (0.096, 1000)  # 96 of 100 logged are in closed rounds


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("now", "served", "scored"),
    [(1160.0, 590, 59), (1189.0, 300, 30), (1101.0, 600, 60), (2000.0, 0, 0)],
)
def test_a_window_counts_what_was_launched_in_it(tmp_path, now, served, scored):
    """Rows came at 1000, 1001, ... 1159; ten requests were served for each.

    What says that it comes later than now is of no window.
    """
    path = write(tmp_path, "at_least: 0.05, over: 1m")

    found = cell(at(path, traffic(path), now=now), "coverage")

    assert found.n == served
    assert found.value == (scored / served if served else None)
    assert found.outcome == ("holds" if served else "inconclusive")
    if not served:
        assert found.note == "infer served no request in the last 1m"


@pytest.mark.parametrize("now", [900.0, 1e6])
def test_a_clock_of_the_log_that_is_wrong_makes_no_old_traffic_new(tmp_path, now):
    """Requests of a year ago, and of tomorrow, are none of the last minute."""
    path = write(tmp_path, "at_least: 0.05, over: 1m")

    found = cell(at(path, traffic(path), now=now), "coverage")

    assert (found.outcome, found.n) == ("inconclusive", 0)
    assert found.note == "infer served no request in the last 1m"


def test_nothing_served_is_inconclusive(tmp_path):
    path = write(tmp_path)

    found = cell(at(path, tmp_path / "served.jsonl"), "coverage")

    assert (found.outcome, found.n) == ("inconclusive", 0)
    assert found.note == "infer served no request"


def test_a_leg_that_has_all_it_asked_for_is_covered_up_to_there(tmp_path):
    """Else a long dwell would take back what the leg has shown."""
    path = write(tmp_path, "at_least: 0.09, over: 1m")
    leg = replace(SHADOW, first=32, last=96)

    found = at(path, traffic(path), leg, now=9000.0)

    assert cell(found, "coverage").outcome == "holds"
    endless = replace(leg, if_inconclusive="wait")
    waiting = at(path, tmp_path / "served.jsonl", endless, root="waits", now=9000.0)
    assert cell(waiting, "coverage").outcome == "inconclusive"


def test_it_costs_none_of_alpha(tmp_path):
    path, without = write(tmp_path / "a"), kit.write(tmp_path / "b", limit=0.3)[0]

    prices = [at(p, traffic(p)).verdict.price_cells for p in (path, without)]

    assert prices[0] == prices[1]


def test_offline_it_is_not_applicable(tmp_path):
    path = write(tmp_path)

    for verdict in (
        check(path, run_dir=tmp_path / "checked", open=in_process),
        at(path, [], Leg("offline", first=32, last=2000)).verdict,
    ):
        assert cell(verdict, "coverage").outcome == "not applicable"
        assert cell(verdict, "coverage").note == "nothing is served offline: it concerns traffic"
        assert verdict.outcome == "holds"
