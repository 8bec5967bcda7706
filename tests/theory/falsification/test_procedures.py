# The simulated procedures are the ones that ship, ours keep their promise, and the habits do not.

import math

import numpy as np
import pytest
from benchmarks.theory import SCENARIOS, Row, scenarios, simulate, simulation
from benchmarks.theory.change_point import ShiryaevRoberts
from benchmarks.theory.inverse_probability import Unequal
from benchmarks.theory.simulation import Draw

from servanda.theory.stats.bets import NEG, POS
from servanda.theory.stats.group_ratio import GroupRatio
from servanda.theory.stats.log_moment import LogMoment

RUNS = 120


@pytest.fixture(scope="module")
def rows():
    return [row for name in SCENARIOS for row in simulate(name, RUNS)]


@pytest.fixture
def draw():
    """Three runs of 12 groups, of which some tokens are not there and some are lost."""
    rng = np.random.default_rng(2)
    shape = (3, 12, 5)
    there_RGT = rng.random(shape) < 0.8
    there_RGT[:, 4] = False  # a group that never met the slice
    return Draw.of(
        rng.random(shape) ** 3,
        0.2,
        0.2,
        there_RGT=there_RGT,
        lost_RGT=rng.random(shape) < 0.1,
        every=4,
    )


def rounds(draw, r):
    """What one run measured, round by round: (values that came back, how many did not)."""
    for first in range(0, draw.x_RGT.shape[1], draw.every):
        part = slice(first, first + draw.every)
        back = draw.there_RGT[r, part] & ~draw.lost_RGT[r, part]
        yield draw.x_RGT[r, part][back], int(draw.lost_RGT[r, part].sum())


def test_the_simulated_log_moment_is_the_one_that_judges(draw):
    limit_RK = np.full((3, 3), 0.2)
    below_RK, above_RK = simulation.log_moment_e(draw, limit_RK)
    for r in range(3):
        process = LogMoment()
        for k, (x, lost) in enumerate(rounds(draw, r)):
            process += LogMoment.of(x, missing=lost)
            assert below_RK[r, k] == pytest.approx(process.log_e_below(0.2), abs=1e-8)
            assert above_RK[r, k] == pytest.approx(process.log_e_above(0.2), abs=1e-8)
            assert draw.n_RK[r, k] == process.n


def test_the_simulated_unequal_is_the_one_that_judges(draw):
    rng = np.random.default_rng(5)
    chance_RGT = rng.choice([0.2, 0.5, 1.0], draw.x_RGT.shape)
    scored_RGT = draw.there_RGT & (rng.random(draw.x_RGT.shape) < chance_RGT)
    below_RK, above_RK = simulation.unequal_e(draw, scored_RGT, chance_RGT, 0.2)
    for r in range(3):
        process = Unequal(0.2)
        for k, first in enumerate(range(0, 12, draw.every)):
            at = (r, slice(first, first + draw.every))
            back, lost = (scored_RGT[at] & side for side in (~draw.lost_RGT[at], draw.lost_RGT[at]))
            process += Unequal.of(
                draw.x_RGT[at][back],
                chance_RGT[at][back],
                int(draw.there_RGT[at].sum()),
                0.2,
                chance_RGT[at][lost],
            )
            assert below_RK[r, k] == pytest.approx(process.log_e_below(0.2), abs=1e-8)
            assert above_RK[r, k] == pytest.approx(process.log_e_above(0.2), abs=1e-8)
    assert draw.lost_RGT[scored_RGT].any()


def test_the_simulated_group_ratio_is_the_one_that_judges(draw):
    below_RK, above_RK = simulation.group_ratio_e(draw)
    back = draw.there_RGT & ~draw.lost_RGT
    for r in range(3):
        for k in range(3):
            upto = slice(0, (k + 1) * draw.every)
            met = draw.tokens_RG[r, upto] > 0
            process = GroupRatio(
                5,
                launched=upto.stop,
                total_G=np.where(back, draw.x_RGT, 0.0)[r, upto].sum(axis=1)[met],
                tokens_G=back[r, upto].sum(axis=1)[met],
                missing_G=draw.lost_RGT[r, upto].sum(axis=1)[met],
            )
            assert below_RK[r, k] == pytest.approx(process.log_e_below(0.2), abs=1e-8)
            assert above_RK[r, k] == pytest.approx(process.log_e_above(0.2), abs=1e-8)


@pytest.mark.parametrize("threshold", [1.5, 3.0, 30.0])
def test_the_simulated_alarm_is_the_one_that_rings(threshold):
    rng = np.random.default_rng(4)
    draw = Draw.of(rng.random((20, 12, 5)) ** 3, 0.25, 0.2, every=4)
    fired = []
    for r in range(20):
        alarm, ever = ShiryaevRoberts(0.2, threshold), False
        for x, _ in rounds(draw, r):
            alarm = alarm.after(LogMoment.of(x))
            ever |= alarm.fires
        fired.append(ever)
    assert simulation.shiryaev_roberts(draw, 0.2, threshold).violated_R.tolist() == fired
    assert threshold > 20 or any(fired)


@pytest.mark.parametrize(("bets", "side"), [(NEG, "log_e_below"), (POS, "log_e_above")])
def test_shares_are_log_moment_of_zeros_and_ones(bets, side):
    hits, n = np.array([[0.0, 3.0, 7.0]]), np.array([[5.0, 10.0, 20.0]])
    found = simulation.share_e(bets, hits, n, 0.3)
    for i in range(3):
        ones = np.arange(n[0, i]) < hits[0, i]
        process = LogMoment.of(ones.astype(float))
        assert found[0, i] == pytest.approx(getattr(process, side)(0.3), abs=1e-8)


@pytest.mark.slow
def test_nothing_of_ours_is_wrong_more_often_than_alpha(rows):
    assert [row for row in rows if row.ours and row.beyond] == []


# the others count how many of so many tokens diverge, and draw nothing else
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", sorted({*SCENARIOS} - {"retries", "many slices"}))
def test_what_a_scenario_says_of_its_truth_is_so(name, monkeypatch):
    """Over 225 runs, x is on average what was expected of it, and its total the truth's."""
    seen = []

    def noted(gate):
        return lambda draw, *more: seen.append(draw) or gate(draw, *more)

    for gate in ("log_moment", "group_ratio", "unequal"):
        monkeypatch.setattr(scenarios, gate, noted(getattr(scenarios, gate)))
    for _, ours, _ in SCENARIOS[name].run(np.random.default_rng(9), 225):
        for draw in seen if ours else ():
            tokens_R = draw.there_RGT.sum(axis=(1, 2))
            total_R = draw.x_RGT.sum(axis=(1, 2))
            excess_R = total_R - (draw.mean_RGT * draw.there_RGT).sum(axis=(1, 2))
            assert abs(excess_R.mean()) < 4 * excess_R.std() / 15
            if not math.isnan(draw.truth):
                beyond_R = total_R - draw.truth * tokens_R
                assert abs(beyond_R.mean()) < 4 * beyond_R.std() / 15
        seen.clear()


@pytest.mark.slow
def test_every_scenario_has_ours_and_a_habit(rows):
    for name in SCENARIOS:
        assert {row.ours for row in rows if row.scenario == name} == {True, False}


def test_a_prompt_group_is_no_unit_where_a_batch_is(rows):
    ours, habit = (row for row in rows if row.scenario == "shared batches")
    assert ours.ours and not ours.beyond
    assert not habit.ours and habit.wrong > 0.3


@pytest.mark.parametrize(
    ("scenario", "habit"),
    [
        ("file order", "GroupRatio, population, prompts in file order"),
        ("lengths", "mean of per-sequence means, once"),
        ("completion order", "LogMoment, realised, completion order"),
        ("missing", "LogMoment, realised, missing tokens left out"),
        ("steady traffic", "mean of 5 rounds > 1.5 limit"),
    ],
)
def test_some_habits_are_wrong_every_time(rows, scenario, habit):
    (row,) = (r for r in rows if (r.scenario, r.procedure) == (scenario, habit))
    assert row.wrong == 1.0


def test_the_same_seed_gives_the_same_numbers_and_another_does_not():
    assert simulate("clustered", 40, 3) == simulate("clustered", 40, 3)
    assert simulate("clustered", 40, 3) != simulate("clustered", 40, 4)


def test_allowed_is_alpha_and_the_margin_of_the_number_of_runs():
    row = Row("s", "p", True, "holds", 1000, 0.06)
    assert row.allowed == pytest.approx(0.05 + 2.326 * math.sqrt(0.05 * 0.95 / 1000))
    assert not row.beyond and row.ratio == pytest.approx(1.2)
    assert Row("s", "p", True, "holds", 100_000, 0.06).beyond
