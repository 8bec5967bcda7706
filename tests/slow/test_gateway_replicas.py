# Several servers per pool, with real servers: one is killed under load, and one is another kernel.

import contextlib
import signal
from collections import Counter

import pytest
from click.testing import CliRunner

from servanda.cli.main import main
from servanda.gateway.http.listener import bind
from tests import kit
from tests.gateway.running import ADA, BAD, GOOD, Program, Serving, Users, until

WORDS = ("--served", "toy", "--wait-ms", 0, "--test-mode")
BLOCK = "  replicas:\n"


def port():
    with bind("127.0.0.1", 0, "") as free:
        return free.getsockname()[1]


class Kernel:
    """A server that can be killed and started again at its address."""

    def __init__(self, stack, folder, table, words=WORDS):
        self._stack, self._folder, self._port = stack, folder, port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.start(table, words)

    def start(self, table, words=WORDS):
        words = (
            "tools",
            "serve-kernel",
            f"table:{self._folder / table}",
            "--port",
            self._port,
            *words,
        )
        self._program = self._stack.enter_context(Program(*words, cwd=self._folder))
        self._program.line(r"http://\S+")

    def kill(self):
        self._program.end(signal.SIGKILL)


@pytest.fixture
def servers(tmp_path):
    """Two of the infer kernel, and one of stable."""
    kit.table(tmp_path, "q.json", {"": kit.BASE, "a": GOOD, "b": GOOD})
    kit.table(tmp_path, "other.json", {"": kit.BASE, "a": BAD, "b": BAD})
    kit.table(tmp_path, "p.json", {"": kit.BASE})
    with contextlib.ExitStack() as stack:
        yield [Kernel(stack, tmp_path, table) for table in ("q.json", "q.json", "p.json")]


def replicas(**weights):
    """The block of a contract; weights: URL -> weight."""
    listed = ", ".join(f'{{url: "{url}", weight: {w}}}' for url, w in weights.items())
    return f"{BLOCK}    infer: [{listed}]\n"


@pytest.fixture
def serving(servers, tmp_path):
    a, b, stable = servers
    more = replicas(**{a.url: 3, b.url: 1})
    with Serving(tmp_path / "serve", (a.url, stable.url), more=more) as serving:
        yield serving
        assert serving.end() == 0


def replica(serving, server):
    pool = serving.status()["pools"]["infer"]
    return next(one for one in pool["replicas"] if one["url"] == server.url)


def answers(serving):
    """url -> replies of infer's replicas, by status."""
    counted = Counter()
    for key, n in serving.status()["gateways"][0]["counts"]["replicas"].items():
        pool, url, status = key.split("\t")
        assert pool == "infer"
        counted[url, status] += n
    return counted


def said(serving):
    """What `servanda gateway status` prints."""
    words = ["gateway", "status", "--gateway", serving.page]
    done = CliRunner().invoke(main, words, env={"SERVANDA_ADMIN_KEY": ADA})
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_a_replica_that_is_killed_under_load_costs_no_request_and_comes_back(servers, serving):
    _, b, _ = servers
    with Users(serving.begun(), teams="ab") as users:
        until(lambda: len(users.probe) > 200, "both are asked")
        b.kill()
        until(lambda: replica(serving, b)["out_at"], "it is left out")
        assert replica(serving, b)["why"] == "it refuses connections"
        assert f"a replica of infer is not used, {b.url}: it refuses connections" in said(serving)
        assert "1 of 2 replicas used" in said(serving)
        before = len(users.probe)
        until(lambda: len(users.probe) > before + 100, "the other one serves")

        b.start("q.json")
        until(lambda: replica(serving, b)["used_at"], "it is used again")
        back = answers(serving)[b.url, "2xx"]
        until(lambda: answers(serving)[b.url, "2xx"] > back + 20, "it serves again")
        users.__exit__()
    assert {(status, pool) for _, status, pool in users.probe} == {(200, "infer")}


def test_two_replicas_are_asked_three_to_one(servers, serving):
    a, b, _ = servers
    with Users(serving.begun(), teams="ab") as users:
        until(lambda: len(users.probe) > 400, "both are asked")
        users.__exit__()
    n = len(users.probe)

    def all_counted():
        counted = answers(serving)
        return sum(counted.values()) >= n and counted

    counted = until(all_counted, "the leader has the counts")
    total = sum(counted.values())
    assert counted.keys() == {(a.url, "2xx"), (b.url, "2xx")}
    assert abs(counted[a.url, "2xx"] - 3 * total / 4) < 1


@pytest.mark.parametrize(
    ("table", "words", "why"),
    [
        ("q.json", ("--served", "llama", *WORDS[2:]), "another kernel: model 'llama', not 'toy'"),
        ("other.json", WORDS, "another kernel: kernel.rows "),
    ],
)
def test_a_replica_that_restarts_as_another_kernel_serves_nobody(
    servers, serving, table, words, why
):
    _, b, _ = servers
    with Users(serving.begun(), teams="ab") as users:
        until(lambda: answers(serving)[b.url, "2xx"] > 10, "it serves")
        b.kill()
        b.start(table, words)
        until(lambda: why in replica(serving, b)["why"], "it is found out")
        before = answers(serving)[b.url, "2xx"]
        after = len(users.probe)
        until(lambda: len(users.probe) > after + 60, "the other one serves")
        assert answers(serving)[b.url, "2xx"] == before
        assert why.strip() in said(serving)
        users.__exit__()
    assert {(status, pool) for _, status, pool in users.probe} == {(200, "infer")}


def test_replicas_come_and_go_with_the_contract_and_its_evidence_stays(servers, serving):
    a, b, _ = servers
    with Users(serving.begun(), teams="ab") as users:
        until(lambda: answers(serving)[b.url, "2xx"] > 10, "it serves")
        serving.more = replicas(**{a.url: 1})
        serving.write()
        serving.line("was read again: infer at")
        serving.line(r"toy 0\.0\.0 is followed from .*; its evidence stays$")
        until(lambda: len(serving.status()["pools"]["infer"]["replicas"]) == 1, "one is left")
        before = answers(serving)[b.url, "2xx"]
        after = len(users.probe)
        until(lambda: len(users.probe) > after + 60, "the other one serves")
        assert answers(serving)[b.url, "2xx"] == before

        serving.more = replicas(**{a.url: 1, b.url: 1})
        serving.write()
        until(lambda: answers(serving)[b.url, "2xx"] > before + 10, "it serves again")

        serving.more = replicas(**{a.url: 1, a.url + "/": 1})
        serving.write()
        serving.line(r"\d+:\d+: .* is a replica of infer already")
        users.__exit__()
    assert {(status, pool) for _, status, pool in users.probe} == {(200, "infer")}
