# What counts of gateways say of the traffic lately.

import pytest

from servanda.contract.policy import Routing
from servanda.gateway.controller.gateways import Gateways
from servanda.gateway.controller.messages import Message
from servanda.gateway.controller.status import ReplicaStatus


def report(gateways, now, n, *, name="g", start=1.0, **more):
    counts = {
        "launched": {"all": n, "tools": n / 4},
        "decisions": {"tools\tinfer\tshare": n / 4, "all\tinfer\tshare": n - n / 4},
        "peak": {"infer": 3, "stable": 2},
        "slice_in_flight": {"all": 2.0, "tools": 0.5},
        **more,
    }
    gateways.record(Message(name, start, 1, counts=counts), now=now)


@pytest.mark.parametrize("every_s", [0.2, 0.9, 1.0, 5.0])
def test_shares_and_rates_are_those_of_lately_however_often_it_reports(every_s):
    gateways = Gateways()
    times = [1000 + i * every_s for i in range(int(200 / every_s))]
    for now in times:
        report(gateways, now, 10 * (now - 1000))
    assert gateways.shares(times[-1]) == pytest.approx({"all": 1.0, "tools": 0.25})
    assert gateways.rates(times[-1]) == pytest.approx({"all": 10.0, "tools": 2.5})


def test_nothing_is_known_before_two_reports():
    gateways = Gateways()
    assert gateways.facts(1000.0, {}).stable_in_flight is None
    report(gateways, 1000.0, 40)
    facts = gateways.facts(1000.0, {})
    assert (facts.shares, facts.stable_in_flight, facts.in_flight["tools"]) == ({}, 2.0, 0.5)


def test_a_gateway_that_begins_again_counts_from_nothing():
    gateways = Gateways()
    report(gateways, 1000.0, 1000)
    report(gateways, 1010.0, 2000)
    report(gateways, 1011.0, 0, start=2.0)
    report(gateways, 1021.0, 100, start=2.0)
    assert gateways.rates(1021.0) == pytest.approx({"all": 10.0, "tools": 2.5})
    report(gateways, 1022.0, 9999)  # late, of the process that ended
    assert gateways.rates(1021.0) == pytest.approx({"all": 10.0, "tools": 2.5})


def test_a_gateway_whose_clock_went_back_while_it_was_away_is_heard_again():
    gateways = Gateways()
    report(gateways, 1000.0, 1000, start=5000.0)
    report(gateways, 1011.0, 0, start=1010.0)
    report(gateways, 1021.0, 100, start=1010.0)
    assert gateways.rates(1021.0) == pytest.approx({"all": 10.0, "tools": 2.5})


def test_what_was_lately_goes_on_when_the_clock_of_the_leader_went_back():
    gateways = Gateways()
    for second in range(100):
        report(gateways, 5000.0 + second, 10 * second, peak={"stable": 50})
    for second in range(100):
        report(gateways, 1000.0 + second, 1000 + 10 * second, peak={"stable": 2})
    assert gateways.rates(1099.0) == pytest.approx({"all": 10.0, "tools": 2.5})
    assert gateways.facts(1099.0, {}).stable_in_flight == 2.0


def test_a_count_beyond_any_number_is_none():
    gateways = Gateways()
    report(gateways, 1000.0, 0, peak={"infer": 10**400, "stable": 2})
    assert gateways.facts(1000.0, {}).stable_in_flight == 2.0
    assert gateways.pools(1000.0, Routing())["infer"].peak == 0


def test_peaks_of_gateways_add_up_and_one_that_is_silent_answers_nobody():
    gateways = Gateways()
    report(gateways, 1000.0, 0, name="a")
    report(gateways, 1000.5, 0, name="a", peak={"stable": 7})
    report(gateways, 1000.7, 0, name="a")
    report(gateways, 1000.0, 0, name="b")
    assert gateways.facts(1001.0, {}).stable_in_flight == 9.0
    report(gateways, 1030.0, 0, name="b")
    assert gateways.facts(1030.0, {}).stable_in_flight == 2.0


def test_a_slice_that_stable_serves_keeps_its_share():
    """Infer is sent nothing of it any more, and it is decided for all the same."""
    gateways = Gateways()
    away = {"tools\tstable\ttools quarantined": 0, "all\tinfer\tshare": 0}
    report(gateways, 1000.0, 0, decisions=away, launched={"all": 0})
    more = {"tools\tstable\ttools quarantined": 25, "all\tinfer\tshare": 75}
    report(gateways, 1010.0, 0, decisions=more, launched={"all": 75})
    assert gateways.shares(1010.0) == {"all": 1.0, "tools": 0.25}


def test_what_served_is_added_up_over_gateways():
    gateways = Gateways()
    for name, n in (("a", 10), ("b", 20)):
        answers = {"tools\tinfer": n, "all\tinfer": 3 * n}
        report(gateways, 1000.0, 4 * n, name=name, answers=answers)
    assert gateways.served() == {"tools": {"infer": 30}, "all": {"infer": 120}}


REPLICAS = Routing.model_validate(
    {"replicas": {"infer": [{"url": "http://a/v1", "weight": 2}, {"url": "http://b"}]}}
)


def test_a_replica_is_used_where_every_gateway_that_reports_it_says_so():
    gateways, up = Gateways(), {"up": True, "why": "", "weight": 2, "in_flight": 3}
    down = {"up": False, "why": "it refuses connections", "in_flight": 0}
    odd = {"up": "yes", "in_flight": 7}
    report(gateways, 1000.0, 0, name="1", servers={"infer": {"http://a": up, "http://b": up}})
    report(gateways, 1000.0, 0, name="2", servers={"infer": {"http://a": up, "http://b": down}})
    report(gateways, 1000.0, 0, name="3", servers={"infer": {"http://a": odd, "http://evil": up}})
    report(gateways, 1000.0, 0, name="4", servers="none")

    a, b = gateways.pools(1001.0, REPLICAS)["infer"].replicas
    assert a == ReplicaStatus("http://a", 2.0, used_at=2, in_flight=6)
    assert b == ReplicaStatus(
        "http://b", used_at=1, out_at=1, why="it refuses connections", in_flight=3
    )
    assert gateways.pools(1001.0, Routing())["infer"].replicas == ()
