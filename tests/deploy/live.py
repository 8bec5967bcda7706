# A gateway that has met everything that the dashboard shows, and the Prometheus that scrapes it.

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from pathlib import Path

import httpx2
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.running import ADA, WAIT_S, Serving, Users, ask, kernels, until

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MONITORING = DEPLOY / "prometheus"


SPLIT = """\
observability:
  clauses:
    - {id: split, metric: sample_ratio, stages: [canary]}
promotion: {canary: {steps: [1.0], sample: 1.0, prompt_groups: [400, 6000]}}
"""
STEP = {"run": "toy-1", "leg": "canary-1", "share": 1.0, "mirror": 0.0, "sample": 0.0}


class Live:
    """`servanda serve` of the toy contract while team=d is diverted."""

    def __init__(self, serving):
        self._serving = serving
        self.leader = serving.page.removeprefix("http://")
        self.labels, self.values, self.families = {}, {}, set()
        for name, labels, _ in self.samples():
            self.labels.setdefault(name, set()).update(labels)
            for label, value in labels.items():
                self.values.setdefault((name, label), set()).add(value)

    def samples(self):
        headers = {"authorization": f"Bearer {ADA}"}
        text = httpx2.get(f"{self._serving.page}/metrics", headers=headers, timeout=WAIT_S).text
        for family in text_string_to_metric_families(text):
            self.families.add(family.name)
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value


@contextlib.contextmanager
def gateway(folder):
    with contextlib.ExitStack() as stack:
        urls = stack.enter_context(kernels(folder / "kernels"))
        replicas = f'  replicas: {{stable: [{{url: "{urls[1]}"}}]}}\n'
        serving = stack.enter_context(Serving(folder / "serve", urls, more=replicas + SPLIT))
        url = serving.begun()
        headers = {"authorization": f"Bearer {ADA}"}
        at = f"{serving.page}/v1/admin/route"
        httpx2.post(at, json=STEP, headers=headers, timeout=WAIT_S).raise_for_status()
        with Users(url, pause_s=0.01):
            until(lambda: serving.slice("d")["status"] == "quarantined", "team=d is diverted")
        with serving.client() as client:
            ask(client, "a", presence_penalty=1.0)  # no evidence
            _misbehave(urls[0], {"kind": "status", "status": 503})
            assert ask(client, "a", 1)[2] == "stable"  # a failover
            _misbehave(urls[1], {"kind": "drop"})
            assert ask(client, "a", 2)[1] == 502  # no reply at all
            for pool in urls:
                httpx2.delete(f"{pool}/servanda/misbehave", timeout=WAIT_S)

        def counted():
            live = Live(serving)
            needed = (
                "unsampled_total",
                "failovers_total",
                "rescore_lag_seconds_bucket",
                "split_users",
            )
            none = "none" in live.values.get(("servanda_route_answers_total", "pool"), ())
            return none and all(f"servanda_{name}" in live.labels for name in needed) and live

        yield until(counted, "the leader has the gateway's counts")


def _misbehave(url, fault):
    httpx2.post(f"{url}/servanda/misbehave", json=fault, timeout=WAIT_S).raise_for_status()


class Prometheus:
    """Queries of a running Prometheus."""

    def __init__(self, url):
        self.url = url

    def ask(self, path, **query):
        reply = httpx2.get(f"{self.url}/api/v1/{path}", params=query, timeout=WAIT_S)
        assert reply.status_code == 200, (query, reply.text)
        return reply.json()["data"]

    def query(self, expression):
        return self.ask("query", query=expression)["result"]

    def firing(self):
        alerts = self.ask("alerts")["alerts"]
        return {one["labels"]["alertname"]: one for one in alerts if one["state"] == "firing"}


@contextlib.contextmanager
def prometheus(program, folder, leader):
    """The shipped configuration, with this leader and shorter intervals."""
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    del config["alerting"]  # no Alertmanager runs here
    (job,) = config["scrape_configs"]
    job["static_configs"][0]["targets"] = [leader]
    job["authorization"]["credentials_file"] = str(folder / "viewer_key")
    config["rule_files"] = [str(MONITORING / name) for name in config["rule_files"]]
    (folder / "viewer_key").write_text(ADA)
    (folder / "prometheus.yml").write_text(json.dumps(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        at = f"127.0.0.1:{free.getsockname()[1]}"
    words = [f"--config.file={folder / 'prometheus.yml'}", f"--web.listen-address={at}"]
    words += [f"--storage.tsdb.path={folder / 'data'}", "--log.level=error"]
    process = subprocess.Popen([program, *words])
    try:
        server = Prometheus(f"http://{at}")

        def scraped():
            assert process.poll() is None, "prometheus has ended"
            try:  # it listens before it is ready
                ready = httpx2.get(f"{server.url}/-/ready", timeout=WAIT_S).status_code == 200
            except httpx2.TransportError:
                return False
            return ready and server.query("count_over_time(servanda_info[1m]) > 2")

        until(scraped, "three scrapes")
        yield server
    finally:
        process.terminate()
        process.wait(WAIT_S)
