# A sampler that is not what it says: its logprobs are train's own, and its tokens are not theirs.

import math

import numpy as np
import pytest

from servanda.gateway.controller.watched_cells import select_cells
from servanda.runner.load import load
from servanda.theory.stats.bets import LEAK
from servanda.theory.stats.likelihood_ratio import RequestDraws, names
from tests.gateway.controller import controllers

REPORTED = np.array(controllers.NEARLY[""])
WIDTH = 6


@pytest.fixture
def clock():
    return controllers.Clock()


def tempered(temperature):
    return lambda q: q ** (1 / temperature)


def nucleus(top_p):
    return lambda q: np.where(np.cumsum(q) - q < top_p, q, 0.0)


def redrawn(rows, sampler, seed=0, of="a"):
    """Rows whose tokens are drawn otherwise where their prompt begins with `of`."""
    rng = np.random.default_rng(seed)
    mass = sampler(REPORTED)
    best = [[int(t), math.log(REPORTED[t])] for t in np.argsort(-REPORTED)[:4]]
    found = []
    for row in rows:
        if row["labels"].get("first") != of:
            found.append(row)
            continue
        tokens = rng.choice(len(mass), WIDTH, p=mass / mass.sum()).tolist()
        ends = tokens.index(4) + 1 if 4 in tokens else WIDTH
        found.append(
            {
                **row,
                "token_ids": tokens[:ends],
                "logprobs": [math.log(REPORTED[t]) for t in tokens[:ends]],
                "best": [best] * ends,
                "finish": "stop" if 4 in tokens else "length",
            }
        )
    return found


def acting(folder, **more):
    return controllers.contract(
        folder, routing=controllers.ACTING, labels=controllers.LABELS, **more
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "as_with"),
    [
        (tempered(0.5), "temperature 0.6"),
        (tempered(2.5), "temperature 1"),
        (nucleus(0.75), "top-p 0."),
    ],
)
def test_a_slice_whose_tokens_are_drawn_otherwise_leaves_infer(tmp_path, clock, sampler, as_with):
    path = acting(tmp_path)
    leader = controllers.controller(path, clock)
    controllers.drive(leader, clock, redrawn(controllers.rows(path, 400), sampler))

    gone = controllers.status(leader, "first=a")
    assert gone.status != "active" and gone.route == 0.0
    first, *_ = [t for t in leader.status().transitions if t.after == "quarantined"]
    assert first.slice == "first=a" and first.acted and first.cell == "sampler_fidelity on first=a"
    assert "tokens are not sampled as infer reports, but closer to " + as_with in first.reason
    assert math.isnan(first.limit) and abs(first.value) > 0.1  # nats a token
    assert first.log_evidence >= first.log_price
    assert {controllers.status(leader, name).status for name in ("first=b", "first=c")} == {
        "active"
    }
    leader.close()


@pytest.mark.slow
def test_it_comes_back_once_the_sampler_is_refuted_for_which_it_left(tmp_path, clock):
    path = acting(tmp_path)
    leader = controllers.controller(path, clock)
    wrong = redrawn(controllers.rows(path, 300), tempered(0.5))
    controllers.drive(leader, clock, wrong)
    assert controllers.status(leader, "first=a").status in ("quarantined", "probation")

    # the same fault all through the probation: it stays away, whatever the certificates say
    still = redrawn(
        controllers.rows(path, 600, start=300, at=clock.now + 100), tempered(0.5), seed=1
    )
    controllers.drive(leader, clock, still, first=300)
    assert controllers.status(leader, "first=a").status in ("quarantined", "probation")

    sound = controllers.rows(path, 1500, start=900, at=clock.now + 1000)
    controllers.drive(leader, clock, sound, first=900)
    assert controllers.status(leader, "first=a").status in ("recovering", "active")
    leader.close()


def test_where_likeliest_tokens_were_asked_for_and_are_not_there_they_are_missing(tmp_path, clock):
    path = acting(tmp_path)
    leader = controllers.controller(path, clock)
    rows = [{**row, "x-best": 4} for row in controllers.rows(path, 40)]
    without = [{k: v for k, v in row.items() if k != "best"} for row in rows[:20]]
    controllers.drive(leader, clock, without)
    cell = next(c for c in controllers.status(leader, "all").cells if c.refutes)
    assert cell.n == 20 and cell.missing == sum(len(row["token_ids"]) for row in without)
    told = {(one.clause, one.slice): one.why for one in leader.status().left_out}
    assert told == {("sampler_fidelity", "any slice"): "the infer kernel reports no top-k logprobs"}

    controllers.drive(leader, clock, rows[20:], first=20)
    assert not leader.status().left_out
    leader.close()


def test_a_request_that_asked_for_no_likeliest_tokens_says_nothing_of_the_draw(tmp_path, clock):
    path = acting(tmp_path)
    leader = controllers.controller(path, clock)
    rows = [{k: v for k, v in row.items() if k != "best"} for row in controllers.rows(path, 20)]
    controllers.drive(leader, clock, [{**row, "x-best": 0} for row in rows])
    cells = {c.clause: c.n for c in controllers.status(leader, "all").cells}
    assert cells == {"tv": 20, "sampler_fidelity": 0}
    leader.close()


def test_requests_with_and_without_likeliest_tokens_share_a_batch(tmp_path, clock):
    path = acting(tmp_path)
    leader = controllers.controller(path, clock)
    rows = [{**row, "x-best": 4} for row in controllers.rows(path, 40)]
    mixed = [
        row if i % 2 else {k: v for k, v in row.items() if k != "best"}
        for i, row in enumerate(rows)
    ]
    controllers.drive(leader, clock, mixed)
    cell = next(c for c in controllers.status(leader, "all").cells if c.refutes)
    assert cell.n == 40
    assert cell.missing == sum(len(row["token_ids"]) for row in rows[::2])
    leader.close()


def test_the_evidence_of_a_request_is_a_fair_bet_on_each_side():
    """By enumeration of one token: a mean of 1 under the report, and under each other sampler."""
    ids, logp = np.array([[0, 1, 2]]), np.log([[0.5, 0.2, 0.1]])
    masses = np.array([0.5, 0.2, 0.1, 0.2])  # the last: some token that is not listed
    told = [RequestDraws.of(ids, logp, np.array([t])) for t in (0, 1, 2, 9)]
    above_JT, below_JT = (
        np.exp(np.array([getattr(one, side) for one in told]).T) for side in ("above", "below")
    )
    assert above_JT.shape == (len(names()), 4)
    np.testing.assert_allclose(above_JT @ masses, 1.0, atol=1e-5)
    assert (above_JT @ masses <= 1).all()
    against_J = (above_JT * masses * below_JT).sum(axis=1)
    np.testing.assert_allclose(against_J, 1.0, atol=1e-4)
    assert (against_J <= 1).all()
    assert min(above_JT.min(), below_JT.min()) >= LEAK
    assert sum(m * one.total for m, one in zip(masses, told, strict=True)) == pytest.approx(0)


def test_every_slice_with_a_certificate_is_watched_for_how_its_tokens_are_drawn(tmp_path):
    found = select_cells(load(acting(tmp_path)))
    assert [c.slice for c in found.draws] == list(dict.fromkeys(s for _, s in found.by_name))
    assert all(c.diverts == "slice" and c.pages == ("oncall",) for c in found.draws)
