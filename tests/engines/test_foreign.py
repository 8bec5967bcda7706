# Code that a contract names: it is said, and --no-code runs none of it.

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from servanda.contract.model import Kernel
from servanda.engines import BUILTIN, engine_names
from servanda.engines.base import ENGINES
from servanda.engines.foreign_code import NO_CODE, code_of
from servanda.errors import ContractError, MeasurementError
from servanda.runner import load
from servanda.runner.run import check as check_contract
from servanda.runner.run import in_process
from tests import kit
from tests.kit import servanda

REWARD = """
reward: {of: rewards.py:score, range: [0, 1]}
"""
RUNS = (
    "from pathlib import Path\nPath({mark!r}).touch()\ndef score(prompt, answer):\n    return 1.0\n"
)


@pytest.fixture
def reward(tmp_path):
    """A contract whose reward leaves a mark when its file is run."""
    path, _ = kit.write(tmp_path, stable=None, more=REWARD)
    text = path.read_text().replace(
        "statistical:\n", "statistical:\n  - {id: gain, metric: reward_gap, at_most: 0.9}\n"
    )
    path.write_text(text)
    mark = tmp_path / "mark"
    (tmp_path / "rewards.py").write_text(RUNS.format(mark=str(mark)))
    return path, mark


def python_of(tmp_path):
    """A contract whose infer runs an interpreter that leaves a mark."""
    mark, fake = tmp_path / "mark", tmp_path / "python"
    fake.write_text(f"#!/bin/sh\ntouch {mark}\n")
    fake.chmod(0o755)
    path, _ = kit.write(tmp_path, stable=None, infer=", python: python")
    return path, mark


def test_lint_and_explain_say_what_runs(reward):
    path, mark = reward
    said = f"reward.of runs score of {path.parent / 'rewards.py'}"
    assert f"  runs code: {said}" in servanda("contract", "lint", path).output
    assert json.loads(servanda("contract", "lint", path, "--format", "json").output)[0]["code"] == [
        said
    ]
    assert said in servanda("contract", "explain", path).output
    assert not mark.exists()


def test_the_reward_runs_only_without_no_code(reward, tmp_path):
    path, mark = reward
    check = ("check", path, "--run-dir", tmp_path / "run")
    refused = servanda(*check, "--no-code")
    assert refused.exit_code == 2
    assert "reward.of runs score of" in refused.output and "--no-code refuses it" in refused.output
    assert f"{path}:" in refused.output  # with its place
    assert not mark.exists()

    done = servanda(*check)
    assert "runs code: reward.of" in done.output
    assert mark.exists()


def test_the_option_ends_with_the_call(reward):
    path, _ = reward
    assert servanda("contract", "lint", path, "--no-code").exit_code == 2
    assert servanda("contract", "lint", path).exit_code == 0


@pytest.mark.parametrize("side", ["A", "B"])
def test_kernel_strings_are_refused_before_anything_is_opened(side, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, mark = python_of(tmp_path)
    strings = {"A": "table:p.json", "B": "table:q.json"}
    strings[side] += ",python=./python"
    done = servanda("compare", *strings.values(), "--prompts", "prompts.jsonl", "--no-code")
    assert (done.exit_code, mark.exists()) == (2, False)
    assert f"{side}.python runs the interpreter ./python" in done.output


def test_an_engine_of_an_installed_package_is_code():
    contract = load.load(Path(__file__).parents[2] / "examples/tiny-bf16.kernelcontract.yaml")
    assert code_of(contract) == ()
    other = Kernel(engine="clock")
    assert [str(c) for c in code_of(contract.model_copy(update={"stable": other}))] == [
        "stable.engine runs engine 'clock' of an installed package"
    ]


def test_the_last_guard_stands_before_the_kernels(tmp_path, monkeypatch):
    """A contract that was loaded before is refused all the same where it is measured."""
    path, mark = python_of(tmp_path)
    contract = load.load(path)
    monkeypatch.setenv(NO_CODE, "1")
    with pytest.raises(ContractError, match="runs the interpreter"):
        check_contract(contract, run_dir=tmp_path / "run")
    assert not mark.exists()


def test_code_of_a_models_folder_is_never_run(tmp_path):
    """config.json may name a class of a file beside it; no one trusts it."""
    pytest.importorskip("transformers")
    model = Path(__file__).parents[2] / "models/tiny-lm"
    folder, mark = tmp_path / "model", tmp_path / "mark"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "stranger", "auto_map": {"AutoConfig": "stranger.Config"}}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "stranger.py").write_text(f"open({str(mark)!r}, 'w').write('ran')\n")
    with pytest.raises(MeasurementError):
        in_process(Kernel(engine="transformers", model=str(folder)), "infer")
    assert not mark.exists()


def test_engines_are_found_by_name_without_importing_them():
    assert set(engine_names()) >= {"table", "transformers"}


def test_packages_are_asked_for_engines_only_about_a_name_that_is_not_built_in(monkeypatch):
    """The metadata of all packages takes as long to read as a contract."""
    asked = []

    def entry_points(group):
        asked.append(group)
        return [EntryPoint("mine", "my.engine", group)]

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    monkeypatch.setattr(ENGINES, "_offers", None)  # an earlier test may have asked

    assert "table" in engine_names() and asked == []
    assert "mine" in engine_names() and "yours" not in engine_names()
    assert asked == ["servanda.engines"]
    assert [*engine_names()][-1] == "mine"
    # a test that ran before in this process may have registered one
    assert {*engine_names()} == {*BUILTIN, *ENGINES.registered, "mine"}
    assert len(engine_names()) == len([*engine_names()])
