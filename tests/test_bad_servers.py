# Servers that hang, fail, lie, die and come back, under a whole check of a contract.

import contextlib
import os
import re
import signal
import subprocess
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.errors import MeasurementError
from servanda.runner import run
from tests import kit
from tests.engines.serving import live, table_engine

TRUE, OTHER = {"": kit.moved(kit.BASE, 0.01)}, {"": kit.moved(kit.BASE, 0.03)}
GUARDS = (
    "observability:\n  clauses:\n"
    "    - {id: drawn, metric: sampler_fidelity}\n"
    "    - {id: served, metric: served_fidelity}\n"
)


def contract(folder, url, rounds=2, **infer):
    """A small contract whose infer is a server."""
    more = "".join(f", {name}: {value}" for name, value in infer.items())
    path, _ = kit.write(
        folder, q=TRUE, round=16, first=16 * rounds, last=16 * rounds, limit=0.4, more=GUARDS
    )
    of_a_server = f'engine: openai_http, url: "{url}", batch_size: 8{more}'
    path.write_text(path.read_text().replace("engine: table, model: q.json", of_a_server))
    return path


def checked(path, root, **options):
    return run.check(path, run_dir=root, open=run.in_process, **options)


def left(root):
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


@pytest.fixture
def client(tmp_path):
    (tmp_path / "kernel").mkdir()
    engine = table_engine(tmp_path / "kernel", TRUE)

    def faulty(fault):
        model = str(tmp_path / "kernel" / "p.json")
        return open_engine(Kernel(engine="table", model=model, fault=dict(fault)))

    with live(engine, test_mode=True, faulty=faulty, max_batch=8) as (client, _):
        yield client


@pytest.fixture
def path(tmp_path, client):
    return contract(tmp_path / "contract", str(client.base_url).rstrip("/"))


def misbehave(client, **fault):
    assert client.post("/servanda/misbehave", json=fault).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("fault", [{"kind": "drop"}, {"kind": "status"}])
def test_a_fifth_of_all_requests_may_fail_and_the_verdict_is_the_very_same(
    tmp_path, client, path, fault
):
    whole = checked(path, tmp_path / "whole")
    misbehave(client, share=0.2, seed=3, **fault)

    assert checked(path, tmp_path / "troubled") == whole
    assert client.get("/servanda/misbehave").json()["struck"] >= 5
    assert left(tmp_path / "troubled") == left(tmp_path / "whole")


WRONG = [
    ({"kind": "garble"}, "answered with no JSON", "right server"),
    ({"kind": "status", "status": 500}, "answered with status 500: .*on purpose", "log"),
    ({"kind": "status", "status": 404}, "answered with status 404: .*on purpose", "dialect"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "said", "hint"), WRONG)
def test_an_answer_that_is_none_ends_the_run_and_a_healed_server_goes_on_with_it(
    tmp_path, client, path, fault, said, hint
):
    root = tmp_path / "run"

    def later(progress):
        if progress.what == "prompt groups" and progress.done == 16:
            misbehave(client, share=0.2, seed=3, **fault)

    with pytest.raises(MeasurementError) as caught:
        checked(path, root, watch=later)

    [problem] = caught.value.problems
    assert re.match(
        re.escape(f"{client.base_url}".rstrip("/")) + "/v1/completions", problem.message
    )
    assert re.search(said, problem.message) and hint in problem.hint
    assert caught.value.exit_code == 4
    kept = left(root)
    assert "attempt-1/rounds/000000.train.parquet" in kept
    assert not [name for name in kept if "partial" in name or "verdict" in name]
    client.delete("/servanda/misbehave")
    assert checked(path, root) == checked(path, tmp_path / "whole")


def test_a_server_that_hangs_is_told_after_the_silence_that_the_contract_allows(tmp_path, client):
    path = contract(tmp_path, str(client.base_url).rstrip("/"), timeout_s=0.5)
    misbehave(client, kind="hang")

    with pytest.raises(MeasurementError, match=r"did not answer within 0\.5 s\n.*timeout_s"):
        checked(path, tmp_path / "run")


def test_a_server_that_draws_otherwise_than_it_says_is_violated_by_both_guards(
    tmp_path, client, path
):
    misbehave(client, kind="kernel", fault={"undisclosed_temperature": 0.4})

    verdict = checked(path, tmp_path / "run")

    violated = {row.clause for row in verdict.cells if row.outcome == "violated"}
    assert verdict.exit_code == 1 and violated == {"drawn", "served"}


@contextlib.contextmanager
def served(folder, rows, port=0):
    """A process of `servanda tools serve-kernel`, and its port; killed at the end."""
    folder.mkdir(exist_ok=True)
    kit.table(folder, "q.json", rows)
    argv = [sys.executable, "-m", "servanda", "tools", "serve-kernel", f"table:{folder / 'q.json'}"]
    process = subprocess.Popen(
        [*argv, "--port", str(port), "--served", "toy"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        with process.stdout:
            line = process.stdout.readline()
            yield process, int(re.search(r":(\d+)  ", line)[1])
    finally:
        process.kill()
        process.wait()


def killing(process, then):
    """A watch that kills a server after the first round, and does something next."""

    def watch(progress):
        if progress.what == "prompt groups" and progress.done == 16 and process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            then()

    return watch


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_is_gone_on_with(tmp_path):
    with contextlib.ExitStack() as stack:
        first, port = stack.enter_context(served(tmp_path / "a", TRUE))
        path = contract(tmp_path, f"http://127.0.0.1:{port}")
        whole = checked(path, tmp_path / "whole")

        def again():
            stack.enter_context(served(tmp_path / "a", TRUE, port))

        assert checked(path, tmp_path / "run", watch=killing(first, again)) == whole


@pytest.mark.slow
def test_a_server_that_comes_back_with_another_model_is_refused_now_and_later(tmp_path):
    with contextlib.ExitStack() as stack:
        first, port = stack.enter_context(served(tmp_path / "a", TRUE))
        path = contract(tmp_path, f"http://127.0.0.1:{port}")

        def another():
            stack.enter_context(served(tmp_path / "b", OTHER, port))

        with pytest.raises(MeasurementError, match="no longer the server that was met"):
            checked(path, tmp_path / "run", watch=killing(first, another))
        with pytest.raises(MeasurementError, match="the infer kernel changed since"):
            checked(path, tmp_path / "run")


NUMERICAL = (
    "golden: {prompts: golden.jsonl}\n"
    "numerical:\n  - {id: fact, metric: tv, aggregate: max, at_most: 0.2}\n"
)


def recorded(folder, port, more=""):
    """A contract whose infer was a server, and is a recording; its verdict when it was one."""
    path = contract(folder, f"http://127.0.0.1:{port}")
    path.write_text(path.read_text().replace("statistical:", f"{more}statistical:"))
    verdict = checked(path, folder / "run", record=folder / "infer.recorded")
    name = f'engine: openai_http, url: "http://127.0.0.1:{port}"'
    path.write_text(path.read_text().replace(name, "engine: recorded, model: infer.recorded"))
    return path, verdict


@pytest.mark.slow
def test_a_recorded_server_is_checked_again_without_it(tmp_path):
    with served(tmp_path / "a", TRUE) as (_, port):
        path, told = recorded(tmp_path, port)

    again = checked(path, tmp_path / "again")

    def found(verdict):
        return [(c.clause, c.slice, c.outcome, c.value, c.interval) for c in verdict.cells]

    assert found(again) == found(told) and again.exit_code == 0


def test_golden_texts_of_a_recorded_server_are_refused_with_what_it_told(tmp_path):
    kit.golden(tmp_path)
    with served(tmp_path / "a", TRUE) as (_, port):
        path, told = recorded(tmp_path, port, NUMERICAL)
    assert next(c for c in told.cells if c.clause == "fact").outcome == "holds"

    with pytest.raises(MeasurementError, match="with their 5 likeliest tokens alone") as caught:
        checked(path, tmp_path / "again")
    assert "leave out `golden:`" in str(caught.value)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def test_an_address_of_something_else_says_what_answers_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = ThreadingHTTPServer(("127.0.0.1", 0), _Quiet)
    thread = Thread(target=files.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    at = f"127.0.0.1:{files.server_address[1]}"
    try:
        with pytest.raises(MeasurementError, match=rf"{at}/v1/models answered with status 404"):
            checked(contract(tmp_path, f"http://{at}"), tmp_path / "run")
        with pytest.raises(MeasurementError, match=r"by TLS.*\n.*write http:// where") as caught:
            checked(contract(tmp_path, f"https://{at}"), tmp_path / "run")
    finally:
        files.shutdown()
        thread.join()
        files.server_close()
    assert caught.value.exit_code == 4 and not (tmp_path / "run" / "attempt-1").exists()
