# The example of a gateway, run for real: servers, users, a slice that breaks and comes back.

import json
import subprocess
import sys
from pathlib import Path

import pytest

from servanda.promotion.ledger.ledger import verify_at
from servanda.traces.request_log import read_served
from tests.slow.test_promotion_example import ours

ROOT = Path(__file__).parents[2]
RUN = ROOT / "examples" / "gateway" / "run.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    out = tmp_path_factory.mktemp("gateway") / "out"
    line = [sys.executable, RUN, "--out", out]
    return out, subprocess.run(line, cwd=out.parent, capture_output=True, text=True)


def test_it_ends_as_it_has_to(ran):
    _, done = ran
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✗" not in done.stdout


def test_the_slice_goes_all_the_way_round(ran):
    _, done = ran
    places = ("quarantined", "probation", "recovering", "active")
    steps = [done.stdout.index(f"-> {place}") for place in places]
    assert steps == sorted(steps)
    assert verify_at(str(ran[0] / "ledger.db")).sound


def test_every_user_was_answered_and_the_log_has_every_sample_in_launch_order(ran):
    out, _ = ran
    met = [json.loads(line) for line in (out / "users.jsonl").read_text().splitlines()]
    assert {row["status"] for row in met} == {200}
    rows = []
    for file in sorted((out / "log").glob("*.jsonl")):
        rows += read_served(file.read_text(), str(file))
    assert [row.index for row in rows] == [*range(len(rows))]


def test_nothing_that_was_started_is_left(ran):
    assert ours(ran[0].parent) == []
