# The size of the house: each room keeps its budget of lines, which only goes down.
#
# A limit is the larger of today's number and the room's final budget.  A change that needs more
# takes something out first, or merges two things that do the same.

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "servanda"

# lines of *.py, as `ruff format` writes them; templates, styles, scripts and C are counted apart
BUDGET = {
    "theory": 6676,
    "traces": 1748,
    "contract": 2712,
    "judgement": 14766,
    "engines": 14997,
    "report": 4800,
    "runner": 7740,
    "rl": 26737,
    "authoring": 5510,
    "cli": 6674,
    "root": 516,
    "promotion": 4612,
    "gateway": 15063,
}
ASIDE = {".html": 466, ".css": 173, ".js": 130, ".c": 198}  # suffix -> lines under src
# tests: with those of the same steps three ways, of prices, of strangers' contracts, of observers
# that fail, of what help texts state, of the real language model, of a number format's
# cost, of memory that kernels need, of rare faults and of causes with the data of unseen cases, and
# of data that lies
OUTSIDE = {"tests": 114_258, "benchmarks": 16_295}
LONGEST_FILE, LONGEST_FUNCTION = 900, 60
# functions that are longer; the list only shrinks
LONG = {
    "authoring/calibrate/limits.py:calibrate",
    "authoring/contract_test/evidence.py:synthetic_data",
    "cli/calibrate.py:calibrate",
    "cli/compare.py:compare_command",
    "cli/preflight.py:preflight_command",
    "cli/promote.py:promote",
    "cli/serve.py:serve",
    "cli/serve_processes.py:serve",
    "engines/triton_kernels.py:_reduce",
    "gateway/controller/state.py:ControllerState.commit",
    "judgement/verdict.py:judge",
    "promotion/run/promoter.py:evaluate_leg",
    "promotion/run/promoter.py:promote",
    "rl/dumps/formats/parquet.py:Writer.step",
    "rl/dumps/judge.py:judge_dump",
    "rl/monitor/batch.py:Batch.of",
    "rl/monitor/monitor.py:Monitor.observe",
    "runner/compare/contract.py:prepare",
    "runner/run.py:check",
}


def lines(paths):
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def of_room(room):
    return [*SRC.glob("*.py")] if room == "root" else [*(SRC / room).rglob("*.py")]


def functions(path):
    """(name, lines) of each function of a module, of those inside others, too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    stack = [(node, "") for node in tree.body]
    while stack:
        node, above = stack.pop()
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        name = f"{above}{node.name}." if named else above
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name[:-1], node.end_lineno - node.lineno + 1
        stack += [(child, name) for child in ast.iter_child_nodes(node)]


@pytest.mark.parametrize("room", BUDGET)
def test_a_room_keeps_its_budget(room):
    n = lines(of_room(room))
    assert n <= BUDGET[room], f"{room} has {n} lines: take something out, or merge two things"


def test_every_room_has_a_budget():
    assert {path.name for path in SRC.iterdir() if (path / "__init__.py").exists()} == {*BUDGET} - {
        "root"
    }


@pytest.mark.parametrize("suffix", ASIDE)
def test_what_is_no_python_keeps_its_budget_too(suffix):
    assert lines(SRC.rglob(f"*{suffix}")) <= ASIDE[suffix]


@pytest.mark.parametrize("folder", OUTSIDE)
def test_tests_and_benchmarks_keep_their_budget(folder):
    n = lines((ROOT / folder).rglob("*.py"))
    assert n <= OUTSIDE[folder], f"{folder}/ has {n} lines"


def test_no_file_outgrows_one_idea():
    lengths = {str(path.relative_to(SRC)): lines([path]) for path in SRC.rglob("*.py")}
    assert {name: n for name, n in lengths.items() if n > LONGEST_FILE} == {}


@pytest.mark.slow
def test_no_further_function_outgrows_a_screen():
    long = {
        f"{path.relative_to(SRC)}:{name}"
        for path in SRC.rglob("*.py")
        for name, n in functions(path)
        if n > LONGEST_FUNCTION
    }
    assert long <= LONG, f"longer than {LONGEST_FUNCTION} lines: {sorted(long - LONG)}"
    assert long == LONG, f"no longer so long, take it from the list: {sorted(LONG - long)}"
