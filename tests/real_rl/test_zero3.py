# DeepSpeed 0.19: a trainer that ZeRO-3 shards over three gloo processes, so that parts are padded
# and the last process has nothing of some tensors.

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.rl.sharded_faults import FAULTS

SOME = ("healthy", "never_synced", "one_mlp", "one_shard", "late")


@pytest.mark.parametrize("kind", ["gathered", "released", "offloaded"])
def test_faults_get_their_names_and_every_part_is_restored(venvs, kind):
    script = Path(__file__).with_name("zero3_drills.py")
    run = ("-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "3", script)
    done = subprocess.run(
        [f"{venvs}/trl/bin/python", *run, kind, *SOME],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"fault"')]
    found = {row["fault"]: (row["outcome"], row["cause"], row["bits"]) for row in rows}
    causes = {name: FAULTS[name].cause for name in SOME}
    assert found == {
        name: ("violated" if cause else "holds", cause, True) for name, cause in causes.items()
    }
