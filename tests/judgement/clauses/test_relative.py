# Limits relative to something measured: the intervals keep their promise, the answers make sense.

import numpy as np
import pytest

import servanda as sv
from servanda.contract.model import Clause
from servanda.judgement.clauses.base import Cell, Interim
from servanda.judgement.clauses.statistical import Compared, Feed, RelativeToNoise
from servanda.judgement.slices.rules import Cut
from servanda.runner import run
from servanda.theory.stats.group_ratio import GroupRatio
from servanda.theory.stats.log_moment import LogMoment
from tests import kit

CLAUSE = Clause.model_validate(
    {
        "id": "drift",
        "metric": "tv",
        "aggregate": "mean",
        "at_most": {"times": 3.0, "of": "self_noise"},
    }
)
KIND = RelativeToNoise(Feed(limit=1.0), times=3.0)


def cell(claim="realised", capacity=8):
    return Cell(CLAUSE, "statistical", (), Cut("all"), claim, capacity, KIND, "workload")


def rounds(rng, mean, noise, n=40, size=64, claim="realised"):
    """Closed rounds of Bernoulli x at `mean`, with a tenth measured again at `noise` a side."""

    def process(share, count):
        x = (rng.random(count * 8) < share).astype(float)
        if claim == "realised":
            return LogMoment.of(x)
        totals = x.reshape(count, 8).sum(axis=1)
        return GroupRatio(8, count, totals, np.full(count, 8), np.zeros(count, dtype=int))

    peers = ("self_train", "self_infer")
    return [
        Compared(process(mean, size), {name: process(noise, size // 8) for name in peers})
        for _ in range(n)
    ]


def judge(measured, claim="realised", floor=None):
    return KIND.judge(cell(claim), measured, floor, Interim(0.05, 4, 0, len(measured) * 64))


@pytest.mark.parametrize("claim", ["realised", "population"])
def test_far_from_the_limit_it_is_decided(claim):
    rng = np.random.default_rng(1)
    kept = judge(rounds(rng, 0.03, 0.05, claim=claim), claim)
    broken = judge(rounds(rng, 0.4, 0.02, claim=claim), claim)
    assert (kept.outcome, broken.outcome) == ("holds", "violated")
    assert kept.limit == pytest.approx(0.15, rel=0.2)
    assert "3 times the noise floor of the noisier side" in kept.note


def test_red_lies_beyond_twice_the_floor_too():
    rng = np.random.default_rng(3)
    measured = rounds(rng, 0.4, 0.02)
    assert judge(measured).outcome == "violated"
    noisy = judge(measured, floor=0.3)
    assert noisy.outcome == "inconclusive" and "noise floor" in noisy.note


def test_without_noise_nothing_can_be_relative_to_it(tmp_path):
    """A table kernel is bitwise the same in every batch, so three times its noise is 0."""
    more = (
        "  - {id: drift, metric: k3_nats, aggregate: mean, clip: 1.0, "
        "at_most: {times: 3.0, of: self_noise}}"
    )
    path, _ = kit.write(tmp_path, more=more, last=320)
    verdict = sv.check(path, run_dir=tmp_path / "run", open=run.in_process)
    (drift,) = (c for c in verdict.cells if c.clause == "drift")
    assert drift.outcome == "inconclusive"
    assert "exactly 0" in drift.note and "write a number" in drift.note
    assert verdict.exit_code == 3


@pytest.mark.parametrize(
    ("stable_tv", "answer"), [(0.05, "holds"), (0.002, "violated")], ids=["worse", "better"]
)
def test_a_limit_relative_to_stable_measures_stable_beside(tmp_path, stable_tv, answer):
    kit.table(tmp_path, "s.json", {"": kit.moved(kit.BASE, stable_tv)})
    more = (
        "  - {id: as_stable, metric: tv, aggregate: mean, at_most: {times: 1.5, of: stable}, "
        "slices: [all]}"
    )
    path, _ = kit.write(
        tmp_path,
        q={"": kit.moved(kit.BASE, 0.03)},
        limit=0.2,
        more=more,
        width=8,
        claim="realised",
        last=4000,
        stable="s.json",
    )
    verdict = sv.check(path, run_dir=tmp_path / "run", open=run.in_process)
    (found,) = (c for c in verdict.cells if c.clause == "as_stable")
    assert found.outcome == answer
    assert found.stable == pytest.approx(stable_tv, abs=0.01)
    assert found.limit == pytest.approx(1.5 * found.stable)
    assert verdict.stable == "table s.json"
    plain = next(c for c in verdict.cells if c.clause == "tv")
    assert plain.stable == pytest.approx(stable_tv, abs=0.01)  # shown beside every clause


def test_a_plain_break_is_red_though_nothing_is_relative_to_no_noise(tmp_path):
    """Noise floor of exactly 0 cannot be met, and it can be broken: the run goes on until it is."""
    more = "  - {id: drift, metric: tv, aggregate: mean, at_most: {times: 3.0, of: self_noise}}"
    q = {"": kit.moved(kit.BASE, 0.3)}
    path, _ = kit.write(tmp_path, q=q, limit=0.9, more=more, claim="realised", last=4000)
    verdict = sv.check(path, run_dir=tmp_path / "run", open=run.in_process)
    (drift,) = (c for c in verdict.cells if c.clause == "drift")
    assert drift.outcome == "violated" and verdict.exit_code == 1
