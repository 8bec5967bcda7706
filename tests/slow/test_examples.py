# Every example contract on real kernels: the outcome and the exit code that its head promises;
# tests/test_examples.py holds the heads against this table.

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
CONTRACTS = {  # name -> path; one with a file of its own lies in a folder with it
    path.name.removesuffix(".kernelcontract.yaml"): path
    for path in sorted(EXAMPLES.rglob("*.kernelcontract.yaml"))
    # versions are compared and not run, an audit reads a log; the promotion and the gateway need
    # servers: test_promotion_example.py, test_gateway_example.py
    if path.parent.name not in ("versions", "audit", "promotion", "gateway")
}
EXPECTED = {
    "tiny-bf16": (0, "HOLDS: 13 of 13 enforced cells"),
    "tiny-engines": (0, "HOLDS: 6 of 6 enforced cells"),
    "tiny-fp8": (0, "HOLDS: 13 of 13 enforced cells"),
    "tiny-faults": (0, "HOLDS: 15 of 15 enforced cells"),
    "tiny-int8": (0, "HOLDS: 13 of 13 enforced cells"),
    "tiny-moe": (0, "HOLDS: 10 of 10 enforced cells"),
    "tiny-moe-replayed": (0, "HOLDS: 4 of 4 enforced cells"),
    "tiny-reward": (0, "HOLDS: 3 of 3 enforced cells"),
    "tiny-runtime": (0, "HOLDS: "),
    "tiny-int4": (1, "VIOLATED: "),
    "tiny-bf16-positions": (1, "VIOLATED: tv-long on long. 12 of 13 enforced cells"),
    "tiny-top-p": (1, "VIOLATED: fidelity on all."),
    "tiny-permuted-ids": (4, "the tokenizers differ"),
    "tiny-stale-weights": (4, "the weights differ"),
}
# test_docs_slow.py runs these, and a page shows their end: name -> page
OF_A_PAGE = {
    "tiny-bf16-positions": "README.md",
    "tiny-fp8": "docs/explanation/precision.md",
}
# `make demo` runs it, and ends only where it holds
OF_THE_DEMO = ("tiny-bf16",)
ALONE = [name for name in EXPECTED if name not in (*OF_A_PAGE, *OF_THE_DEMO)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_an_example_ends_as_its_head_says(tmp_path, name):
    code, sentence = EXPECTED[name]
    path = CONTRACTS[name]
    done = subprocess.run(
        [sys.executable, "-m", "servanda", "check", path, "--run-dir", tmp_path / "run"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert sentence in done.stdout + done.stderr
