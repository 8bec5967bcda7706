"""The alert rules and the dashboard, against a leader that runs, promtool and Prometheus."""

import json
import re
import subprocess

import pytest
import yaml

from servanda.gateway.controller.web.metrics import ANSWERED, REPLIES
from servanda.gateway.routing.model import STATUSES
from tests.deploy.live import DEPLOY, MONITORING, ROOT, until

DASHBOARD = DEPLOY / "grafana" / "servanda-gateway.json"
RUNBOOK = ROOT / "docs" / "how-to" / "runbook.md"
RULES = yaml.safe_load((MONITORING / "alerts.yaml").read_text(encoding="utf-8"))
TESTS = yaml.safe_load((MONITORING / "alerts_test.yaml").read_text(encoding="utf-8"))["tests"]
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
NAMES = [rule["alert"] for rule in ALERTS]
# values of labels that the leader may export, and has not yet exported in the test
VOCABULARY = {"state": {*STATUSES}, "pool": {*ANSWERED}, "status": {*REPLIES}, "result": {"other"}}
OF_PROMETHEUS = {"up": {"job", "instance"}, "ALERTS": {"alertname", "alertstate"}}
SELECTOR = re.compile(r"\b(servanda_\w+|up|ALERTS)\b(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!=|!~|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")


def panels():
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]


def queries():
    """Each query of the dashboard with the title of its panel."""
    return [(p["title"], target["expr"]) for p in panels() for target in p.get("targets", ())]


def expressions():
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    yield from ((rule["alert"], rule["expr"]) for rule in ALERTS)
    yield from queries()
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]
    yield from ((one["name"], one["expr"]) for one in board["annotations"]["list"])


def wrong(expression, live):
    """Metrics, labels and values of an expression that a leader does not export."""
    labels = live.labels | OF_PROMETHEUS
    used = SELECTOR.findall(expression)
    grouped = {w.strip() for words in GROUPING.findall(expression) for w in words.split(",")}
    known = set().union(*(labels.get(name, ()) for name, _ in used))
    yield from (f"label {label}" for label in grouped - known)
    for name, matchers in used:
        if name not in labels:
            yield f"metric {name}"
            continue
        for label, operator, value in MATCHER.findall(matchers):
            if label not in labels[name]:
                yield f"label {name}.{label}"
            elif name in live.labels and "$" not in value:
                exported = live.values[name, label] | VOCABULARY.get(label, set())
                words = value.split("|") if "~" in operator else [value]
                yield from (f"value {name}.{label}={w}" for w in words if w not in exported)


@pytest.mark.slow
def test_rules_and_dashboard_read_only_what_a_leader_exports(live):
    found = {where: [*wrong(expression, live)] for where, expression in expressions()}
    assert {where: words for where, words in found.items() if words} == {}


@pytest.mark.slow
def test_each_metric_of_a_leader_is_on_the_board(live):
    shown = {name for _, expression in queries() for name, _ in SELECTOR.findall(expression)}
    shown = {re.sub("_(total|bucket)$", "", name) for name in shown}
    assert live.families - shown == set()


@pytest.mark.parametrize(
    ("expression", "finds"),
    [
        ("servanda_slices", "metric servanda_slices"),
        ('servanda_samples_total{pool="infer"}', "label servanda_samples_total.pool"),
        ('servanda_samples_total{outcome=~"scored|lost"}', "outcome=lost"),
        ("sum by (team) (servanda_problems)", "label team"),
    ],
)
def test_a_name_that_no_leader_exports_is_found(live, expression, finds):
    (found,) = wrong(expression, live)
    assert finds in found


def test_series_of_the_unit_tests_have_the_labels_of_a_leader(live):
    for case in TESTS:
        for one in case["input_series"]:
            ((name, matchers),) = SELECTOR.findall(one["series"])
            labels = {label for label, _, _ in MATCHER.findall(matchers)}
            assert labels == (live.labels | OF_PROMETHEUS)[name], one["series"]


def test_every_alert_is_tested_while_it_fires_and_while_it_does_not():
    fires, quiet = set(), set()
    for case in TESTS:
        for one in case["alert_rule_test"]:
            (fires if one["exp_alerts"] else quiet).add(one["alertname"])
    assert fires == quiet == {*NAMES}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml")]
)
def test_promtool_accepts_the_rules(promtool, words):
    done = subprocess.run([promtool, *words], cwd=MONITORING, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def test_promtool_accepts_the_configuration(promtool):
    words = [promtool, "check", "config", "--syntax-only", "prometheus.yml"]
    done = subprocess.run(words, cwd=MONITORING, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_its_section_of_the_runbook():
    sections = re.findall(r"^## (Servanda\w+)$", RUNBOOK.read_text(encoding="utf-8"), re.M)
    assert sections == NAMES
    for rule in ALERTS:
        link = f"docs/how-to/{RUNBOOK.name}#{rule['alert'].lower()}"
        assert rule["annotations"]["runbook_url"] == link
        assert {*rule["annotations"]} == {"summary", "description", "runbook_url"}
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_the_dashboard_is_one_that_grafana_loads():
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len({*ids})
    source = {"type": "prometheus", "uid": "${datasource}"}
    filled = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24 and not cells & filled, panel["title"]
        filled |= cells
        if panel["type"] == "row":
            continue
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(refs) == len({*refs}), panel["title"]
        assert panel["datasource"] == source
        assert all(target["datasource"] == source for target in panel["targets"])
        used = {*re.findall(r"\$(\w+)", json.dumps(panel["targets"]))}
        assert used <= {*variables, "__rate_interval", "datasource"}, panel["title"]


@pytest.mark.slow
def test_prometheus_answers_every_query_of_the_dashboard(prometheus):
    for title, expression in queries():
        asked = expression.replace("$__rate_interval", "1m")
        asked = asked.replace("$contract", "toy").replace("$slice", ".*")
        assert prometheus.query(asked), (title, asked)


def test_a_diverted_slice_fires_its_alert_in_prometheus(prometheus):
    alert = until(lambda: prometheus.firing().get("ServandaSliceDiverted"), "the alert fires")
    assert alert["labels"]["slice"] == "team=d"
    assert alert["annotations"]["summary"] == (
        "team=d of toy violates its limit and is served by stable"
    )
    assert {*prometheus.firing()} == {"ServandaSliceDiverted"}
