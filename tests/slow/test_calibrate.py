# Calibrated limits are kept as often as was asked for: runs of good pairs, and later runs of each.
#
# The power is about both, the run that limits come from and the one that is judged, so both
# are drawn again and again.  A limit from this run's mean alone would hold in 82 of 100.

import re

import pytest
from click.testing import CliRunner

from servanda.cli import main
from servanda.runner import run
from tests import kit
from tests.authoring.test_calibrate import PAIR, SLICES

GOOD, LATER = 10, 4
POWER = 0.9
MARGIN = 3 * (POWER * (1 - POWER) / (GOOD * LATER)) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("claim", ["population", "realised"])
def test_later_runs_hold_as_often_as_was_asked_for(tmp_path, claim):
    outcomes = []
    for seed in range(GOOD):
        folder = tmp_path / f"{seed}"
        options = {"q": PAIR, "slices": SLICES, "claim": claim, "first": 320, "last": 320}
        path, _ = kit.write(folder, seed=seed, limit=0.5, **options)
        run.check(path, run_dir=folder / "run", open=run.in_process)
        new = folder / "new.kernelcontract.yaml"
        call = ["calibrate", str(folder / "run"), "--power", str(POWER)]
        assert CliRunner().invoke(main, [*call, "--save-contract", str(new)]).exit_code == 0
        for later in range(1000 + LATER * seed, 1000 + LATER * (seed + 1)):
            new.write_text(re.sub(r"seed: \d+", f"seed: {later}", new.read_text()))
            verdict = run.check(new, run_dir=folder / f"{later}", open=run.in_process)
            outcomes.append(verdict.outcome)

    assert outcomes.count("violated") == 0
    assert outcomes.count("holds") / len(outcomes) >= POWER - MARGIN
