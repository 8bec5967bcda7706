# Every example contract reads without a problem, and two refusals and a small check are run.

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from servanda.runner import run
from tests.slow.test_examples import CONTRACTS, EXAMPLES, EXPECTED, OF_A_PAGE

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

SMALL = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: small}}
kernels:
  train: {{engine: transformers, model: {root}/models/tiny-lm, dtype: float32}}
  infer: {{engine: transformers, model: {root}/models/tiny-lm, dtype: bfloat16, attention: sdpa}}
workload: {{prompts: prompts.jsonl, round: 16, sampling: {{max_new_tokens: 12}}}}
claim: realised
statistical:
  - {{id: tv, metric: tv, aggregate: mean, at_most: 0.05}}
promotion: {{offline: {{prompt_groups: [32, 64]}}}}
"""


def test_every_example_has_its_expected_end():
    assert CONTRACTS.keys() == EXPECTED.keys()


def test_an_example_that_a_page_runs_ends_there_as_expected():
    for name, page in OF_A_PAGE.items():
        assert EXPECTED[name][1] in (EXAMPLES.parent / page).read_text(), (name, page)


def test_every_example_is_read_without_a_problem():
    for name, path in CONTRACTS.items():
        assert run.load(path).metadata.name == name


def test_the_first_line_of_every_example_says_its_exit_code():
    for name, (code, _) in EXPECTED.items():
        head = CONTRACTS[name].read_text().splitlines()[0]
        assert head.endswith((f"exits {code}.", f"exit {code}.")), f"{CONTRACTS[name]}: {head}"


def servanda(*arguments):
    command = [sys.executable, "-m", "servanda", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
@needs_torch
@pytest.mark.parametrize("name", ["tiny-permuted-ids", "tiny-stale-weights"])
def test_another_policy_is_refused(tmp_path, name):
    code, sentence = EXPECTED[name]
    done = servanda("check", CONTRACTS[name], "--run-dir", tmp_path / "r")
    assert done.returncode == code and sentence in done.stderr


@pytest.mark.slow
@needs_torch
def test_two_real_kernels_in_their_workers(tmp_path):
    prompts = EXAMPLES.parent / "data" / "prompts.jsonl"
    lines = [line for line in prompts.read_text().splitlines() if len(line) < 200]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines[:100]))
    path = tmp_path / "small.kernelcontract.yaml"
    path.write_text(SMALL.format(root=EXAMPLES.parent))
    done = servanda("check", path, "--run-dir", tmp_path / "run", "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "HOLDS: 3 of 3 enforced cells" in done.stdout


@pytest.mark.slow
@needs_torch
def test_a_prompt_beyond_the_context_is_named_by_its_line(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "' + "b " * 600 + '"}\n')
    path = tmp_path / "small.kernelcontract.yaml"
    path.write_text(SMALL.format(root=EXAMPLES.parent))
    done = servanda("check", path, "--run-dir", tmp_path / "run", "--quiet")
    assert done.returncode == 2
    assert "prompts.jsonl:2:1: a prompt of" in done.stderr
    assert "exceeds the context of 512" in done.stderr


@pytest.mark.slow
@needs_torch
def test_a_missing_model_folder(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    path = tmp_path / "small.kernelcontract.yaml"
    path.write_text(SMALL.format(root=Path("/nowhere")))
    done = servanda("check", path, "--run-dir", tmp_path / "run", "--quiet")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "/nowhere/models/tiny-lm" in done.stderr
