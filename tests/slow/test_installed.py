# The wheel as its users have it: in an environment of its own, in a folder that held nothing.
#
#   make test-installed

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from scripts.counted import INSTALLED_MB

from tests import transcripts
from tests.test_docs import PAGES, ROOT, quick

HOME = os.environ.get("SERVANDA_INSTALLED", "")
pytestmark = pytest.mark.skipif(not HOME, reason="make test-installed")
BIN = Path(HOME).absolute() / "bin"
OURS = [BIN / "servanda"]
# what a checkout or its environment could add to an installed package
CHECKOUT = ("PYTHON", "SERVANDA_", "VIRTUAL_ENV")
ENV = {name: value for name, value in os.environ.items() if not name.startswith(CHECKOUT)}
ENV["PATH"] = f"{BIN}{os.pathsep}{ENV.get('PATH', '')}"
README = PAGES[0]
TORCH = HOME and any(BIN.parent.glob("lib/python*/site-packages/torch"))
torch = pytest.mark.skipif(not TORCH, reason="the wheel is installed without [transformers]")


@pytest.fixture
def files(tmp_path):
    """The files that the package writes, and the finished run of the tutorial."""
    subprocess.run([BIN / "servanda", "demo", "--files", "."], cwd=tmp_path, env=ENV, check=True)
    run = tmp_path / "runs" / "first" / "attempt-1"
    run.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "data" / "first.verdict.json", run / "verdict.json")
    return tmp_path


@pytest.mark.skipif(bool(TORCH), reason="the page has the size without torch")
def test_the_size_is_about_that_of_the_install_page():
    """To a tenth: a page rounds to ten megabytes, and releases of libraries differ by more."""
    done = subprocess.run(["du", "-sm", HOME], check=True, capture_output=True, text=True)
    assert int(done.stdout.split()[0]) == pytest.approx(INSTALLED_MB[""], rel=0.1)


def python(code, folder):
    call = [BIN / "python", "-c", code]
    return subprocess.run(call, cwd=folder, env=ENV, check=True, capture_output=True, text=True)


def test_the_package_is_the_installed_one_and_its_library_is_loaded(tmp_path):
    code = """
import servanda
from servanda.theory.divergence import row_sums
print(servanda.__file__)
print(row_sums.compiled() is not None)
"""
    place, compiled = python(code, tmp_path).stdout.splitlines()

    assert Path(place).is_relative_to(BIN.parent)
    assert compiled == "True"


def test_the_dump_check_prints_what_the_readme_shows(files):
    assert _problems("check", files) == []


@torch
def test_the_preflight_prints_what_the_readme_shows(files):
    assert _problems("preflight", files) == []


@torch
def test_the_demo_needs_no_file_around_it(tmp_path):
    """And leaves its page, and nothing else."""
    assert _problems("demo", tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["servanda-demo.html"]


def _problems(verb, folder):
    """Of the commands of the README with this verb."""
    listed = [command for block in transcripts.transcripts(README) for command in block]
    shown = [command for command in listed if command.words[:2] == ["servanda", verb]]
    assert shown
    found = [transcripts.problem(one, folder, OURS, ENV, measured=True) for one in shown]
    return [problem for problem in found if problem]


@pytest.mark.parametrize("page", [page for page in PAGES if quick(page)], ids=lambda p: p.name)
def test_quick_commands_print_what_the_page_shows(page, files):
    for block in quick(page):
        for command in block:
            problem = transcripts.problem(command, files, OURS, ENV)
            assert problem is None, problem


def test_every_file_that_a_shipped_contract_names_is_shipped(files):
    contracts = sorted((files / "examples").rglob("*.kernelcontract.yaml"))
    named = [
        path.parent / name
        for path in contracts
        for name in re.findall(r"(?:model|prompts): (\.\.[^\s,}]+)", path.read_text("utf-8"))
    ]

    assert named and [path for path in named if not path.exists()] == []
