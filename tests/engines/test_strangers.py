# A stranger's contract under --no-code: no file outside its repository, no server that the caller
# did not allow, and no words of either in what a public log shows.

import json
import os
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from servanda.cli.commands import FIRST, GROUPS
from servanda.cli.main import _load
from servanda.contract.kernel_string import hub_parts
from servanda.engines.folder import read_json, weight_files
from servanda.engines.foreign_code import ALLOWED_HOSTS, NO_CODE, is_allowed
from servanda.engines.table import Table
from servanda.errors import ContractError, MeasurementError
from servanda.runner.load import load, read_corpus
from tests import kit
from tests.kit import servanda

SECRET = "hunter2-abcdef"
MODEL = Path(__file__).parents[2] / "models/tiny-lm"
# every command that reads a contract, with the options that it needs
READERS = {
    "check": ("--run-dir", "run", "--report", "r.json"),
    "promote": ("--ledger", "l.db"),
    "serve": (),
    "contract lint": ("--format", "github"),
    "contract explain": (),
    "contract plan": (),
    "contract diff": ("old.kernelcontract.yaml",),
    "contract test": (),
    "promotion can-promote": ("--to", "canary", "--ledger", "l.db"),
    "gateway audit": ("--log", "old.kernelcontract.yaml"),
    "tools measure": ("--side", "infer", "-o", "x.pack"),
    "relations": ("--side", "infer"),
}
NAME_NO_FILE = ("contract diff",)  # they read the text of a contract alone
# they take kernels, runs or files of the caller; `calibrate` has a test of its own
OTHERS = {"bisect", "compare", "preflight", "contract calibrate", "contract derive"} | {
    f"tools {name}" for name in ("kld", "selftest")
}


def test_the_matrix_has_every_command_with_the_option():
    commands = [("", name) for name in FIRST]
    commands += [(group, name) for group, (_, names) in GROUPS.items() for name in names]
    have = {
        f"{group} {name}".strip()
        for group, name in commands
        if any("--no-code" in param.opts for param in _load(group, name).params)
    }
    assert have == {*READERS} | OTHERS


class Server(ThreadingHTTPServer):
    """Says SECRET in every reply; `asked` has the path of each request."""

    status, headers, body = 200, {}, SECRET

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = []
        self.at = f"127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        self.send_response(self.server.status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(self.server.body.encode())

    do_POST = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A checkout with a sound contract; a secret lies beside it, in .git, in the environment."""
    monkeypatch.setenv("API_TOKEN", SECRET)
    monkeypatch.setenv(NO_CODE, "1")
    top = tmp_path / "checkout"
    (top / ".git").mkdir(parents=True)
    for place in (tmp_path / "secret.env", top / ".git/config"):
        place.write_text(f"API_TOKEN={SECRET}\n")
    (top / "kernels").mkdir()
    kit.write(top / "kernels", stable=None)
    shutil.copy(top / "kernels/toy.kernelcontract.yaml", top / "old.kernelcontract.yaml")
    monkeypatch.chdir(top)
    return top


def written(top, old="", new=""):
    """The stranger's contract, with another text in it; and a test of it."""
    path = top / "kernels/toy.kernelcontract.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    (top / "toy.kerneltest.yaml").write_text(
        "apiVersion: servanda.dev/v1alpha1\nkind: ContractTest\nmetadata: {name: toy}\n"
        "contract: kernels/toy.kernelcontract.yaml\n"
        "cases: [{name: any, traffic: gap(0.01)x32, expect: [{verdict: holds}]}]\n"
    )
    return path


def called(verb, path):
    """A command on a contract, as a job on a public server calls it."""
    target = "toy.kerneltest.yaml" if verb == "contract test" else path
    return servanda(*verb.split(), target, *READERS[verb])


def shows_nothing(done, top):
    """Neither the output nor a report has the secret."""
    report = top / "r.json"
    said = done.output + (report.read_text() if report.exists() else "")
    return SECRET not in said and "Traceback" not in said


def linked(path, name, target):
    (path.parent / name).symlink_to(target)
    return name


def prompts(place):
    """A contract whose prompts lie elsewhere; `place` makes their name, of its path."""
    return lambda path, _: ("prompts.jsonl", str(place(path)))


def asks(host):
    def text(_, server):
        return Q, f'openai_http, url: "http://{host.format(at=server.at)}"'

    return text


def pipe(path):
    os.mkfifo(path.parent / "pipe.jsonl")
    return "pipe.jsonl"


Q, OUT, ASKS = "table, model: q.json", "leads out of the repository", "kernels.infer.url asks"
# what a stranger writes: (a text of the contract, another one), and how it is refused
HOSTILE = {
    "absolute": (prompts(lambda path: path.parents[2] / "secret.env"), OUT),
    "upwards": (prompts(lambda _: "../../secret.env"), OUT),
    "link": (prompts(lambda path: linked(path, "my.jsonl", "../../secret.env")), OUT),
    "folder": (prompts(lambda path: linked(path, "data", "../..") + "/secret.env"), OUT),
    "environment": (prompts(lambda _: "/proc/self/environ"), OUT),
    "git": (prompts(lambda _: "../.git/config"), "leads into .git"),
    "pipe": (prompts(pipe), "is a pipe or a device"),
    "loop": (prompts(lambda path: linked(path, "loop.jsonl", "loop.jsonl")), "there is no "),
    "metadata": (asks("169.254.169.254"), ASKS),
    "server": (asks("{at}"), ASKS),
    "user": (asks("allowed@{at}"), ASKS),
    "backslash": (asks("allowed\\\\@{at}"), ASKS),
    "code": (lambda *_: (Q, f"{Q}, python: python"), "python runs the interpreter"),
}


@pytest.mark.sampled(29)
@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("verb", [verb for verb in READERS if verb not in NAME_NO_FILE])
def test_no_command_does_what_a_stranger_writes(verb, hostile, repository, server, monkeypatch):
    monkeypatch.setenv(ALLOWED_HOSTS, "allowed 127.0.0.1:1")
    (repository / "kernels/python").write_text("#!/bin/sh\ntouch ran\n")
    (repository / "kernels/python").chmod(0o755)
    text, said = HOSTILE[hostile]
    path = repository / "kernels/toy.kernelcontract.yaml"
    written(repository, *text(path, server))
    done = called(verb, path)
    assert done.exit_code == 2 and said in done.output, done.output
    assert path.name in done.output and (said != ASKS or "--allow-host HOST" in done.output)
    assert shows_nothing(done, repository) and server.asked == []
    assert not (repository / "ran").exists()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model: p.json", "model: ../../secret.env"),
        ("model: q.json", "model: folder"),
        ("model: q.json", "model: q.json, adapter: folder"),
        ("claim:", "golden: {prompts: ../../secret.env}\nclaim:"),
        ("claim:", "stable: {engine: table, model: ../../secret.env}\nclaim:"),
        (
            "{engine: table, model: q.json}",
            "{engine: vllm, model: q.json, options: {speculative_config: "
            "{method: eagle, model: ../../secret.env}}}",
        ),
    ],
)
def test_every_key_that_names_a_file_is_held_to_the_repository(old, new, repository):
    (repository / "kernels/folder/deep").mkdir(parents=True)
    (repository / "kernels/folder/deep/config.json").symlink_to("../../../../secret.env")
    path = written(repository, old, new)
    with pytest.raises(ContractError, match="leads out of the repository") as refused:
        load(path)
    assert all(str(problem.where).startswith(f"{path}:") for problem in refused.value.problems)


def test_so_is_the_reference_of_a_trend(repository):
    for name in ("p", "q"):
        path = written(repository, f"engine: table, model: {name}.json", "engine: external")
    written(repository, "prompts: prompts.jsonl", "source: trainer")
    escalation = "escalation: [{when: {clause: trend, is: violated}, do: [halt]}]"
    written(repository, "claim: ", f"trend: {{reference: ../../x.json}}\n{escalation}\nclaim: ")
    with pytest.raises(ContractError, match="leads out of the repository"):
        load(path)


@pytest.mark.parametrize("verb", READERS)
def test_the_contract_itself_is_a_file_of_its_repository(verb, repository):
    path = written(repository)
    path.unlink()
    path.symlink_to("../../secret.env")
    done = called(verb, path)
    assert done.exit_code == 2 and "leads out of the repository" in done.output
    assert shows_nothing(done, repository)


def test_a_link_to_another_repository_is_none_into_this_one(repository):
    other = repository.parent / "other"
    (other / ".git").mkdir(parents=True)
    kit.write(other, stable=None)
    (repository / "more").symlink_to(other)
    done = servanda("contract", "lint", "more/toy.kernelcontract.yaml")
    assert done.exit_code == 2 and "leads out of the repository" in done.output


def test_a_test_and_a_run_name_no_contract_elsewhere(repository):
    written(repository)
    test = repository / "toy.kerneltest.yaml"
    test.write_text(test.read_text().replace("kernels/toy.kernelcontract.yaml", "../secret.env"))
    done = servanda("contract", "test", test)
    assert done.exit_code == 2 and f"{test}:" in done.output, done.output
    assert "leads out of the repository" in done.output

    assert called("check", repository / "kernels/toy.kernelcontract.yaml").exit_code == 0
    (verdict,) = repository.glob("run/*/verdict.json")
    said = json.loads(verdict.read_text())
    for cell in said["cells"]:
        cell["where"]["file"] = str(repository.parent / "secret.env")
    verdict.write_text(json.dumps(said))
    done = servanda("contract", "calibrate", "run")
    assert "leads out of the repository" in done.output and shows_nothing(done, repository)


def test_an_ordinary_contract_works(repository):
    """Also one whose files lie in another folder of the repository, behind a link that stays."""
    (repository / "data").mkdir()
    (repository / "kernels/prompts.jsonl").rename(repository / "data/p.jsonl")
    (repository / "kernels/data").symlink_to("../data")
    path = written(repository, "prompts.jsonl", "data/p.jsonl")
    for verb in ("contract lint", "contract plan", "check"):
        assert called(verb, path).exit_code == 0


def test_a_kernel_string_is_held_to_the_allowed_hosts_as_well(repository, server):
    done = servanda("compare", f"http://{server.at}", "table:kernels/p.json")
    assert done.exit_code == 2 and "A.url asks" in done.output
    assert server.asked == []


BODIES = {
    "a page": (200, f"<html>{SECRET}"),
    "no JSON": (200, SECRET),
    "another object": (200, json.dumps({"data": SECRET, SECRET: SECRET})),
    "other models": (200, json.dumps({"data": [{"id": SECRET}, {"id": "b"}]})),
    "forbidden": (403, SECRET),
    "not found": (404, SECRET),
    "broken": (500, SECRET),
}


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES)
def test_an_allowed_server_is_asked_and_its_replies_are_not_shown(body, repository, server):
    server.status, server.body = BODIES[body]
    path = written(repository, "table, model: q.json", f"openai_http, url: 'http://{server.at}'")
    done = servanda("check", path, "--run-dir", "run", "--allow-host", server.at)
    assert done.exit_code == 4 and server.asked, done.output
    assert shows_nothing(done, repository)
    assert ALLOWED_HOSTS not in os.environ


def test_a_redirect_to_another_server_is_not_followed(repository, server):
    with Server() as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        server.status = 302
        server.headers = {"Location": f"http://{other.at}/{SECRET}"}
        path = written(
            repository, "table, model: q.json", f"openai_http, url: 'http://{server.at}'"
        )
        done = servanda("check", path, "--allow-host", "127.0.0.1")
        other.shutdown()
    assert done.exit_code == 4 and server.asked and other.asked == []
    assert "redirects are not followed" in done.output and shows_nothing(done, repository)


@pytest.mark.parametrize(
    ("url", "yes"),
    [
        ("http://a:8000/v1", True),
        ("HTTP://A", True),
        ("https://b", True),
        ("http://b:443", True),
        ("https://b:8443", False),
        ("http://[::1]:9", True),
        ("http://c@a", False),
        ("http://a\\@c", False),
        ("http://c#@a", False),
        ("http://a.c", False),
        ("http://[", False),
    ],
)
def test_a_host_is_allowed_by_its_name_or_with_its_port(url, yes, monkeypatch):
    monkeypatch.setenv(ALLOWED_HOSTS, "a b:443 [::1]")
    assert is_allowed(url) == yes


@pytest.mark.parametrize(
    "line",
    [
        f"API_TOKEN={SECRET}",
        json.dumps({SECRET: 1}),
        json.dumps({"prompt": "a", "labels": SECRET}),
        json.dumps({"prompt": {"image": SECRET}, f"image_{SECRET}": SECRET}),
        f'{{"{SECRET}": 1, "{SECRET}": 2}}',
    ],
)
def test_an_error_gives_the_place_and_the_kind_of_fault_and_no_words(line, tmp_path, monkeypatch):
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "a"}}\n{line}\n')
    monkeypatch.setenv(NO_CODE, "1")
    with pytest.raises(ContractError) as refused:
        read_corpus(tmp_path / "p.jsonl")
    assert SECRET not in str(refused.value) and "p.jsonl:2:1: " in str(refused.value)


def test_an_engine_repeats_no_words_of_its_files(tmp_path, monkeypatch):
    monkeypatch.setenv(NO_CODE, "1")
    (tmp_path / "config.json").write_text(f'{{"a": {SECRET}')
    table = f'{{"tokens": ["a"], "eos": "a", "rows": {{"": ["{SECRET}"]}}}}'
    calls = lambda: Table.parse(table, "p.json"), lambda: read_json(tmp_path / "config.json")
    for call in calls:
        with pytest.raises(MeasurementError) as refused:
            call()
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "sub/../../x", "..\\x"])
def test_an_index_names_files_of_its_own_folder_alone(name, tmp_path):
    """Whoever wrote it, with or without --no-code."""
    index = {"weight_map": {"lm_head.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(MeasurementError, match="is no file of this folder"):
        weight_files(tmp_path)


@pytest.mark.parametrize("name", ["../..", "a/..", "a/b@../../x", "a/b@/etc", "a/b@x/../y", "./b"])
def test_a_name_of_the_hub_is_no_path(name):
    assert hub_parts(f"hf://{name}") is None
    assert hub_parts("hf://a-b/c.d_e@refs/pr/1") == ("a-b/c.d_e", "refs/pr/1")


@pytest.mark.parametrize("words", [("setup.py:trainee",), ("--trl", "train.py")])
def test_preflight_runs_no_file(words, repository):
    for file in ("setup.py", "train.py"):
        (repository / file).write_text("from pathlib import Path\nPath('ran').touch()\n")
    done = servanda("preflight", *words)
    assert done.exit_code == 2 and "--no-code refuses it" in done.output
    assert not (repository / "ran").exists()
