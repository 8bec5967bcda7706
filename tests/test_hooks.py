# The hooks of pre-commit: the manifest against the tool's fields, and their commands in a real
# repository; with pre-commit itself where it is installed.

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests import kit

ROOT = Path(__file__).parents[1]
MANIFEST = ROOT / ".pre-commit-hooks.yaml"
HOOKS = {hook["id"]: hook for hook in YAML(typ="safe").load(MANIFEST.read_text())}
# https://pre-commit.com/#creating-new-hooks
NEEDED = {"id", "name", "entry", "language"}
OPTIONAL = {"args", "description", "files", "pass_filenames", "require_serial", "types", "types_or"}


@pytest.fixture
def repository(tmp_path):
    """A repository of git with one committed contract, and a test of it."""
    kit.write(tmp_path)
    git(tmp_path, "init", "-q")
    edit(tmp_path, "{name: toy}", "{name: toy, version: 1.0.0}")
    (tmp_path / "toy.kerneltest.yaml").write_text(
        "apiVersion: servanda.dev/v1alpha1\nkind: ContractTest\nmetadata: {name: toy-tests}\n"
        "contract: toy.kernelcontract.yaml\ncases:\n"
        "  - {name: a gap, traffic: {all: 'gap(0.3)x2000'}, expect: [{verdict: violated}]}\n"
    )
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "a contract")
    return tmp_path


def git(folder, *words):
    who = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True)


def edit(folder, old, new):
    path = folder / "toy.kernelcontract.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def run(folder, name):
    """The exit code and the output of a hook, called as pre-commit calls it."""
    hook = HOOKS[name]
    files = subprocess.run(["git", "ls-files"], cwd=folder, capture_output=True, text=True)
    named = [file for file in files.stdout.split() if re.search(hook["files"], file)]
    assert named
    words = [*shlex.split(hook["entry"]), *hook.get("args", [])]
    assert words[0] == "servanda"
    words = [sys.executable, "-m", *words, *(named if hook.get("pass_filenames", True) else [])]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_the_manifest_has_what_pre_commit_needs_and_nothing_that_it_does_not_know():
    assert list(HOOKS) == ["servanda-lint", "servanda-diff", "servanda-test"]
    for hook in HOOKS.values():
        assert NEEDED <= hook.keys() <= NEEDED | OPTIONAL
        assert hook["language"] == "python"


@pytest.mark.slow
def test_a_good_contract_passes_every_hook(repository):
    assert run(repository, "servanda-lint")[0] == 0
    assert run(repository, "servanda-diff") == (
        0,
        "toy 1.0.0 -> 1.0.0\nthe same contract; evidence carries over\n",
    )
    assert run(repository, "servanda-test")[0] == 0


def test_a_wrong_contract_does_not_pass_lint(repository):
    edit(repository, "metric: tv", "metric: vt")
    code, output = run(repository, "servanda-lint")
    assert code == 2 and "no metric is named 'vt'" in output


def test_a_looser_contract_has_to_say_so_in_its_version(repository):
    edit(repository, "at_most: 0.05", "at_most: 0.06")
    code, output = run(repository, "servanda-diff")
    assert code == 1
    assert "metadata.version stayed 1.0.0; a change that breaks wants 2.0.0" in output
    assert "HEAD:toy.kernelcontract.yaml" in output

    edit(repository, "version: 1.0.0", "version: 2.0.0")
    code, output = run(repository, "servanda-diff")
    assert code == 0 and "BREAKING for the consumer: 1 loosened" in output


def test_a_contract_that_no_longer_does_what_its_test_says_fails(repository):
    edit(repository, "at_most: 0.05", "at_most: 0.5")
    code, output = run(repository, "servanda-test")
    assert code == 1 and "verdict: expected violated, found" in output


def test_pre_commit_accepts_the_manifest():
    if importlib.util.find_spec("pre_commit") is None:
        pytest.skip("pre-commit is not installed: pip install pre-commit")
    words = [sys.executable, "-m", "pre_commit", "validate-manifest", MANIFEST]
    assert subprocess.run(words).returncode == 0


@pytest.mark.slow
def test_pre_commit_installs_this_repository_and_runs_a_hook(repository, tmp_path):
    if importlib.util.find_spec("pre_commit") is None:
        pytest.skip("pre-commit is not installed: pip install pre-commit")
    edit(repository, "at_most: 0.05", "at_most: 0.06")
    git(repository, "add", ".")
    words = [
        sys.executable,
        "-m",
        "pre_commit",
        "try-repo",
        str(ROOT),
        "servanda-diff",
        "--all-files",
    ]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    done = subprocess.run(words, cwd=repository, env=env, capture_output=True, text=True)

    assert done.returncode == 1, done.stdout + done.stderr
    assert "BREAKING for the consumer: 1 loosened" in done.stdout
