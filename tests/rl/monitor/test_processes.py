# Ranks that are processes: torch.distributed gathers, and all of them say the same.

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

RANKS = 3
CHILD = """
import json, sys
from datetime import timedelta
import numpy as np
import torch.distributed as dist
from servanda.errors import EvidenceError
from servanda.rl import Monitor
from tests.rl.monitor.made import step

rank, ranks, store, *cases = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks,
    timeout=timedelta(seconds=60),
)

def gather(message):
    said = [None] * ranks
    dist.all_gather_object(said, message)
    return said

def said_of(case):
    monitor = Monitor("verl-sync", gather=gather)
    for weights in range(3):
        train, infer, mask = step(np.random.default_rng([rank, weights]), 12, 256, 0.3)
        odd = rank == 1 and weights == 1
        if odd and case == "nan":
            infer = np.full_like(infer, np.nan)
        if odd and case == "empty":
            train, infer, mask = train[:0], infer[:0], mask[:0]
        if odd and case == "no mask":
            mask = None
        try:
            at = weights + 5 if odd and case == "another step" else weights
            found = monitor.observe(train, infer, mask, weights=at)
            yield [found.outcome, sorted(found.metrics.items()), found.verdict.evidence]
        except EvidenceError as error:
            yield [str(error).splitlines()[0]]

print(json.dumps({case: [*said_of(case)] for case in cases}))
dist.destroy_process_group()
"""


NO_MASK = "step 1 has no mask, so the trained tokens are unknown"
SECOND = {  # what rank 1 is given at the second step -> what all ranks say of it
    "nan": "error",
    "empty": "violated",
    "another step": "rank 0 has step 1, and rank 1 has 6",
    "no mask": f"rank 1: {NO_MASK}",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each process said of three steps of each case."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(rank), str(RANKS), str(store), *SECOND],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            cwd=Path(__file__).parents[3],
        )
        for rank in range(RANKS)
    ]
    done = [child.communicate() for child in children]
    assert not any(child.returncode for child in children), done
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


@pytest.mark.slow
@pytest.mark.parametrize("case", SECOND)
def test_processes_say_the_same_of_every_step(case, ranks):
    said = [rank[case] for rank in ranks]
    if case == "no mask":
        assert said[1][1] == [NO_MASK]  # its own, in its own words
        said.pop(1)

    assert all(steps == said[0] for steps in said)
    assert [steps[0] for steps in said[0]] == ["violated", SECOND[case], "violated"]
