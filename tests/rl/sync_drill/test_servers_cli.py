# `servanda preflight --checkpoint DIR --url URL`: servers, and no code.

import json

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

from servanda.cli.main import main
from tests.rl.served_weights import begun, saved, serving, small_model


def ran(*words):
    done = CliRunner().invoke(main, ["preflight", *map(str, words)])
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(small_model(), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def servers(folder):
    with serving(folder, "vllm", 2) as urls:
        yield urls


@pytest.mark.slow
def test_a_reload_that_reaches_each_server_holds(folder, servers, tmp_path):
    for url in servers:
        begun(url)

    code, output = ran(
        "--checkpoint", folder, *("--url", servers[0]), *("--url", servers[1]),
        *("--folder", tmp_path, "--quiet"),
    )  # fmt: skip

    assert code == 0, output
    assert "HOLDS" in output and "on each of 2 replicas" in output
    assert not [*tmp_path.iterdir()]  # the checkpoints are gone


@pytest.mark.slow
def test_a_stale_server_is_exit_1_with_its_url(folder, servers):
    begun(servers[0])
    begun(servers[1], "ignores")

    code, output = ran(
        "--checkpoint", folder, *("--url", servers[0]), *("--url", servers[1]),
        *("--quiet", "--format", "json"),
    )  # fmt: skip

    said = json.loads(output)
    assert code == 1 and said["cause"] == "never_synced"
    assert [r["cause"] for r in said["replicas"]] == ["", "never_synced"]


def test_a_call_that_lacks_a_part_is_refused(folder, tmp_path):
    assert "need each other" in ran("--checkpoint", folder)[1]
    assert "need each other" in ran("--url", "http://127.0.0.1:1")[1]
    assert ran("x.py:y", "--checkpoint", folder, "--url", "http://127.0.0.1:1")[0] == 2
    code, output = ran("--checkpoint", tmp_path, "--url", "http://127.0.0.1:1")
    assert code == 4 and "is no checkpoint that transformers can load" in output
