# `python -m benchmarks.theory`: its tables, its exit code, and the page that it writes.

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.theory import CHALLENGES, SCENARIOS, Trial, procedures
from benchmarks.theory.__main__ import theory
from benchmarks.theory.scenarios import Scenario
from benchmarks.theory.simulation import Ever
from click.testing import CliRunner

from servanda.theory.bounds.theorem import THEOREMS, Theorem

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "falsification.md"
FEW = ("--cases", "20", "--runs", "10")


def bench(*arguments):
    return CliRunner().invoke(theory, [*map(str, arguments)], catch_exceptions=False)


@pytest.fixture
def false_theorem(monkeypatch):
    """A theorem that says that nothing exceeds 1/2."""

    def half(x: float) -> float:
        """Nothing exceeds one half, |x| included."""
        return 0.5 * x

    stated = Theorem("half", half, "certificate", ("sampler",), True, "nobody")
    things = {**THEOREMS, "half": stated}
    challenges = {
        **CHALLENGES,
        "half": lambda rng, n: iter([Trial(rng.random(n), np.full(n, 0.5), what="uniform draws")]),
    }
    monkeypatch.setattr(THEOREMS, "_things", things)
    monkeypatch.setattr(CHALLENGES, "_things", challenges)


@pytest.fixture
def broken_procedure(monkeypatch):
    """A procedure called ours that is wrong in every run."""

    def run(rng, runs):
        yield "a gate", True, Ever(np.ones(runs), np.zeros(runs))

    broken = Scenario("made up", "nothing else", run)
    monkeypatch.setattr(SCENARIOS, "_things", {"made up": broken})


def test_every_theorem_and_every_procedure_has_its_line():
    done = bench(*FEW)
    assert done.exit_code == 0
    lines = done.stdout.split("\n")
    for name in (*THEOREMS, *SCENARIOS):
        assert any(line.startswith(f"{name} ") for line in lines), name
    assert "fault" not in done.stdout


@pytest.mark.slow
def test_as_json():
    done = bench(*FEW, "--seed", 3, "--format", "json")
    found = json.loads(done.stdout)
    assert done.exit_code == 0
    assert (found["cases"], found["runs"], found["seed"], found["faults"]) == (20, 10, 3, [])
    assert [t["theorem"] for t in found["theorems"]] == [*THEOREMS]
    assert set(found["theorems"][0]) == {
        "theorem",
        "cases",
        "violations",
        "tightest",
        "typical",
        "worst",
        "standing",
        "sharp",
        "assumes",
        "source",
        "statement",
    }
    assert {row["scenario"] for row in found["procedures"]} == set(SCENARIOS)
    assert set(found["procedures"][0]) == {
        "scenario",
        "procedure",
        "ours",
        "answer",
        "runs",
        "wrong",
        "allowed",
        "ratio",
        "beyond",
    }


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers():
    assert bench(*FEW, "--seed", 5).stdout == bench(*FEW, "--seed", 5).stdout
    assert bench(*FEW, "--seed", 5).stdout != bench(*FEW, "--seed", 6).stdout


@pytest.mark.slow
def test_a_false_theorem_is_found(false_theorem, tmp_path):
    done = bench(*FEW)
    assert done.exit_code == 1
    assert "fault: half is violated in" in done.stdout
    assert "of 20 cases: uniform draws" in done.stdout
    page = tmp_path / "page.md"
    done = bench(*FEW, "-o", page)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "fault: half is violated in" in done.stderr
    assert "- **half is violated in" in page.read_text()
    assert "Nothing exceeds one half, \\|x\\| included |" in page.read_text()


def test_a_procedure_of_ours_beyond_its_margin_is_found(broken_procedure):
    done = bench(*FEW)
    assert done.exit_code == 1
    assert (
        "fault: a gate (made up) is wrong in 100.0 % of 10 runs, 21.0 % are allowed" in done.stdout
    )


@pytest.mark.slow
def test_progress_is_told_beside_the_output():
    done = bench(*FEW)
    assert "theorems" in done.stderr and "scenarios" in done.stderr


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("suffix", "start"), [("md", "# Attempts to falsify"), ("json", "{"), ("txt", "theorem ")]
)
def test_the_suffix_says_the_format(tmp_path, broken_procedure, suffix, start):
    assert bench(*FEW, "-o", tmp_path / f"x.{suffix}").exit_code == 1
    assert (tmp_path / f"x.{suffix}").read_text().startswith(start)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("theory",), "Got unexpected extra argument (theory)"),
        (("--cases", "0"), "'--cases': 0 is not in the range x>=1."),
        (("--runs", "many"), "'--runs': 'many' is not a valid integer range."),
        (("--seed", "-1"), "'--seed': -1 is not in the range x>=0."),
        (("--format", "html"), "'html' is not one of 'text', 'markdown', 'json'."),
        (("-o", "x.html"), "x.html: the suffix names no format; give --format text, "),
        (("-o", "none/x.md"), "none/x.md cannot be written: no folder none"),
    ],
)
def test_a_wrong_call_measures_nothing(arguments, message):
    done = bench(*arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


def test_the_page_names_every_theorem_scenario_and_procedure():
    page = PAGE.read_text(encoding="utf-8")
    missing = [name for name in THEOREMS if f"| `{name}` |" not in page]
    missing += [name for name in SCENARIOS if f"\n| {name} | " not in page]
    assert not missing, f"docs/explanation/falsification.md lacks {missing}: run `make theory`"
    assert f"{procedures.RUNS} seeded runs" in page
    assert "It found no violated theorem" in page
