# `make demo-moe` ends as its page says, and prints what the page shows.

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_demo_of_routing_replay_names_each_route_and_each_wrong_replay(tmp_path):
    command = [sys.executable, "examples/moe/run.py", "--out", tmp_path / "moe"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"layer \d: bfloat16 picks expert \d+, float32 expert \d+", done.stdout)
    assert "misaligned: row t is the sampler's row t-1" in done.stdout
    gaps = dict(re.findall(r"(\w+) ([\d.]+)(?:,|\n)", done.stdout.split("nats: ")[1]))
    assert float(gaps["replayed"]) < float(gaps["own"]) < float(gaps["misaligned"])
