# `servanda serve` as a process: it serves before its leader leads, and ends as it is told to.

import signal
import socket
import textwrap

import httpx2
import pytest

from tests import kit
from tests.gateway.running import CONTRACT, WAIT_S, Program, Serving, ask, until
from tests.gateway.serving import Fake, reply

# of every Python that is started: a leader waits while a file is there, and kills itself where
# another one has characters left
CUSTOMIZED = """\
import os, pathlib, signal, sys, threading
folder = pathlib.Path(__file__).parent
if any("servanda.gateway.controller.process" in word for word in sys.orig_argv):
    left = folder / "deaths"
    if left.exists() and (text := left.read_text()):
        left.write_text(text[1:])
        os.kill(os.getpid(), signal.SIGKILL)
    while (folder / "hold").exists():
        threading.Event().wait(0.01)
"""
UNTIL_READY = "stable serves (routing.without_snapshot) until the leader is ready"


@pytest.fixture(scope="module")
def pools():
    said = {"object": "list", "data": [{"id": "toy", "object": "model"}], "choices": []}
    with Fake(reply(said)) as infer, Fake(reply(said)) as stable:
        yield infer.url, stable.url


@pytest.fixture
def environ(tmp_path):
    """A folder whose files say what becomes of leaders, and the environment that they see it in."""
    folder = tmp_path / "customized"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(textwrap.dedent(CUSTOMIZED))
    return folder, {"PYTHONPATH": str(folder)}


def readyz(serving):
    answer = httpx2.get(f"{serving.url}/readyz", timeout=WAIT_S)
    return answer.status_code, answer.json()


def asked(serving):
    with httpx2.Client(base_url=serving.url, timeout=WAIT_S) as client:
        return ask(client, "a")


def test_it_serves_before_its_leader_is_ready_and_says_so(pools, tmp_path, environ):
    folder, more = environ
    (folder / "hold").touch()
    with Serving(tmp_path / "serve", pools, "--drain", "1h", **more) as serving:
        assert asked(serving) == ("a", 200, "stable")
        serving.line(UNTIL_READY.replace("(", r"\(").replace(")", r"\)"))
        assert readyz(serving) == (
            200,
            {
                "ready": True,
                "reasons": [],
                "notes": ["no route is known yet: stable serves (routing.without_snapshot)"],
            },
        )
        assert "page http" not in serving.text

        (folder / "hold").unlink()
        serving.begun()
        assert serving.page and readyz(serving)[1]["notes"] == []
        assert serving.end(signal.SIGINT) == 0  # Ctrl-C does not drain
        assert "new requests are answered" not in serving.text


@pytest.mark.slow
def test_a_leader_that_is_killed_before_it_is_ready_ends_nobody(pools, tmp_path, environ):
    folder, more = environ
    (folder / "deaths").write_text("x")
    with Serving(tmp_path / "serve", pools, **more) as serving:
        serving.line(
            r"the leader ended with signal 9 before it was ready; it is started again in 1 s, and "
            r"routing\.without_snapshot decides which pool serves until it is ready"
        )
        assert asked(serving)[1] == 200
        serving.begun()
        assert "is running again" not in serving.text  # it was not there before
        assert serving.end() == 0


def refused(tmp_path, pools, *words, stages="", keys=""):
    """Exit code and output of a start that fails by itself."""
    text = CONTRACT.format(infer=pools[0], stable=pools[1], mode="enforce", limit=0.1, sample=1.0)
    contract = tmp_path / "toy.kernelcontract.yaml"
    contract.write_text(text.replace("slices: [team]}", f"slices: [team]{stages}}}"))
    kit.table(tmp_path, "p.json", {"": kit.BASE})
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "labels": {"team": "a"}}')
    if keys:
        (tmp_path / "keys.yaml").write_text(keys)
        words = (*words, "--keys", "keys.yaml")
    words = ("serve", contract.name, "--port", 0, *words, "--state", "state")
    with Program(*words, cwd=tmp_path) as program:
        code = program.process.wait(WAIT_S)
        program._thread.join()
        return code, program.text


@pytest.mark.slow
def test_a_contract_that_no_leader_can_follow_ends_it_before_anybody_is_served(pools, tmp_path):
    code, said = refused(tmp_path, pools, stages=", stages: [offline]")

    assert code == 2
    assert "no statistical clause of toy can be watched on traffic" in said
    assert "serving users at" not in said and "started again" not in said


def test_an_address_that_is_taken_ends_it_before_anybody_is_served(pools, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        code, said = refused(tmp_path, pools, "--admin", at)

    assert code == 4
    assert said.splitlines()[-2:] == [
        f"nothing can be served at {at}: Address already in use",
        "  hint: --admin takes another address; port 0 is a free one",
    ]
    assert "serving users at" not in said


def test_keys_with_a_mistake_end_it_before_anybody_is_served(pools, tmp_path):
    code, said = refused(tmp_path, pools, keys="- {name: a, role: king, key: 0123456789abcdef}\n")

    assert code == 2
    assert "keys.yaml:1:19: a holder needs a role" in said
    assert "serving users at" not in said


@pytest.mark.slow
def test_told_to_end_it_answers_on_for_as_long_as_it_drains(pools, tmp_path):
    with Serving(tmp_path / "serve", pools, "--drain", "1h") as serving:
        serving.begun()
        serving.process.send_signal(signal.SIGTERM)
        until(lambda: readyz(serving)[0] == 503, "it is not ready")
        assert readyz(serving)[1]["reasons"] == [
            "the gateway is shutting down: send new requests elsewhere"
        ]
        assert asked(serving)[1] == 200
        serving.line("draining for 3600 s: requests are served, /readyz returns 503")
        assert serving.end() == 0  # told once more, it ends at once
        assert "no new requests are accepted" in serving.text


@pytest.mark.slow
def test_a_drain_has_an_end(pools, tmp_path):
    with Serving(tmp_path / "serve", pools, "--drain", "100ms") as serving:
        serving.begun()
        assert serving.end() == 0
        serving.line("draining for 0.1 s")
        serving.line("no new requests are accepted")
