# Real servers that were written before `servanda relations` was first run on them: some of them.
# `python -m benchmarks.relations --servers` asks all of them.

import json

import pytest
from click.testing import CliRunner

from servanda.cli.main import main

pytest.importorskip("torch")
pytest.importorskip("uvicorn")
from tests.field.unseen_servers import SERVERS, serve

SMALL = ("--longest", "66", "--requests", "4")
# server -> the relation that is violated; "": all hold
RIGHT = {
    "float32": "",
    "noisy": "",
    "fork_without_copy": "client",
    "token_from_slot": "prefix-cache",
    "split_k_remainder": "batching",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_server_is_answered_as_it_was_written(name):
    only = RIGHT[name]
    words = ("--only", only) if only else ()
    with serve(next(case for case in SERVERS if case.name == name)) as url:
        asked = ("relations", url, *SMALL, *words, "--quiet", "--format", "json")
        found = CliRunner().invoke(main, asked)
    outcomes = {r["relation"]: r["outcome"] for r in json.loads(found.stdout)["relations"]}

    if only:
        assert found.exit_code == 1 and outcomes[only] == "violated", found.output
    else:
        assert found.exit_code == 0 and {*outcomes.values()} == {"holds", "untestable"}


def test_each_case_says_what_is_right():
    kinds = [case.kind for case in SERVERS]
    assert len({case.name for case in SERVERS}) == len(kinds) == 40
    assert kinds.count("fault") == kinds.count("healthy")
    assert all(bool(case.relations) == (case.kind == "fault") for case in SERVERS)
