# DeepSpeed 0.19: a trainer that ZeRO-3 shards over three gloo processes, so that parts are padded
# and the last process has nothing of some tensors.

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
CAUSES = {
    "healthy": "",
    "never synced": "never_synced",
    "one MLP": "one_mlp",
    "last rank": "shard_stale",
    "old head": "tied_head_stale",
}


def test_faults_get_their_names_and_every_part_is_restored(venvs, tmp_path):
    out = tmp_path / "rows.json"
    done = subprocess.run(
        [
            *(f"{venvs}/trl/bin/python", "-W", "ignore", "-m", "torch.distributed.run"),
            *("--nproc-per-node", "3", Path(__file__).with_name("zero3_drills.py"), out),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(out.read_text())
    assert len(rows) == 3 * len(CAUSES)
    for fault, kind, row in rows:
        cause = CAUSES[fault]
        expected = {
            "outcome": "violated" if cause else "holds",
            "cause": cause,
            "restored": True,
            "goes on": True,
        }
        assert {key: row[key] for key in expected} == expected, (fault, kind, row)
    assert {tuple(row["lost"]) for fault, _, row in rows if fault == "last rank"} == {
        ("shard of rank 2",)
    }
