# servanda.rl: the drill from a trainer's own script.

import subprocess
import sys

import pytest

from servanda.errors import MeasurementError


def test_the_door_opens_without_torch():
    lazy = "import servanda.rl, sys; servanda.rl.Trainee; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", lazy], check=True)


def test_a_module_a_sync_and_a_score_are_enough():
    pytest.importorskip("torch")
    from servanda.rl import preflight
    from tests.rl.sync_drill.toys import pair

    trainee, _ = pair()

    assert preflight(trainee).exit_code == 0
    assert preflight(trainee.module, sync=trainee.sync, score=trainee.score).exit_code == 0
    with pytest.raises(
        MeasurementError, match="needs both sync= and score=, and score= is missing"
    ):
        preflight(trainee.module, sync=trainee.sync)
    with pytest.raises(MeasurementError, match="Toy is neither a Trainee nor a TRL trainer"):
        preflight(trainee.module)
