# Alerts to a real Alertmanager, whose API says which of them fire.

import contextlib
import shutil
import socket
import subprocess
import threading
import time

import httpx2
import pytest

from servanda.promotion.notify.sinks import alert, sinks_of
from tests.promotion.notify.made import effect
from tests.promotion.notify.receiving import Receiver

PROGRAM = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
CONFIG = "route: {receiver: none}\nreceivers: [{name: none}]\n"


def test_an_alert_has_the_same_labels_when_it_ends():
    fires = alert(effect("page", to="oncall", status="halted", at=1795267379.5))
    ends = alert(effect(status="running", at=1795267380.5))
    slices = alert(effect(slice="team=d", status="quarantined", leg="gateway"))

    labels = {"contract": "llama-int8", "run": "llama-int8-3f9a"}
    assert fires["labels"] == ends["labels"] == {"alertname": "ServandaPromotion", **labels}
    assert slices["labels"] == {"alertname": "ServandaSlice", **labels, "slice": "team=d"}
    assert fires["annotations"]["to"] == "oncall"
    assert fires["startsAt"] == "2026-11-21T13:22:59.500+00:00"
    assert fires["endsAt"] == "2026-11-22T13:22:59.500+00:00"
    assert ends["endsAt"] == ends["startsAt"] == "2026-11-21T13:23:00.500+00:00"


def test_the_path_of_the_api_is_added():
    with Receiver() as receiver:
        [made] = sinks_of(notify=[f"alertmanager={receiver.url}/"])
        made.deliver(effect(status="halted"))

    [(path, _)] = receiver.headers
    assert path.endswith("s3cr3t/api/v2/alerts")
    assert "s3cr3t" not in made.name
    assert [sent["labels"]["alertname"] for sent in receiver.got[0]] == ["ServandaPromotion"]


@pytest.mark.skipif(PROGRAM is None, reason="no program alertmanager: apt install one")
def test_alertmanager_fires_and_ends_it(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    (tmp_path / "am.yml").write_text(CONFIG)
    words = [PROGRAM, f"--config.file={tmp_path}/am.yml", f"--storage.path={tmp_path}/data"]
    words += [f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address="]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, (tmp_path / "log").read_text()
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(f"{url}/-/ready").status_code == 200:
                    break
            threading.Event().wait(0.1)
        [made] = sinks_of(notify=[f"alertmanager={url}"])

        def firing():
            return [
                (a["labels"]["run"], a["annotations"]["to"])
                for a in httpx2.get(f"{url}/api/v2/alerts").json()
            ]

        now = time.time()
        made.deliver(effect("page", to="oncall", status="halted", at=now - 2))
        assert firing() == [("llama-int8-3f9a", "oncall")]
        made.deliver(effect(status="running", at=now - 1))
        assert firing() == []
    finally:
        process.terminate()
        process.wait()
