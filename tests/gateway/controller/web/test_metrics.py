"""What Prometheus is told: read back by its own parser."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from servanda.gateway.controller.status import PoolStatus, ReplicaStatus, ScoringStatus
from servanda.gateway.controller.web.metrics import REASONS, Metrics
from tests.gateway.controller.web import fake
from tests.gateway.controller.web.serving import bearer, live

ROOT = Path(__file__).parents[4]
FAMILIES = {
    "servanda_leads",
    "servanda_info",
    "servanda_samples",
    "servanda_clause_verdict",
    "servanda_clause_estimate",
    "servanda_clause_bound_lower",
    "servanda_clause_bound_upper",
    "servanda_clause_limit",
    "servanda_clause_log_evidence",
    "servanda_clause_log_price",
    "servanda_slice_state",
    "servanda_split_users",
    "servanda_split_planned_ratio",
    "servanda_split_log_evidence",
    "servanda_split_log_price",
    "servanda_slice_acts",
    "servanda_route_decisions",
    "servanda_infer_weight_ratio",
    "servanda_diverted_ratio",
    "servanda_snapshot_version",
    "servanda_snapshot_age_seconds",
    "servanda_snapshot_valid_seconds",
    "servanda_rescore_queue_depth",
    "servanda_rescore_lag_seconds",
    "servanda_rescore_engine_seconds",
    "servanda_route_answers",
    "servanda_upstream_replies",
    "servanda_upstream_first_byte_seconds",
    "servanda_failovers",
    "servanda_prompt_checks",
    "servanda_refused_keys",
    "servanda_observer_failed",
    "servanda_unsampled",
    "servanda_breaker_open",
    "servanda_gateway_overhead_seconds",
    "servanda_transitions",
    "servanda_gateways",
    "servanda_problems",
    "servanda_upstream_requests",
    "servanda_upstream_up",
}


class Told:
    """Metrics of a standing that the test moves on."""

    def __init__(self, standing=None):
        self.status = standing or fake.status()
        self.metrics = Metrics(lambda: self.status, lambda: 4)

    def read(self):
        text, _ = self.metrics.exposition()
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text.decode())
            for sample in family.samples
        }

    def value(self, name, **labels):
        found = [
            value
            for (other, has), value in self.read().items()
            if other == name and labels.items() <= dict(has).items()
        ]
        assert len(found) == 1, (name, labels, found)
        return found[0]


def test_the_reference_names_the_metrics_that_there_are():
    names = {
        name
        for family in text_string_to_metric_families(
            Metrics(fake.status, int).exposition()[0].decode()
        )
        for name in [f"{family.name}_total" if family.type == "counter" else family.name]
    }
    page = (ROOT / "docs" / "reference" / "gateway_metrics.md").read_text(encoding="utf-8")
    assert {*re.findall(r"^\| `(servanda_\w+)`", page, re.M)} == names


def test_every_metric_is_there_with_a_type_and_words():
    text, _ = Metrics(fake.status, int).exposition()
    families = [*text_string_to_metric_families(text.decode())]
    assert {family.name for family in families} == FAMILIES
    for family in families:
        assert family.documentation and family.type != "unknown"
        assert all(sample.labels["contract"] == "gateway-demo" for sample in family.samples)


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("servanda_info", {"digest": "3982d4a0e1b2c3d4", "mode": "enforce"}, 1),
        ("servanda_samples_total", {"outcome": "scored"}, 1_912),
        ("servanda_samples_total", {"outcome": "dropped"}, 3),
        ("servanda_samples_total", {"outcome": "error"}, 7),
        ("servanda_clause_verdict", {"slice": "long", "clause": "tv-mean"}, 3),
        ("servanda_clause_verdict", {"slice": "all"}, 0),
        ("servanda_clause_estimate", {"slice": "long", "clause": "tv-mean"}, 0.1727),
        ("servanda_clause_bound_lower", {"slice": "long", "clause": "tv-mean"}, 0.8 * 0.1727),
        ("servanda_clause_bound_upper", {"slice": "long", "clause": "tv-mean"}, 1.2 * 0.1727),
        ("servanda_clause_log_evidence", {"slice": "long", "clause": "tv-mean"}, 9.1),
        ("servanda_slice_state", {"slice": "long", "state": "quarantined"}, 1),
        ("servanda_slice_state", {"slice": "long", "state": "active"}, 0),
        ("servanda_route_decisions_total", {"slice": "long", "reason": "quarantined"}, 380),
        ("servanda_route_decisions_total", {"slice": "all", "pool": "infer"}, 20_000),
        ("servanda_infer_weight_ratio", {}, 1),
        ("servanda_snapshot_version", {}, 17),
        ("servanda_snapshot_age_seconds", {}, 3),
        ("servanda_snapshot_valid_seconds", {}, 597),
        ("servanda_rescore_queue_depth", {}, 14),
        ("servanda_rescore_engine_seconds_total", {}, 212),
        ("servanda_rescore_lag_seconds_bucket", {"le": "5.0"}, 40),
        ("servanda_rescore_lag_seconds_bucket", {"le": "+Inf"}, 42),
        ("servanda_rescore_lag_seconds_count", {}, 42),
        ("servanda_rescore_lag_seconds_sum", {}, 99.5),
        ("servanda_gateway_overhead_seconds_bucket", {"le": "0.0002"}, 15),
        ("servanda_gateway_overhead_seconds_bucket", {"le": "1.0"}, 18),
        ("servanda_gateway_overhead_seconds_count", {}, 19),
        ("servanda_route_answers_total", {"slice": "long", "pool": "stable"}, 400),
        ("servanda_route_answers_total", {"slice": "all", "pool": "none"}, 10),
        ("servanda_upstream_replies_total", {"pool": "infer", "status": "5xx"}, 20),
        ("servanda_failovers_total", {"reason": "5xx"}, 20),
        ("servanda_prompt_checks_total", {"result": "other"}, 2),
        ("servanda_refused_keys_total", {"listener": "leader"}, 4),
        ("servanda_refused_keys_total", {"listener": "gateway"}, 6),
        ("servanda_observer_failed_total", {"observer": "capture"}, 3),
        ("servanda_observer_failed_total", {"observer": "log"}, 0),
        ("servanda_unsampled_total", {"reason": "no max_tokens"}, 3),
        ("servanda_breaker_open", {"pool": "infer"}, 0),
        ("servanda_upstream_first_byte_seconds_bucket", {"pool": "infer", "le": "0.1"}, 7),
        ("servanda_upstream_first_byte_seconds_count", {"pool": "infer"}, 8),
        ("servanda_transitions_total", {"from": "suspect", "to": "quarantined"}, 1),
        ("servanda_gateways", {}, 1),
        ("servanda_problems", {}, 0),
    ],
)
def test_each_number_is_the_one_of_the_standing(name, labels, value):
    assert Told().value(name, **labels) == pytest.approx(value)


def test_a_gateway_that_is_silent_for_longer_than_ten_seconds_does_not_count():
    heard = (fake.gateway(f"silent-{s}", heard=fake.NOW - s) for s in (1, 9.9, 10.1, 3_600))
    assert Told(fake.status(gateways=tuple(heard))).value("servanda_gateways") == 2


@pytest.mark.parametrize(("above", "verdict"), [(0.1, 0), (-0.1, 1)])
def test_a_limit_is_kept_once_that_is_shown(above, verdict):
    cell = fake.cell(log_below=fake.LEAVE + above)
    told = Told(fake.status(slices=(fake.slice_("all", cells=(cell,)),)))
    assert told.value("servanda_clause_verdict", slice="all") == verdict


def test_what_nobody_measured_is_absent_and_not_zero():
    empty = fake.cell(value=float("nan"), interval=None)
    bare = fake.status(
        slices=(fake.slice_("all", cells=(empty,)),),
        scoring=ScoringStatus(),
        gateways=(),
        made=0.0,
    )
    names = {name for name, _ in Told(bare).read()}
    for absent in (
        "servanda_clause_estimate",
        "servanda_clause_bound_lower",
        "servanda_snapshot_age_seconds",
        "servanda_rescore_lag_seconds_count",
        "servanda_gateway_overhead_seconds_count",
        "servanda_route_decisions_total",
    ):
        assert absent not in names
    assert "servanda_clause_limit" in names


def counters(read):
    ends = ("_total", "_bucket", "_count", "_sum")
    return {key: value for key, value in read.items() if key[0].endswith(ends)}


def grown(gateway, by):
    decisions = {key: n + by for key, n in gateway.counts["decisions"].items()}
    overhead = gateway.counts["overhead"]
    more = {
        "buckets": {bound: n + by for bound, n in overhead["buckets"].items()},
        "sum": overhead["sum"] + by,
    }
    answers = {key: n + by for key, n in gateway.counts["answers"].items()}
    counted = {"decisions": decisions, "overhead": more, "answers": answers}
    return replace(gateway, counts=gateway.counts | counted)


def test_no_counter_ever_falls():
    """A gateway restarts, another goes, a slice leaves the contract and comes back."""
    told = Told()
    one, two = fake.gateway("one"), fake.gateway("two")
    new = fake.gateway("one", start=fake.NOW, counts={"decisions": {"all\tinfer\tshare": 1}})
    whole = told.status.slices
    looks = [
        {"gateways": (one,)},
        {"gateways": (one, two)},
        {"gateways": (grown(one, 5), two)},
        {"gateways": (new, two)},
        {"gateways": (grown(one, 9), two), "slices": whole},
        {"gateways": (two,)},
        {"gateways": ()},
        {"gateways": (fake.gateway("three"),), "moves": 90},
    ]
    before = {}
    for look in looks:
        told.status = fake.status(**look)
        now = counters(told.read())
        assert now.keys() >= before.keys()
        for key, value in before.items():
            assert now[key] >= value, (key, look)
        before = now


def test_what_ended_gateways_counted_is_kept_once():
    told = Told(fake.status(gateways=(fake.gateway("one"),)))
    which = {"slice": "all", "pool": "infer", "reason": "share"}
    assert told.value("servanda_route_decisions_total", **which) == 20_000

    restarted = fake.gateway("one", start=fake.NOW, counts={"decisions": {"all\tinfer\tshare": 7}})
    told.status = fake.status(gateways=(restarted,))
    for _ in range(3):
        assert told.value("servanda_route_decisions_total", **which) == 20_007


def test_transitions_are_counted_once_and_none_is_lost():
    told = Told(fake.status())
    seen = {"from": "suspect", "to": "quarantined"}
    assert told.value("servanda_transitions_total", **seen) == 1
    assert told.value("servanda_transitions_total", **seen) == 1

    later = (
        fake.transition(61, "suspect", "quarantined"),
        fake.transition(62, "a", "active, pinned to x"),
    )
    told.status = fake.status(transitions=later, moves=62)

    assert told.value("servanda_transitions_total", **seen) == 2
    assert told.value("servanda_transitions_total", **{"from": "other", "to": "pinned"}) == 1
    assert told.value("servanda_transitions_total", **{"from": "unseen", "to": "unseen"}) == 58


HOSTILE = ['x"} 1\nservanda_evil 1', "\\", "\n", "a" * 10_000, "", "\u202e", "\t\t\t", "long\t\t"]


def test_nobody_who_sends_requests_can_make_a_series():
    counted = {f"{bad}{i}\tinfer\tshare": 1 for i in range(2_000) for bad in HOSTILE}
    counted |= {f"long\t{bad}{i}\t{bad}{i}": 1 for i in range(2_000) for bad in HOSTILE}
    counted |= {"long\tinfer\tshare": math.nan, "long\tstable\tshare": "many", "x": {}, "all": -1}
    overhead = {"buckets": dict.fromkeys(HOSTILE, 1), "sum": math.inf}
    odd = {
        "answers": {f"{bad}{i}\t{bad}": 1 for i in range(2_000) for bad in HOSTILE},
        "statuses": {f"infer\t{bad}{i}": 1 for i in range(2_000) for bad in HOSTILE},
        "failovers": dict.fromkeys(HOSTILE, 1),
        "prompts": dict.fromkeys(HOSTILE, 1),
        "unsampled": dict.fromkeys(HOSTILE, 1),
        "first_byte": dict.fromkeys(HOSTILE, overhead),
    }
    steps = tuple(fake.transition(i + 1, bad, bad) for i, bad in enumerate(HOSTILE))
    gateways = (
        fake.gateway(counts={"decisions": counted, "overhead": overhead, **odd}),
        *(fake.gateway(bad, counts={"decisions": [], "overhead": None}) for bad in HOSTILE),
        fake.gateway("odd", counts={"decisions": None, "overhead": {"buckets": "1", "sum": "x"}}),
    )
    told = Told(fake.status(gateways=gateways, transitions=steps, moves=len(steps)))

    read = told.read()

    assert not [name for name, _ in read if "evil" in name]
    decided = [dict(labels) for name, labels in read if name == "servanda_route_decisions_total"]
    assert {one["slice"] for one in decided} == {"long"}
    assert {one["pool"] for one in decided} <= {"infer", "stable", "refused", "other"}
    assert {one["reason"] for one in decided} <= {*REASONS}
    assert len(read) < 150


def test_a_name_with_quotes_is_told_as_it_is():
    odd = 'a"b\\c\nd'
    told = Told(fake.status(slices=(fake.slice_(odd),), name=odd))
    assert told.value("servanda_slice_acts", slice=odd, contract=odd) == 0


def test_a_scraper_gets_the_format_that_it_asks_for():
    with live(fake.Controller()) as client:
        plain = client.get("/metrics", headers=bearer("viewer"))
        assert plain.headers["content-type"].startswith("text/plain; version=")
        assert "servanda_info{" in plain.text
        accept = "application/openmetrics-text; version=1.0.0"
        metrics = client.get("/metrics", headers={**bearer("viewer"), "accept": accept})
        assert metrics.headers["content-type"].startswith("application/openmetrics-text")
        assert metrics.text.endswith("# EOF\n")


def test_replicas_of_the_contract_have_series_and_no_other_server_has():
    replicas = (
        ReplicaStatus("http://a", used_at=2),
        ReplicaStatus("http://b", used_at=1, out_at=1, why="it refuses connections"),
        ReplicaStatus("http://new"),
    )
    counts = {
        "infer\thttp://a\t2xx": 30,
        "infer\thttp://b\tconnect": 2,
        "infer\thttp://evil\t2xx": 1,
        "stable\thttp://a\t2xx": 1,
        "infer\thttp://b\todd": 1,
    }
    told = Told(
        fake.status(
            pools={"infer": PoolStatus(replicas=replicas)},
            gateways=(fake.gateway(counts={"replicas": counts}),),
        )
    )
    found = {
        (name, of["replica"], of.get("status", "")): value
        for (name, labels), value in told.read().items()
        if "replica" in (of := dict(labels))
    }
    assert found == {
        ("servanda_upstream_up", "http://a", ""): 1,
        ("servanda_upstream_up", "http://b", ""): 0,
        ("servanda_upstream_requests_total", "http://a", "2xx"): 30,
        ("servanda_upstream_requests_total", "http://b", "connect"): 2,
        ("servanda_upstream_requests_total", "http://b", "other"): 1,
    }
