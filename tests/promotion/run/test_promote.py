# The verb promote: what it says of a look, and what it tells before it looks.

import json

import pytest
from click.testing import CliRunner

from servanda.cli.main import main
from servanda.promotion.ledger.ledger import open_ledger
from servanda.promotion.run.history import histories, roll_back_run
from tests import serving
from tests.promotion.run.test_promoter import Clock, Site


@pytest.fixture
def site(tmp_path):
    with open_ledger(str(tmp_path / "ledger.db")) as ledger:
        yield Site(tmp_path, ledger, Clock())


def promote(site, *options):
    """The verb, with kernels in processes of their own."""
    line = ["promote", str(site.path), "--ledger", str(site.folder / "ledger.db")]
    line += ["--run-dir", str(site.folder / "run"), "--log", str(site.folder / "served.jsonl")]
    return CliRunner().invoke(main, [*line, *options])


@pytest.mark.slow
def test_what_is_outside_of_the_contract_is_said_with_its_reason_and_its_number(site):
    """Anyone who writes another sampling to a bad answer does not hide it without a trace."""
    history = site.promote()
    rows = serving.rows(site.path, "shadow", 40, run=history.run)
    for row in rows[7:10]:
        row["sampling"] = {**row["sampling"], "temperature": 0.5}
    serving.log(site.folder, rows)

    said = promote(site, "--quiet")

    assert said.exit_code == 3
    assert said.stderr.splitlines()[-1] == (
        "  3 requests are no evidence: asked for another sampling than the workload's"
    )


@pytest.mark.slow
def test_what_was_taken_back_before_a_kill_is_told_first(site):
    """No one goes on with the run that another replaced; its end is told all the same."""
    program = f"sh -c 'row=$(cat); echo \"$row\" >> {site.folder}/got'"
    first = promote(site, "--quiet", "--command", program)
    (history,) = histories(site.ledger)
    roll_back_run(site.ledger, history, actor="Ada", reason="enough", now=history.state.seen)
    got = site.folder / "got"
    before = got.read_text()

    promote(site, "--quiet", "--fresh", "--command", program)

    assert first.exit_code == 3
    told = [json.loads(line) for line in got.read_text().removeprefix(before).splitlines()]
    assert (told[0]["run"], told[0]["status"]) == (history.run, "rolled_back")
    assert told[-1]["run"] != history.run
