# The plug-in of pytest, in sessions of pytest in processes of their own.

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from servanda.pytest_plugin import assert_holds
from servanda.runner.load import load
from servanda.runner.run import check as measured
from servanda.runner.run import in_process
from tests import kit

ROOT = Path(__file__).parents[1]
BROKEN = {"": kit.moved(kit.BASE, 0.2)}


def session(folder, code, *options, name="test_gate.py"):
    """The exit code and the output of one session, in which pytest finds the plug-in as it does
    where servanda is installed: by the entry point of pyproject.toml."""
    (folder / "test_folder").mkdir(exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_folder" / name).write_text(code)
    info = folder / "site" / "servanda-9.9.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: servanda\nVersion: 9.9\n")
    (info / "entry_points.txt").write_text(entry_points())
    # the first of two installed versions counts, so an installed servanda is not asked
    paths = [str(folder / "site"), str(ROOT / "src")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def entry_points():
    """What an installer writes of this package's entry point."""
    text = (ROOT / "pyproject.toml").read_text()
    _, _, after = text.partition("[project.entry-points.pytest11]\n")
    name, _, value = after.partition("\n")[0].partition(" = ")
    assert EntryPoint(name, value.strip('"'), "pytest11").load().assert_holds is assert_holds
    return f"[pytest11]\n{name} = {value.strip(chr(34))}\n"


@pytest.mark.slow
def test_a_contract_that_holds_passes_and_one_that_does_not_fails_with_its_report(tmp_path):
    kit.write(tmp_path / "test_folder" / "good")
    kit.write(tmp_path / "broken", q=BROKEN)  # beside pytest.ini
    code, output = session(
        tmp_path,
        """
import pytest
from servanda.pytest_plugin import assert_holds

@pytest.fixture(scope="module")
def good(kernel_contract):
    return assert_holds(kernel_contract("good/toy.kernelcontract.yaml"), run_dir="runs/good")

def test_good(good):
    assert good.outcome == "holds"

def test_good_again(good):
    assert_holds(good)

def test_broken(kernel_contract):
    assert_holds(kernel_contract("broken/toy.kernelcontract.yaml"))
""",
    )

    assert code == 1, output
    assert "2 passed" in output and "1 failed" in output
    assert (tmp_path / "runs" / "good").is_dir()
    assert not (tmp_path / "runs" / "toy").exists()
    (summary,) = [row for row in output.splitlines() if row.startswith("FAILED")]
    assert "test_broken - AssertionError: toy: violated: tv on all (mean tv is 0.2" in summary
    assert "E       AssertionError: toy: violated: tv on all" in output
    assert "VIOLATED: tv on all" in output  # of the report
    # a failure shows the line of the test, and none of servanda
    assert '>       assert_holds(kernel_contract("broken/' in output
    assert "src/servanda" not in output


@pytest.mark.slow
def test_a_path_that_is_not_there_names_both_places(tmp_path):
    code, output = session(tmp_path, "def test_it(kernel_contract): kernel_contract('gate.yaml')\n")

    assert code == 1
    places = f"{tmp_path}/test_folder/gate.yaml, {tmp_path}/gate.yaml"
    assert f"there is no contract 'gate.yaml'; looked for {places}" in output
    assert (
        "hint: a path starts from the folder of the test's file, or from pytest's rootdir" in output
    )


def test_a_session_that_does_not_use_it_loads_nothing_for_it(tmp_path):
    code, output = session(
        tmp_path,
        """
import sys

def test_nothing_is_loaded(pytestconfig):
    assert pytestconfig.pluginmanager.has_plugin("servanda")
    ours = {name for name in sys.modules if name.partition(".")[0] == "servanda"}
    assert ours == {"servanda", "servanda._version", "servanda.pytest_plugin"}
    assert not {"click", "httpx2", "numpy", "pydantic", "pyarrow", "torch"} & {*sys.modules}
""",
    )

    assert code == 0, output


@pytest.mark.slow
def test_asking_for_a_verdict_needs_no_torch(tmp_path):
    kit.write(tmp_path / "test_folder")
    code, output = session(
        tmp_path,
        """
import sys
from servanda.pytest_plugin import assert_holds

def test_it(kernel_contract):
    assert_holds(kernel_contract("toy.kernelcontract.yaml"))
    assert not {"torch", "transformers", "click"} & {*sys.modules}
""",
    )

    assert code == 0, output


def test_inconclusive_is_a_failure_with_its_reason(tmp_path):
    """A gap of 0.01 is not shown to be below 0.011 by 400 groups."""
    path, _ = kit.write(tmp_path, limit=0.011, last=400)
    verdict = measured(path, run_dir=tmp_path / "run", open=in_process)
    assert verdict.outcome == "inconclusive"

    with pytest.raises(AssertionError) as failed:
        assert_holds(verdict)

    first, _, report = str(failed.value).partition("\n\n")
    assert first.startswith("toy: inconclusive: tv on all (too few data: mean tv is 0.010")
    assert first.endswith(" more prompt groups would decide)")
    assert report == str(verdict)


def test_a_kernel_that_cannot_be_measured_is_a_failure_with_its_reason(tmp_path):
    path, _ = kit.write(tmp_path, train=", batch_size: 2")
    contract = load(path)
    (tmp_path / "q.json").write_text("{}")  # read as a contract, gone as a kernel

    with pytest.raises(AssertionError, match=r"^toy: there is no verdict: .*q\.json"):
        assert_holds(contract)


def test_time_that_is_over_is_inconclusive(tmp_path):
    path, _ = kit.write(tmp_path, limit=0.0101, last=20000)

    with pytest.raises(AssertionError, match=r"^toy: inconclusive: "):
        assert_holds(load(path), max_time_s=0)


@pytest.mark.parametrize("wrong", ["toy.kernelcontract.yaml", None])
def test_what_is_no_contract_is_refused_with_the_next_move(wrong):
    with pytest.raises(TypeError, match=r"takes a contract or a verdict, not .*kernel_contract"):
        assert_holds(wrong)


def test_options_of_a_measurement_are_refused_with_a_verdict(tmp_path):
    path, _ = kit.write(tmp_path)
    verdict = measured(path, run_dir=tmp_path / "run", open=in_process)
    with pytest.raises(TypeError, match="run_dir and max_time_s are for a contract"):
        assert_holds(verdict, run_dir=tmp_path / "run")
