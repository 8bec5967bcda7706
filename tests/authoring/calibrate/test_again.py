# Later runs: drawn once each, the groups of a run give its own evidence, limit by limit.

from dataclasses import replace

import numpy as np
import pytest

from servanda.authoring.calibrate.limits import Resampled, closed_rounds, draw_counts, top_share
from servanda.judgement.clauses.statistical import Certificate, Feed, total
from servanda.runner import run
from servanda.runner.finished_run import reread
from tests import kit

MORE = """\
  - {id: tail, metric: abs_log_ratio_nats, aggregate: p90, at_most: 0.5}
  - {id: reward, metric: reward_drift, at_most: 0.9, slices: [all, first]}
reward: {range: [0, 2]}
"""
LIMITS = (0.01, 0.05, 0.11, 0.4)


@pytest.mark.slow
@pytest.mark.parametrize("claim", ["population", "realised"])
@pytest.mark.parametrize("samples", [1, 3])
def test_the_run_itself_is_one_of_its_later_runs(tmp_path, claim, samples):
    path, _ = kit.write(
        tmp_path,
        q={"": kit.moved(kit.BASE, 0.02), "a": kit.moved(kit.BASE, 0.05)},
        slices="slices: [{name: first, split: labels.first}, "
        "{name: depth, split: context.position, at: [2]}]",
        claim=claim,
        samples=samples,
        limit=0.5,
        first=192,
        last=192,
        more=MORE,
    )
    verdict = run.check(path, run_dir=tmp_path / "run", open=run.in_process)
    compared = 0
    with reread(tmp_path / "run", verdict) as found:
        rounds = closed_rounds(found.plan, verdict.key, found.rounds)["workload"]
    once = np.ones((1, rounds.groups))
    for cell in found.plan.cells:
        if not isinstance(cell.kind, Certificate):
            continue
        for limit in LIMITS:
            again = Resampled(cell, cell.kind, rounds, once, 0.0)
            kind = again.at(limit)
            process = total(cell, [kind.process(cell, view) for view in rounds.own])
            log_e = process.log_e_below(kind.feed.limit, kind.feed.weights[0])
            for price, holds in ((log_e - 1e-6, True), (log_e + 1e-6, False)):
                assert replace(again, log_price=price, _known={}).holds(limit).tolist() == [holds]
            compared += 1
    assert compared == 4 * (6 + 6 + 4)


def test_later_runs_vary_by_what_one_run_does_not_know_and_by_their_own_draws():
    """The variance of a mean is that of both runs: sigma^2 (1/G + 1/size)."""
    rng = np.random.default_rng(3)
    x_G = rng.exponential(1.0, 400)

    count_BG = draw_counts(400, 1000, 4000, rng)

    assert count_BG.shape == (4000, 400) and (count_BG.sum(axis=1) == 1000).all()
    mean_B = count_BG @ x_G / 1000
    assert mean_B.mean() == pytest.approx(x_G.mean(), abs=0.01)
    assert mean_B.var() == pytest.approx(x_G.var() * (1 / 400 + 1 / 1000), rel=0.1)


@pytest.mark.parametrize(("sigma", "share"), [(0.01, 0.051), (1.0, 0.26), (2.0, 0.64)])
def test_the_top_groups_carry_what_the_law_of_their_means_says(sigma, share):
    """Of a lognormal the largest 5 % carry Phi(sigma - 1.645)."""
    total_G = np.exp(sigma * np.random.default_rng(7).standard_normal(400_000))
    assert top_share(total_G) == pytest.approx(share, abs=0.01)
    assert top_share(np.zeros(9)) == 0.0
    assert top_share(np.array([-5.0, 1.0, 1.0])) == 0.5


def test_the_top_of_a_slice_is_that_of_the_groups_that_met_it():
    """Of a hundred groups five met the slice, alike: one of them carries a fifth."""
    met_G = np.zeros(100)
    met_G[:5] = 1.0
    kind = Certificate(Feed(limit=0.1))
    sums = {("sums", None): (0.3 * met_G, met_G, np.zeros(100))}
    again = Resampled(None, kind, None, np.ones((1, 100)), 0.0, sums)
    assert again.top == pytest.approx(0.2)
