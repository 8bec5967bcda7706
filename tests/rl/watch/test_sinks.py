# Where series and alerts go: a real server on this machine, and sinks that fail.

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from servanda.errors import ContractError, MeasurementError
from servanda.judgement.breakdown import Advice
from servanda.promotion.notify.http_post import Hook
from servanda.rl.watch.sinks import SINKS, GuardedSink, body
from servanda.rl.watch.transitions import Alert
from tests.rl.watch.made import Out, following, state_line

SECRET = "T000/B000/s3cr3t"
ALERT = Alert(
    "violated",
    14,
    "violated on env <a>",
    "error",
    slice="env-a",
    clause="gradient",
    value=0.05,
    interval=(0.04, 0.06),
    limit=0.025,
    n=1000,
    words="mean total variation: 0.05, limit 0.025",
    advice=Advice("", "what env a sends", command="servanda check runs --steps 14"),
    stop=14,
)


class Server:
    """Answers POSTs with the statuses of a script, then with 200; keeps what came."""

    def __init__(self, *statuses):
        self.got, script = [], [*statuses]

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler):  # noqa: N805
                data = handler.rfile.read(int(handler.headers["content-length"]))
                self.got.append((handler.path, json.loads(data)))
                handler.send_response(script.pop(0) if script else 200)
                handler.send_header("location", "http://127.0.0.1:9/elsewhere")
                handler.send_header("content-length", "0")
                handler.end_headers()

            def log_message(self, *_):
                pass

        self._http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/{SECRET}"

    def __enter__(self):
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def alerting(name, server, waits=None):
    sink = SINKS[name](server.url, (waits if waits is not None else []).append)
    sink.alert(ALERT, 5.0, "runs/exp")


def test_a_webhook_gets_the_alert_as_documented():
    with Server() as server:
        alerting("webhook", server)
    assert server.got == [
        (
            f"/{SECRET}",
            {
                "servanda": "watch",
                "schema": 1,
                "kind": "violated",
                "level": "error",
                "watched": "runs/exp",
                "step": 14,
                "at": 5.0,
                "text": "violated on env <a>",
                "slice": "env-a",
                "clause": "gradient",
                "value": 0.05,
                "interval": [0.04, 0.06],
                "limit": 0.025,
                "n": 1000,
                "cause": "what env a sends",
                "found_slices": [],
                "command": "servanda check runs --steps 14",
                "change": None,
                "would_have_stopped_at": 14,
            },
        )
    ]
    absent = body(Alert("error", 3, "not measured"), 1.0, "x")
    assert absent["value"] is absent["limit"] is absent["slice"] is None


def test_slack_gets_a_text_and_one_block_with_its_marks_escaped():
    with Server() as server:
        alerting("slack", server)
    ((_, sent),) = server.got
    assert sent["text"] == "servanda: step 14: violated on env &lt;a&gt;"
    assert sent["blocks"] == [
        {
            "type": "section",
            "text": {
                "type": "mrkdwn",
                "text": ":red_circle: *step 14: violated on env &lt;a&gt;*\n"
                "mean total variation: 0.05, limit 0.025\n"
                "Likely cause: what env a sends\n"
                "Next command: servanda check runs --steps 14\n"
                "would have stopped at step 14\n"
                "`runs/exp`",
            },
        }
    ]


@pytest.mark.parametrize(
    ("statuses", "sent", "paused"),
    [((503,), 2, [0.5]), ((429, 500), 3, [0.5, 1.0])],
)
def test_a_server_that_is_busy_is_asked_again(statuses, sent, paused):
    waits = []
    with Server(*statuses) as server:
        alerting("webhook", server, waits)
    assert len(server.got) == sent and waits == paused


@pytest.mark.parametrize(("status", "sent"), [(404, 1), (503, 3)])
def test_what_is_not_taken_is_given_up_and_only_the_host_is_named(status, sent):
    with Server(*[status] * 9) as server, pytest.raises(MeasurementError) as error:
        alerting("webhook", server)
    assert str(error.value) == f"127.0.0.1: status {status}"
    assert len(server.got) == sent


def test_an_answer_whose_body_never_ends_is_taken_by_its_status():
    begun, released = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            begun.append(self.path)
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            released.wait()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            Hook(f"http://127.0.0.1:{server.server_port}/x", "--webhook").post({})
        finally:
            released.set()
            server.shutdown()
            thread.join()
    assert begun == ["/x"]


def test_a_host_that_does_not_answer_is_named_without_its_path():
    waits = []
    with Server() as server:
        pass
    with pytest.raises(MeasurementError) as error:
        alerting("webhook", server, waits)
    assert str(error.value) == "127.0.0.1: ConnectError"
    assert waits == [0.5, 1.0]


@pytest.mark.parametrize(
    "url", [SECRET, f"ftp://host/{SECRET}", f"http:///{SECRET}", f"https://h:port/{SECRET}"]
)
def test_a_url_that_is_none_is_refused_unseen(url):
    with pytest.raises(ContractError) as error:
        SINKS["slack"](url, print)
    assert "--slack takes a URL that begins with http:// or https://" in str(error.value)
    assert "s3cr3t" not in str(error.value)


def test_a_hook_that_fails_is_told_once_and_the_watch_goes_on(tmp_path):
    path = tmp_path / "monitor.jsonl"
    lines = "vhhhvhhhvhhh"
    outcomes = {"v": "violated", "h": "holds"}
    path.write_text("".join(state_line(i, outcomes[c]) for i, c in enumerate(lines, 1)))
    out = Out()
    with Server(*[404] * 99) as server:
        sink = GuardedSink("webhook", SINKS["webhook"](server.url, print), out.say)
        following(path, out, once=True, sinks=[sink]).run()

    assert out.steps == [str(i) for i in range(1, 13)]
    assert [line for line in out.lines if line.startswith("!")] == [
        "! --webhook failed, and the watch goes on: 127.0.0.1: status 404"
    ]
    assert len(server.got) == 6
    assert "s3cr3t" not in "\n".join(out.lines)


def test_a_failure_behind_a_success_is_told_again():
    class Moody:
        def alert(self, fails):
            if fails:
                raise RuntimeError("https://hooks.example/s3cr3t")

    said = []
    safely = GuardedSink("moody", Moody(), said.append)
    for fails in (True, True, False, True):
        safely("alert", fails)
    assert said == ["! --moody failed, and the watch goes on: RuntimeError"] * 2


def test_series_are_appended_as_lines_that_hold_every_number(tmp_path):
    path, file = tmp_path / "monitor.jsonl", tmp_path / "series.jsonl"
    path.write_text(state_line(1) + state_line(2, tv=0.02))
    for _ in range(2):
        sink = GuardedSink("series", SINKS["series"](str(file), print), print)
        following(path, Out(), once=True, sinks=[sink]).run()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 1, 2]
    assert rows[1]["series"] == {
        "servanda/outcome": 0.0,
        "servanda/tokens": 5000.0,
        "servanda/coverage": 1.0,
        "servanda/gradient_share": pytest.approx(0.04),
        "servanda/worst": pytest.approx(0.8),
        "servanda/staleness": 1.0,
    }


def test_a_series_file_that_cannot_be_written_is_refused_before_anything(tmp_path):
    with pytest.raises(ContractError, match=r"--series .* cannot be written: No such file"):
        SINKS["series"](str(tmp_path / "no" / "s.jsonl"), print)


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow", "swanlab", "tensorboard"])
def test_a_library_that_is_not_installed_is_named_with_the_line_that_installs_it(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ContractError) as error:
        SINKS[name]("project", print)
    assert str(error.value) == (
        f"--{name} needs {name}, which is not installed here\n  hint: pip install {name}"
    )
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "where", "shape"),
    [
        ("wandb", "a/b/c/d", "PROJECT, PROJECT/RUN or ENTITY/PROJECT/RUN"),
        ("trackio", "a/b/c", "PROJECT, PROJECT/RUN"),
        ("trackio", "a/", "PROJECT, PROJECT/RUN"),
        ("swanlab", "a/b/c", "PROJECT, PROJECT/RUN"),
        ("mlflow", "a/b/c", r"EXPERIMENT\[/RUN\]"),
        ("mlflow", 'a/b"', r"EXPERIMENT\[/RUN\]"),
    ],
)
def test_a_name_of_another_shape_is_refused(name, where, shape, monkeypatch):
    from types import ModuleType

    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(ContractError, match=f"--{name} takes {shape}, and not '{where}'"):
        SINKS[name](where, print)


@pytest.mark.parametrize("name", [*SINKS])
def test_every_sink_says_what_it_takes_and_does(name):
    assert SINKS[name].takes.isupper() or "/" in SINKS[name].takes
    assert SINKS[name].summary.endswith(".")
