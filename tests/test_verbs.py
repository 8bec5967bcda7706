# The verbs that measure nothing: lint, explain, schema, init, and the help that lists them.

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from jsonschema import Draft7Validator

from servanda.authoring.template import starter
from servanda.cli.commands import FIRST, GROUPS
from servanda.cli.main import main
from servanda.contract.presets import PRESETS
from servanda.engines import engine_names
from servanda.engines.child_process import interpreter_of
from servanda.engines.faults import FAULTS
from servanda.errors import MeasurementError
from servanda.report.explain.contract import names
from servanda.runner import run
from servanda.theory.stats.alpha import attempt_alpha
from servanda.theory.stats.interval import units_expected
from servanda.theory.stats.reachable import reach
from tests import kit
from tests.contract.test_whole_language import TRAINER
from tests.kit import parse
from tests.slow.test_examples import CONTRACTS


def servanda(*arguments, stdin=None):
    return CliRunner().invoke(main, [*map(str, arguments)], input=stdin, catch_exceptions=False)


def test_a_command_that_is_not_there_is_a_wrong_call():
    done = servanda("chek", "x.yaml")
    assert done.exit_code == 2
    assert "there is no command 'chek'\n  hint: did you mean 'check'?" in done.output
    done = servanda("contract", "lnt", "x.yaml")
    assert done.exit_code == 2
    assert "there is no command 'lnt'\n  hint: did you mean 'lint'?" in done.output
    done = servanda("bench", "theory")
    assert done.exit_code == 2 and "python -m benchmarks.theory" in done.output


def test_the_first_page_has_nine_commands_and_four_groups():
    assert [*FIRST] == [
        *("check", "compare", "relations", "bisect", "preflight", "watch", "promote", "serve"),
        "demo",
    ]
    assert [*GROUPS] == ["contract", "promotion", "gateway", "tools"]
    text = " ".join(servanda("--help").output.split())
    for name, line in [*FIRST.items(), *((name, group[0]) for name, group in GROUPS.items())]:
        assert f"{name} {' '.join(line.split())}" in text
    assert " lint " not in text


@pytest.mark.parametrize("group", GROUPS)
def test_the_help_of_a_group_has_a_line_for_each_of_its_commands(group):
    summary, lines = GROUPS[group]
    text = " ".join(servanda(group, "--help").output.split())
    assert summary in text
    for name, line in lines.items():
        assert f"{name} {' '.join(line.split())}" in text
        assert f"Usage: main {group} {name}" in servanda(group, name, "--help").output


def test_help_loads_no_command_and_no_library():
    code = (
        "import sys; from servanda.cli.main import main\n"
        "for words in (['--help'], ['contract', '--help']):\n"
        "    main(words, standalone_mode=False)\n"
        "loaded = {name for name in sys.modules if name.startswith('servanda.')}\n"
        "print(sorted(loaded), {'numpy', 'torch', 'pydantic'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    known = ["_version", "cli", "cli.commands", "cli.main", "errors", "registry"]
    assert done.stdout.splitlines()[-1] == f"{[f'servanda.{name}' for name in known]} set()"


def test_a_shell_completes_names_without_loading_commands(monkeypatch):
    def completed(line):
        env = {
            "_SERVANDA_COMPLETE": "bash_complete",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split())),
        }
        return CliRunner().invoke(main, [], prog_name="servanda", env=env).output

    assert "plain,contract" in completed("servanda ")
    assert "plain,lint" in completed("servanda contract ")
    assert "plain,lint" not in completed("servanda ")


# lint


def test_a_clean_contract_is_ok(tmp_path):
    path, _ = kit.write(tmp_path, slices="slices: [{name: first, split: labels.first}]")
    done = servanda("contract", "lint", path)
    digest = run.load(path).digest[:8]
    assert done.exit_code == 0
    assert done.output == f"{path}: ok, toy {digest}, 1 clause, 6 cells\n"


def test_every_problem_of_every_file_is_printed(tmp_path):
    good, _ = kit.write(tmp_path / "good")
    bad, _ = kit.write(tmp_path / "bad", limit=-1)
    worse = tmp_path / "worse.yaml"
    worse.write_text(bad.read_text().replace("metric: tv", "metric: vt"))
    done = servanda("contract", "lint", bad, good, worse, tmp_path / "none.yaml")
    assert done.exit_code == 2
    assert "a limit of -1 can never hold" in done.output
    assert f"{good}: ok" in done.output
    assert "no metric is named 'vt'" in done.output
    assert f"{tmp_path / 'none.yaml'} cannot be read" in done.output


def test_lint_finds_what_check_would_refuse(tmp_path):
    path, _ = kit.write(tmp_path, limit=1e-6)
    assert "cannot hold on slice 'all'" in servanda("contract", "lint", path).output
    (tmp_path / "prompts.jsonl").unlink()
    done = servanda("contract", "lint", path)
    assert done.exit_code == 2
    assert f"there is no {tmp_path / 'prompts.jsonl'}" in done.output


def test_standard_input_is_a_file_too(tmp_path, monkeypatch):
    path, _ = kit.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = servanda("contract", "lint", "-", stdin=path.read_text())
    assert (done.exit_code, done.output.split(",")[0]) == (0, "stdin: ok")
    done = servanda("contract", "lint", "-", stdin="kind: x\n")
    assert done.exit_code == 2
    assert done.output.startswith("stdin:1:7: this is a x, not a KernelContract")


def test_lint_as_json(tmp_path):
    good, _ = kit.write(tmp_path / "good")
    bad, _ = kit.write(tmp_path / "bad", limit=-1)
    done = servanda("contract", "lint", good, bad, "--format", "json")
    first, second = json.loads(done.output)
    assert done.exit_code == 2
    assert (first["name"], first["clauses"], first["cells"], first["problems"]) == ("toy", 1, 3, [])
    (problem,) = second["problems"]
    assert problem["message"] == "tv is never negative: a limit of -1 can never hold"
    assert (problem["file"], problem["line"], problem["column"]) == (str(bad), 17, 52)


def test_a_trainers_contract_is_linted_and_says_why_it_has_no_cells(tmp_path):
    path = tmp_path / "rl.yaml"
    path.write_text(TRAINER)
    done = servanda("contract", "lint", path)
    assert done.exit_code == 0
    assert "1 clause (the tokens of this contract come from a trainer" in done.output
    assert servanda("check", path).exit_code == 2


# explain


def test_a_contract_in_plain_english(tmp_path):
    path, _ = kit.write(
        tmp_path,
        last=1500,
        slices="slices: [{name: first, split: labels.first}]",
        golden=kit.golden(tmp_path),
        more="  - {id: tail, metric: abs_log_ratio_nats, aggregate: p90, at_most: 0.1, slices: all,"
        " claim: realised}\n"
        "  - {id: seen, metric: k3_nats, aggregate: mean, at_most: 0.1, mode: monitor}\n"
        "numerical: [{id: drift, metric: logit_osc_nats, at_most: 2, slices: all}]",
    )
    done = servanda("contract", "explain", path)
    text = " ".join(done.output.split())
    assert done.exit_code == 0
    for sentence in (
        "at most 4.5 % for a pass",
        "shared by 6 pairs of a promise and a slice",
        "its mean over the tokens that this workload's prompts generate, measured or not, is at "
        "most 0.05.",
        "holds the data show the mean below the limit (wrong: at most 4.5 %)",
        "(wrong: at most 0.75 %, a share of 1/6)",
        "all 1,500 82 1,092",
        "first=a 500 82 1,092",
        "first=a may end undecided if the truth is half the limit: 3,276 as the second number",
        "at most 10 % of the tokens that are measured (it says nothing about tomorrow's), may "
        "exceed 0.1 nat.",
        "all 9,000 40 529",
        "at every position of the golden texts is at most 2 nat.",
        "holds never: the mean of a metric without bound can only be refuted",
        "Validity check: the sampled tokens follow the distribution that the infer kernel reports",
        "shown only, never fails the contract",
    ):
        assert sentence in text, sentence
    assert max(map(len, done.output.split("\n"))) <= 120


@pytest.mark.parametrize("limit", [0.005, 0.01, 0.05])
def test_what_explain_and_derive_count_differ_by_the_length_of_answers(tmp_path, limit):
    """Half the room: twice as many at best, and about as many at half the limit."""
    path, _ = kit.write(tmp_path, limit=limit)
    text = " ".join(servanda("contract", "explain", path).output.split())
    assert "both are for answers as long as max_new_tokens. With answers half as long" in text
    alpha = attempt_alpha(0.05, 1)
    best, half = (units_expected(limit, truth, alpha) for truth in (0.0, limit / 2))
    assert f" {best:,} {half:,} " in text

    def decided(groups, truth, fill):
        found = reach(groups, limit, alpha=alpha, cells=1, fill=fill).holds
        return found is not None and found >= truth

    # at an edge itself the last bit decides
    assert decided(half + 1, limit / 2, 1.0) and not decided(half - 1, limit / 2, 1.0)
    assert decided(int(2.05 * best), 0.0, 0.5) and not decided(int(1.95 * best), 0.0, 0.5)
    assert decided(int(1.05 * half), limit / 2, 0.5)
    assert not decided(int(0.8 * half), limit / 2, 0.5)


def test_explain_says_what_stands_against_running_it(tmp_path):
    path, _ = kit.write(tmp_path, limit=1e-3, last=100)
    done = servanda("contract", "explain", path)
    assert "all cannot hold: " in done.output
    assert "What stands against running it:" in done.output
    assert "clause 'tv' cannot hold on slice 'all'" in done.output


def test_a_contract_in_which_nothing_is_enforced_is_explained(tmp_path):
    path, _ = kit.write(tmp_path)
    path.write_text(path.read_text().replace("at_most: 0.05}", "at_most: 0.05, mode: monitor}"))
    assert servanda("contract", "explain", path).exit_code == 0


@pytest.mark.parametrize("name", [*names(), "labels.domain"])
def test_every_name_has_an_explanation(name):
    done = servanda("contract", "explain", name)
    assert done.exit_code == 0
    assert done.output.startswith(f"{name}: ")
    assert len(done.output.split("\n")) > 2


def test_a_name_that_is_none():
    done = servanda("contract", "explain", "k33")
    assert done.exit_code == 2
    assert "'k33' is neither a file nor a metric, a validity check or a slice field" in done.output
    assert "did you mean 'k3_nats'?" in done.output


def test_every_example_is_explained():
    for path in CONTRACTS.values():
        assert servanda("contract", "explain", path).exit_code == 0


# schema


def test_the_schema_is_printed():
    Draft7Validator.check_schema(json.loads(servanda("contract", "schema").output))


# init


@pytest.mark.parametrize(
    "model", ["models/m", "a b/ü: {x}", "'", "1e3", "#", "-", "null", "org/m-1"]
)
@pytest.mark.parametrize("engine", ["table", "transformers"])
def test_the_starter_reads_without_a_problem(engine, model):
    text = starter("x.yaml", "x", engine, model)
    contract, _ = parse(text, "x.yaml", engines=engine_names(), faults=[*FAULTS])
    assert contract.kernels.train.model == contract.kernels.infer.model == model
    assert contract.kernels.infer.engine == engine


def test_a_hyphen_is_standard_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = servanda("contract", "init", "-", "--engine", "table", "--model", "t.json")
    assert (
        parse(done.stdout, "-", engines=engine_names(), faults=[*FAULTS])[0].metadata.name == "my"
    )
    path, _ = kit.write(tmp_path)
    assert servanda("check", path, "--quiet", "-o", "-").stdout.endswith("exit 0\n")
    as_json = servanda("check", path, "--quiet", "-o", "-", "--format", "json")
    assert json.loads(as_json.stdout)["outcome"] == "holds"
    report = servanda("tools", "report", "runs/toy", "-o", "-", "--format", "json")
    assert json.loads(report.stdout)["outcome"] == "holds"
    pack = servanda("tools", "measure", path, "--side", "infer", "-o", "-")
    assert pack.exit_code == 2 and "a pack is no text" in pack.stderr
    assert not (tmp_path / "-").exists()


def test_a_hyphen_is_standard_input(tmp_path, monkeypatch):
    path, _ = kit.write(tmp_path)
    text = path.read_text()
    monkeypatch.chdir(tmp_path)
    for words in (
        ["contract", "lint"],
        ["contract", "explain"],
        ["contract", "explain", "--chain"],
        ["contract", "plan", "--no-probe", "--quiet"],
        ["check", "--quiet", "--run-dir", "run"],
        ["promotion", "can-promote", "--to", "canary", "--ledger", "none.db"],
    ):
        piped, named = servanda(*words, "-", stdin=text), servanda(*words, path.name)
        assert piped.exit_code == named.exit_code, (words, piped.output)
        shown = piped.stdout.replace("stdin: ok", f"{path.name}: ok")
        assert shown.replace("contract  -", f"contract  {path.name}") == named.stdout, words
        wrong = servanda(*words, "-", stdin=text.replace("metric: tv", "metric: vt"))
        assert wrong.exit_code == 2 and "stdin:" in wrong.output, words
    assert not (tmp_path / "-").exists()


def test_what_is_printed_is_there_as_json(tmp_path):
    path, _ = kit.write(tmp_path)
    pack = tmp_path / "x.pack"
    plan = json.loads(servanda("contract", "plan", path, "--no-probe", "--format", "json").stdout)
    assert plan["digest"] == run.load(path).digest and len(plan["cells"]) == 3
    assert plan["cost"]["sequences"] > 0
    presets = json.loads(servanda("contract", "presets", "--format", "json").stdout)
    assert [row["name"] for row in presets] == [*PRESETS]
    measure = ["tools", "measure", path, "--side", "infer", "-o", pack, "--quiet"]
    assert json.loads(servanda(*measure, "--format", "json").stdout)["file"] == str(pack)


def test_init_writes_a_contract_that_lints_clean_once_its_files_are_there(tmp_path):
    path = tmp_path / "my model.kernelcontract.yaml"
    done = servanda("contract", "init", path, "--engine", "table", "--model", "t.json")
    assert done.exit_code == 0
    assert f"servanda contract lint {path}" in done.output
    missing = servanda("contract", "lint", path)
    assert missing.exit_code == 2
    assert [line for line in missing.output.split("\n") if "there is no" in line]
    kit.table(tmp_path, "t.json", {"": kit.BASE})
    line = '{"prompt": "a", "labels": {"domain": "chat"}}\n'
    (tmp_path / "prompts.jsonl").write_text(line * 10)
    (tmp_path / "golden.jsonl").write_text(line)
    linted = servanda("contract", "lint", path)
    assert linted.exit_code == 0, linted.output
    assert "ok, my-model" in linted.output


def test_init_writes_over_nothing(tmp_path):
    path = tmp_path / "x.kernelcontract.yaml"
    path.write_text("mine")
    done = servanda("contract", "init", path)
    assert done.exit_code == 2
    assert done.output == f"{path} is there already\n  hint: give another name, or --force\n"
    assert path.read_text() == "mine"
    assert servanda("contract", "init", path, "--force").exit_code == 0
    assert path.read_text() != "mine"


def test_init_knows_its_engines(tmp_path):
    done = servanda("contract", "init", tmp_path / "x", "--engine", "tabel")
    assert done.exit_code == 2
    assert "no engine is named 'tabel'\n  hint: did you mean 'table'?" in done.output
    assert not (tmp_path / "x").exists()
    assert servanda("contract", "init", tmp_path / "no" / "x").exit_code == 4


def test_a_server_where_a_contract_belongs_is_shown_its_own_verbs():
    done = servanda("check", "http://127.0.0.1:8000")
    assert done.exit_code == 2
    assert "`servanda compare A B`, `servanda tools selftest URL`" in done.output


def test_an_interpreter_that_is_not_there_is_named_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MeasurementError, match=f"{tmp_path}/nope is no virtual environment"):
        interpreter_of("nope")


@pytest.mark.parametrize("code", [0, 1, None])
def test_an_exit_that_no_verb_made_is_no_answer(tmp_path, monkeypatch, code):
    """0 would read as "holds", and 1 as "violated"; neither was found."""
    path, _ = kit.write(tmp_path)

    def check(*_, **__):
        raise SystemExit(code)

    monkeypatch.setattr("servanda.runner.run.check", check)
    done = CliRunner().invoke(main, ["check", str(path), "--run-dir", str(tmp_path / "run")])
    assert done.exit_code == 4 and done.stdout == ""
    assert f"servanda failed: something exited with {code!r}" in done.stderr
