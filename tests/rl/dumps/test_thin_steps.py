"""A dump of thin steps: what no step decides alone is decided by the last few together."""

import re

from click.testing import CliRunner

from servanda.cli.main import main
from tests.field.worlds import NOISE, draw, run

STEPS = range(1, 11)


def watched(folder, noise):
    dump = run(folder / "dump", lambda t: draw(3, t, size=4, width=24, noise=noise), STEPS)
    done = CliRunner().invoke(main, ["watch", str(dump), "--once", "--preset", "trl"])
    lines = [line for line in done.output.splitlines() if line.startswith("step ")]
    assert len(lines) == len(STEPS), done.output
    return done.exit_code, lines


def test_thin_healthy_steps_hold_with_those_before_them(tmp_path):
    code, lines = watched(tmp_path, NOISE)
    assert code == 0
    assert "inconclusive" in lines[0] and "needs about" in lines[0]
    decided = [line for line in lines if " holds " in line]
    assert decided and all(re.search(r"\(steps 1 to \d+\)", line) for line in decided)


def test_thin_broken_steps_are_violated_together(tmp_path):
    code, lines = watched(tmp_path, 8 * NOISE)
    assert code == 1
    assert any(re.search(r"violated .*\(steps 1 to \d+\)", line) for line in lines)
