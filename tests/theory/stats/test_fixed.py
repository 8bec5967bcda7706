# Fixed for ever: stored evidence, and everything that is signed with a digest, means what it does
# only while these stay as they are.  Each is written down here a second time.

import math

import numpy as np
import pytest

from servanda.contract.identity import EvidenceKey
from servanda.judgement.evidence import Evidence, Weighed
from servanda.promotion.ledger.entry import Record, sealed
from servanda.theory.stats.bets import NEG, POS, Coherence, Refutation
from servanda.theory.stats.group_ratio import GroupRatio
from servanda.theory.stats.histogram import BINS, ZERO, edges
from servanda.theory.stats.interval import interval
from servanda.theory.stats.log_moment import SCALE, LogMoment
from tests import oracles


def test_the_bets_and_their_scale():
    assert NEG.tolist() == pytest.approx(oracles.NEG, rel=1e-13)
    assert POS.tolist() == pytest.approx(oracles.POS, rel=1e-13)
    assert SCALE == 1_099_511_627_776
    one = LogMoment.of(np.array([1.0]))
    logs = (one.below[-1], one.above[8])
    assert logs == pytest.approx((math.log(0.01) * 2**40, math.log(2) * 2**40), abs=100)


def test_the_bets_of_coherence():
    """A weight of 2 grows each bet by log(1 + bet); rounding takes a millionth of a nat off it."""
    bets = [0.01 * 99 ** (i / 15) for i in range(16)]
    grown = [math.expm1(g) for g in Coherence.of(np.array([math.log(2.0)])).growth]
    assert grown == pytest.approx(bets, rel=3e-6)


def test_the_bins():
    least, most = edges()
    assert (BINS, ZERO) == (31749, 15874)
    assert (least[ZERO], most[ZERO], least[ZERO + 1]) == (0.0, 0.0, 0.0)
    steps = [2.0**-24 * (1 + i / 2**9) for i in range(3)]
    assert most[ZERO + 1 : ZERO + 4].tolist() == pytest.approx(steps, rel=1e-6)
    assert (most[0], least[BINS - 1]) == pytest.approx((-128.0, 128.0), rel=1e-6)


def test_the_ends_of_an_interval_are_known_far_below_a_small_mean():
    """A million zeros: the upper end is some millionths, and known to 2 in a thousand million."""
    for ones, n in ((0, 10**6), (3, 10**6), (10**6 - 3, 10**6)):
        found = interval(LogMoment.of(np.repeat([1.0, 0.0], [ones, n - ones])), 0.05)
        low, high = oracles.bernoulli_ends(ones, n, 0.05)
        assert found[1] == pytest.approx(high, rel=1e-4, abs=2e-9) and found[1] >= high
        assert found[0] == pytest.approx(low, rel=1e-4, abs=2e-9) and found[0] <= low


def evidence() -> Evidence:
    """Of numbers that are the same on every machine."""
    ratio = GroupRatio(4, 3, np.array([0.5, 2.0]), np.array([1, 4]), np.array([0, 0]))
    moment = LogMoment(2, (1,) * 16, (-2,) * 33, 0.75, 1)
    one = Weighed((ratio, None), (((0.25, 3),), None), (0.5, None), 3, 6, 1, 3)
    two = Weighed((None, Refutation(2, (0.5, -1.0), 1)), (None, moment), (), 1, 2)
    key = EvidenceKey("c" * 32, "d" * 32, "e" * 32, "f" * 32, "0" * 32)
    return Evidence(key, "plan", {("chat", 1): one, ("chat", 0): one}, {"timing": two})


def test_the_digest_of_evidence():
    assert evidence().digest == "8ae14aa1633ceb21e78b9874b3f34830"


def test_the_head_of_a_ledger():
    records = [
        Record("begun", "ci", 1_700_000_000.25, {"why": "é", "n": [1, 2.5, None, True]}),
        Record("told", "servanda", 1_700_000_001.0, {}),
    ]
    first, head = sealed(None, "tiny", 0, records, b"")
    assert (first.prev, first.hash) == ("0" * 32, "359c6e041c2a378f21af49b06d43ea87")
    assert (head.prev, head.hash) == (first.hash, "1c12ab4cb7ba97a9593e3296931fb3a2")
    keyed = sealed(None, "tiny", 0, records, b"key")[-1]
    assert keyed.hash == "312ef7dee6a4b00b45c2210d715a6e22"
