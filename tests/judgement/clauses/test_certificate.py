# Certificates of metrics whose sampled values may be negative.

import math

import numpy as np
import pytest

from servanda.contract.model import Clause
from servanda.errors import ContractError
from servanda.judgement.clauses.statistical import feed_of
from servanda.runner import run
from tests import kit, oracles


def clause(metric, **more):
    return Clause.model_validate({"id": "c", "metric": metric, "at_most": 0.01, **more})


@pytest.mark.parametrize(
    ("metric", "more"),
    [
        ("le_cam", {"aggregate": "mean"}),
        ("mass_gap", {"aggregate": "mean", "clip": 1.0}),
        ("tv_contribution", {"aggregate": "mean", "clip": 2.0}),
        ("chi2", {"aggregate": "mean", "clip": 1.0}),
        ("k1_nats", {"aggregate": "p99"}),
        ("mass_gap", {"aggregate": "p99"}),
    ],
)
def test_what_is_certified_lies_between_0_and_1(metric, more):
    """LogMoment is valid for nothing else; -1 and beyond the clip included."""
    feed = feed_of(clause(metric, **more))
    low = -1.0 if metric in ("le_cam", "mass_gap") else 0.0
    x = feed.x(np.array([low, 0.0, 0.5, 1.0, 100.0 if metric != "le_cam" else 1.0, math.inf]))
    assert ((x >= 0) & (x <= 1)).all()
    assert 0 <= feed.best <= feed.limit <= 1
    if feed.threshold is None:
        assert feed.value(feed.limit) == pytest.approx(0.01)
        assert feed.value(float(feed.x(np.array([0.25]))[0])) == pytest.approx(0.25)


def test_a_mean_without_a_smallest_value_has_no_certificate():
    assert feed_of(clause("k1_nats", aggregate="mean", clip=1.0)) is None


def test_a_mean_without_a_largest_value_is_refuted_and_never_shown():
    assert not feed_of(clause("k3_nats", aggregate="mean")).proves
    assert feed_of(clause("k3_nats", aggregate="mean", clip=1.0)).proves


def test_the_red_line_is_twice_the_floor_in_units_of_the_metric():
    feed = feed_of(clause("le_cam", aggregate="mean"))
    noisy = float(feed.x(np.array([0.04]))[0])
    assert feed.value(feed.red_line(noisy)) == pytest.approx(0.08)
    assert feed.value(feed.red_line(float(feed.x(np.array([0.001]))[0]))) == pytest.approx(0.01)
    assert feed.red_line(None) == feed.limit


@pytest.mark.parametrize(("limit", "outcome"), [(0.06, "holds"), (0.01, "violated")])
def test_le_cam_is_certified_from_sampled_tokens(tmp_path, limit, outcome):
    q = kit.moved(kit.BASE, 0.15)
    more = f"  - {{id: lc, metric: le_cam, aggregate: mean, at_most: {limit}, slices: all}}"
    path, _ = kit.write(tmp_path, q={"": q}, limit=0.3, more=more, claim="realised", last=4000)
    verdict = run.check(path, run_dir=tmp_path / "run", open=run.in_process)
    (cell,) = (c for c in verdict.cells if c.clause == "lc")
    truth = oracles.EXACT["le_cam"](kit.BASE, q)
    assert cell.outcome == outcome
    assert cell.limit == pytest.approx(limit)
    assert cell.interval[0] < truth < cell.interval[1]
    assert cell.value == pytest.approx(truth, abs=0.02)


def test_a_limit_out_of_reach_is_said_before_anything_runs(tmp_path):
    """Identical kernels read 0, which is the middle of what one token can read."""
    more = "  - {id: lc, metric: le_cam, aggregate: mean, at_most: 0.0001, slices: all}"
    path, _ = kit.write(tmp_path, limit=0.3, more=more, claim="realised", last=64)
    with pytest.raises(ContractError, match="clause 'lc' cannot hold on slice 'all'"):
        run.check(path, run_dir=tmp_path / "run", open=run.in_process)
