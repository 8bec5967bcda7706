# The fewest settings with which a command fails.

import itertools
import json
import sys

import pytest
from click.testing import CliRunner

from servanda.cli.main import main
from servanda.errors import MeasurementError
from servanda.runner.bisect.settings import fewest_settings

SETTINGS = tuple("abcdefgh")


def servanda(*words):
    return CliRunner().invoke(main, ["bisect", *map(str, words)], catch_exceptions=False)


def lines(path, *texts):
    path.write_text("# a comment\n" + "\n".join(texts) + "\n")
    return path


def test_any_two_settings_that_are_bad_together_are_found():
    for culprits in itertools.combinations(SETTINGS, 2):
        found = fewest_settings(
            SETTINGS, lambda some, c={*culprits}: "bad" if c <= {*some} else "good"
        )
        assert found.settings == culprits and found.undecided == ()
        assert len(found.probes) <= 2 + len(SETTINGS) + 2


def test_settings_that_are_not_monotone_leave_a_set_from_which_none_can_go():
    def judge(some):
        """Bad with c, but e cures it, unless h is there, too."""
        return "bad" if "c" in some and ("e" not in some or "h" in some) else "good"

    found = fewest_settings(SETTINGS, judge)
    assert judge(found.settings) == "bad"
    assert all(
        judge(tuple(s for s in found.settings if s != gone)) == "good" for gone in found.settings
    )


def test_a_setting_whose_removal_is_undecided_is_said_to_be():
    def judge(some):
        if "c" in some and "d" not in some:
            return "skip"
        return "bad" if {"c", "d"} <= {*some} else "good"

    found = fewest_settings(SETTINGS, judge)
    assert found.settings == ("c", "d") and found.undecided == ("d",)


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        ("bad", "without settings has to be good, and it is bad"),
        ("good", "with all settings has to be bad, and it is good"),
        ("skip", "without settings has to be good, and it is not decided"),
    ],
)
def test_both_ends_are_tested(outcome, message):
    with pytest.raises(MeasurementError, match=message):
        fewest_settings(SETTINGS, lambda _: outcome)


def test_the_flag_and_the_variable_that_are_bad_together_are_found(tmp_path):
    script = tmp_path / "judge.py"
    script.write_text(
        "import os, sys\n"
        "eager, seed = '--eager' in sys.argv, ['--seed', '7'] == sys.argv[-2:]\n"
        "if eager and seed and os.environ.get('CACHE') != 'fp8 e5':\n"
        "    sys.exit(3)\n"
        "sys.exit(eager and os.environ.get('CACHE') == 'fp8 e5')\n"
    )
    settings = lines(tmp_path / "settings.txt", "--eager", "CACHE=fp8 e5", "BLOCK=16", "--log x")
    words = ("--settings", settings, "--run", f"{sys.executable} {script} {{}}", "--quiet")
    done = servanda(*words)
    assert done.exit_code == 1 and "cause     --eager CACHE=fp8 e5\n" in done.stdout, done.output

    lines(settings, "--eager", "CACHE=fp8 e5", "BLOCK=16", "--seed 7")
    data = json.loads(servanda(*words, "--format", "json").stdout)
    assert data["settings"] == ["--eager", "CACHE=fp8 e5"] and data["undecided"] == []
    assert {"settings": [], "outcome": "good"} in data["probes"]
    assert "skip" in {probe["outcome"] for probe in data["probes"]}


def test_a_removal_that_is_undecided_is_an_exit_code_of_its_own(tmp_path):
    settings = lines(tmp_path / "settings.txt", "A=1", "B=1")
    run = '[ "$A$B" != 11 ] || exit 1; [ -z "$A" ] || exit 125'
    done = servanda("--settings", settings, "--run", run)
    assert done.exit_code == 3 and "cause     A=1 B=1\nunsure    " in done.stdout, done.output
    assert "nothing was decided: B=1\n" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--settings", "s.txt"], "the settings need a command, with {} in the place of"),
        (["--settings", "s.txt", "--run", "true"], "the settings need a command, with {}"),
        (["--settings", "b.txt", "--run", "true {}"], "'one' is no setting"),
        (["--settings", "s.txt", "--run", "exit 2 # {}"], "the command ended with 2: exit 2 # "),
        (["--settings", "s.txt", "--run", "no-such {}"], "the command ended with 127"),
        (["--settings", "none.txt", "--run", "true {}"], "none.txt cannot be read"),
        (["--settings", "s.txt", "--path", "decode"], "settings have no modules"),
        (["a", "b", "--settings", "s.txt"], "give A and B, or --settings"),
        (["a", "b", "--run", "true"], "modules are compared without it: leave out --run"),
        (["table:ref.json"], "give A and B, or --settings"),
        ([], "give A and B, or --settings"),
    ],
)
def test_a_wrong_call_says_what_to_write(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "b.txt", "one", "two")
    lines(tmp_path / "s.txt", "--eager")
    done = servanda(*words)
    assert done.exit_code == 2 and message in done.stderr, done.output
