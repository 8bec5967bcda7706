# The whole command line, command by command: options, JSON, - and completion.

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from servanda.cli.commands import FIRST, GONE, GROUPS, HINTS
from servanda.cli.main import EXAMPLES, main
from servanda.cli.options import DASH, FileType, OutputPath
from servanda.cli.screen import watching
from servanda.engines import faults
from servanda.judgement.verdict import FORMATS
from servanda.promotion.run import history
from servanda.runner.compare import selftest
from servanda.runner.measurement import Progress
from tests import kit
from tests.report import made


def servanda(*arguments, stdin=None, env=None):
    words = [*map(str, arguments)]
    return CliRunner().invoke(main, words, input=stdin, env=env, catch_exceptions=False)


def commands():
    """Every command that does something, by its words."""

    def within(command, context, words):
        if not isinstance(command, click.Group):
            yield " ".join(words), command
            return
        inner = click.Context(command, info_name=command.name, parent=context)
        for name in command.list_commands(inner):
            yield from within(command.get_command(inner, name), inner, (*words, name))

    return dict(within(main, None, ()))


COMMANDS = commands()


def options():
    """(command, option) of every option."""
    for name, command in COMMANDS.items():
        for param in command.params:
            if isinstance(param, click.Option):
                yield name, param


# what is not here


def test_a_word_that_is_no_command_says_what_does_the_same():
    for word, hint in HINTS.items():
        groups = [group for group in GROUPS if word in GROUPS[group][1]]
        done = servanda(word)
        assert done.exit_code == 2 and f"there is no command '{word}'" in done.stderr
        assert hint in done.stderr and (not groups or word == "status")


def test_a_command_that_left_is_named_beneath_its_group_too():
    done = servanda("tools", "check-dump", "logs")
    assert done.exit_code == 2 and "hint: `servanda check DUMP` has its options" in done.stderr


def test_an_option_that_left_says_what_does_the_same():
    for (command, option), hint in GONE.items():
        groups = [group for group in GROUPS if command in GROUPS[group][1]]
        done = servanda(*groups, command, option, "x")
        assert done.exit_code == 2 and hint in done.stderr
        assert option not in {
            name for param in COMMANDS[" ".join([*groups, command])].params for name in param.opts
        }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, _ = kit.write(tmp_path)
    (tmp_path / "other.kernelcontract.yaml").write_text(path.read_text().replace("0.05", "0.06"))
    (tmp_path / "verdict.json").write_text(FORMATS["json"](made.VERDICTS["holds"]))
    return tmp_path


# one option, one meaning

# (option, what differs) -> why
DIFFERS = {
    ("--format", "type"): "what a command can print: verdicts and diffs have reports of their own",
    ("--contract", "type"): "a run and a watch read their contract again; a demo reads it once",
    ("--fault", "multiple"): "a test injects as many as are named, a demo one",
    ("--log", "metavar"): "`serve` writes one log; the others read files as well",
    ("--log", "multiple"): "`serve` writes one log; the others read as many as there are",
    ("--ledger", "envvar"): "an audit writes a ledger only where its own call names one",
    ("-o", "type"): "a pack is no text, so it cannot be printed",
    ("--run", "help"): "a bisection runs a command, as `git bisect run` does; a ledger has runs",
    ("--run", "metavar"): "a bisection runs a command; a ledger has runs",
    ("--served", "help"): "the name that a server gives, and the one that servers are asked for",
    ("--webhook", "help"): "a watch tells alerts and the others decisions",
    ("--webhook", "multiple"): "a watch takes one",
    ("--webhook", "envvar"): "a watch has its own, because it does not decide",
    ("--slack", "help"): "a watch tells alerts and the others decisions",
    ("--slack", "multiple"): "a watch takes one",
    ("--slack", "envvar"): "a watch has its own, because it does not decide",
    ("--state", "type"): "a leader's may be in a database",
    ("--state", "metavar"): "a leader's may be in a database",
    ("--timeout", "help"): "of what one waits for: a sync of the drill, a request of the gateway",
    ("--timeout", "type"): "preflight took a number of seconds, and still does",
    ("--to", "help"): "where it goes: a build to a stage, a slice to a pool",
    ("--to", "type"): "where it goes: a build to a stage, a slice to a pool",
    ("--to", "metavar"): "where it goes: a build to a stage, a slice to a pool",
}


def described(param):
    kind = param.type
    values = {click.Choice: "choices", FileType: "dash"}.get(type(kind), "min")
    return {
        "type": (type(kind).__name__, kind.name, str(getattr(kind, values, ""))),
        "metavar": param.metavar or kind.name.upper(),
        "help": (param.help or "").split(".  ")[0].rstrip("."),
        "multiple": param.multiple,
        "envvar": param.envvar,
        "opts": tuple(param.opts),
    }


def test_an_option_means_the_same_on_every_command():
    places = {}
    for command, param in options():
        places.setdefault(param.opts[0], {})[command] = described(param)
    differs = {}
    for name, found in places.items():
        for part in next(iter(found.values())):
            values = {command: description[part] for command, description in found.items()}
            if len({*values.values()}) > 1:
                differs[name, part] = values
    assert differs.keys() - DIFFERS.keys() == set(), differs
    assert DIFFERS.keys() - differs.keys() == set(), "an exception that is none any more"


def test_every_option_says_what_it_is():
    assert [(command, param.opts) for command, param in options() if not param.help] == []


# examples


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_ends_with_two_calls_that_it_reads(name):
    command, context = COMMANDS[name], click.Context(main, info_name="servanda")
    assert len(EXAMPLES[name]) == 2
    shown = servanda(*name.split(), "--help").stdout.replace(" \\\n", " ")
    plain = " ".join(shown.split())
    for example in EXAMPLES[name]:
        assert " ".join(f"servanda {name} {example}".split()) in plain
        words = shlex.split(example, comments=True)
        words = words[: words.index(">")] if ">" in words else words
        with command.make_context(name, words, parent=context, resilient_parsing=False):
            pass


def test_there_is_no_example_of_a_command_that_is_none():
    assert EXAMPLES.keys() == COMMANDS.keys()


def test_json_as_other_programs_spell_it_is_refused_with_ours():
    done = servanda("check", "x.yaml", "--json")
    assert done.exit_code == 2 and "hint: write --format json" in done.stderr
    assert "hint" not in servanda("contract", "init", "--json").stderr


# JSON

# command -> a call whose result it prints
PRINTS = {
    "check": ["toy.kernelcontract.yaml"],
    "compare": ["table:p.json", "table:q.json", "--prompts", "prompts.jsonl", "--sequences", 300],
    "promote": ["toy.kernelcontract.yaml", "--quiet"],
    "contract lint": ["toy.kernelcontract.yaml"],
    "contract explain": ["toy.kernelcontract.yaml"],
    "contract plan": ["toy.kernelcontract.yaml"],
    "contract presets": [],
    "contract diff": ["toy.kernelcontract.yaml", "other.kernelcontract.yaml"],
    "promotion status": ["--ledger", "new.jsonl"],
    "promotion can-promote": ["toy.kernelcontract.yaml", "--to", "canary"],
    "promotion ledger verify": [],
    "tools measure": ["toy.kernelcontract.yaml", "--side", "infer", "-o", "x.pack"],
    "tools report": ["verdict.json"],
}
# command -> where its JSON is read
PRINTS_ELSEWHERE = {
    "bisect": "runner/bisect/test_modules.py",
    "contract calibrate": "authoring/test_calibrate.py",
    "contract test": "authoring/contract_test/test_cli.py",
    "preflight": "rl/sync_drill/test_cli.py",
    "relations": "runner/test_relations.py",
    "promotion approve": "test_command_line.py",
    "promotion override": "test_command_line.py",
    "promotion rollback": "test_command_line.py",
    "promotion ledger show": "promotion/ledger/test_cli.py",
    "gateway status": "gateway/controller/web/test_verbs.py",
    "gateway pin": "gateway/controller/web/test_verbs.py",
    "gateway audit": "gateway/controller/test_audit.py",
    "check": "rl/dumps/test_cli.py",
    "tools selftest": "test_command_line.py",
    "tools kld": "engines/test_kld_file.py",
    "tools weights": "runner/bisect/test_weight_layout.py",
}
PRINTS_NONE = {
    "watch": "a line a step, as long as it follows; --series has the numbers as JSON lines",
    "serve": "it serves; its status and metrics are on its page",
    "demo": "a tour for people; `check --format json` judges the same contracts",
    "contract init": "it writes a contract",
    "contract derive": "it writes a contract",
    "contract schema": "it is JSON",
    "promotion ledger export": "it is JSON, an entry a line",
    "gateway envoy": "it serves",
    "tools serve-kernel": "it serves",
}


def test_every_command_that_prints_a_result_prints_json():
    having = {command for command, param in options() if "--format" in param.opts}
    assert having == {*PRINTS, *PRINTS_ELSEWHERE}
    assert COMMANDS.keys() - having == PRINTS_NONE.keys()
    for file in PRINTS_ELSEWHERE.values():
        text = (Path(__file__).parent / file).read_text(encoding="utf-8")
        assert "json.loads(" in text and "json" in text


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ledger")
    path, _ = kit.write(folder)
    where = folder / "ledger.db"
    servanda("promote", path, "--run-dir", folder / "run", "--ledger", where, "--quiet")
    return where


@pytest.mark.sampled(4)
@pytest.mark.parametrize("command", PRINTS)
def test_json_alone_is_on_stdout(folder, ledger, command):
    words = [ledger if word == "new.jsonl" else word for word in PRINTS[command]]
    if "ledger" in command or command.startswith("promotion can"):
        words += ["--ledger", ledger]
    done = servanda(*command.split(), *words, "--format", "json")
    assert done.exit_code in (0, 1, 3), done.stderr

    def refused(constant):
        raise AssertionError(f"{constant} is no JSON")

    assert json.loads(done.stdout, parse_constant=refused)


def test_decisions_are_printed_as_json(folder, ledger, monkeypatch):
    monkeypatch.setattr(history, "approve_run", lambda _, history, **__: history)  # none is awaited
    cell = ["--clause", "tv", "--ttl", "1h"]
    for name, words in (("approve", []), ("override", cell), ("rollback", [])):
        given = ["toy", "--reason", "x", "--ledger", ledger, *words, "--format", "json"]
        done = servanda("promotion", name, *given)
        assert done.exit_code == 0 and json.loads(done.stdout)["run"], done.stderr


def test_a_selftest_is_printed_as_json(monkeypatch):
    rows = [selftest.SelftestCase("itself", True, made.VERDICTS["holds"])]
    monkeypatch.setattr("servanda.cli.selftest.selftest", lambda *_, **__: iter(rows))
    done = servanda("tools", "selftest", "http://127.0.0.1:9", "--format", "json")
    assert [row["case"] for row in json.loads(done.stdout)] == ["itself"]


def test_the_json_of_a_mistake_is_no_json_and_no_text_either(folder):
    for command in PRINTS:
        done = servanda(*command.split(), "--nonsense", "--format", "json")
        assert (done.exit_code, done.stdout) == (2, "")


def test_variants_print_json_too(folder):
    preset = servanda("contract", "presets", "--show", "fp8", "--format", "json")
    assert json.loads(preset.stdout)["name"] == "fp8"
    chain = servanda("contract", "explain", "toy.kernelcontract.yaml", "--chain", "--format=json")
    assert json.loads(chain.stdout)
    name = servanda("contract", "explain", "tv", "--format", "json")
    assert json.loads(name.stdout)["text"].startswith("tv: ")
    sides = ["compare", "table:p.json", "table:q.json", "--prompts", "prompts.jsonl", "--plan"]
    plan = servanda(*sides, "--sequences", 300, "--format", "json")
    assert json.loads(plan.stdout)["cells"]
    assert servanda(*sides, "--format", "html").exit_code == 2


# - is standard input and output


def paths():
    """(command, parameter) of every file or folder."""
    for name, command in COMMANDS.items():
        for param in command.params:
            if isinstance(param.type, click.Path):
                yield name, param


# parameters for which - is standard input or output; each is called so below
DASHES = {
    ("check", "target"),
    ("check", "output"),
    ("check", "reports"),
    ("compare", "save"),
    ("contract calibrate", "save"),
    ("contract derive", "output"),
    ("contract explain", "what"),
    ("contract init", "file"),
    ("contract plan", "contract"),
    ("demo", "contract"),
    ("promotion can-promote", "contract"),
    ("promotion ledger export", "output"),
    ("check", "output"),
    ("check", "reports"),
    ("check", "save"),
    ("tools measure", "output"),  # refused, with a reason of its own
    ("tools report", "path"),
    ("tools report", "output"),
}


def test_a_hyphen_is_a_stream_or_refused_and_never_a_file(folder):
    takes = set()
    for name, param in paths():
        assert isinstance(param.type, FileType), (name, param.name)
        if param.type.dash or isinstance(param.type, OutputPath):
            takes.add((name, param.name))
            continue
        with pytest.raises(click.BadParameter, match="this has to be a path"):
            param.type.convert(DASH, param, None)
    assert takes == DASHES - {("contract explain", "what")}


@pytest.mark.parametrize(
    "words",
    [
        ["promote", "-"],
        ["serve", "-"],
        ["gateway", "audit", "-", "--log", "x"],
        ["gateway", "audit", "toy.kernelcontract.yaml", "--log", "-"],
        ["promotion", "status", "--ledger", "-"],
        ["promote", "toy.kernelcontract.yaml", "--ledger", "-"],
        ["watch", "run", "--series", "-"],
        ["check", "toy.kernelcontract.yaml", "--record", "-"],
        ["contract", "test", "-"],
    ],
)
def test_what_cannot_be_a_stream_says_so(folder, words):
    done = servanda(*words)
    assert done.exit_code == 2 and "- is standard input or output" in done.stderr
    assert not (folder / DASH).exists()


def test_reports_go_to_a_file_and_to_standard_output(folder):
    check = ["check", "toy.kernelcontract.yaml", "--quiet"]
    both = servanda(*check, "-o", "a.html", "--report", "-", "--report", "b.json")
    assert both.stdout.rstrip().endswith("exit 0\nreport b.json\nreport a.html"), both.stdout
    assert (folder / "a.html").exists() and (folder / "b.json").exists()
    piped = servanda("tools", "report", "-", "--format", "markdown", "-o", DASH, stdin="{")
    assert piped.exit_code == 4 and "stdin is not JSON of a verdict" in piped.stderr
    text = (folder / "b.json").read_text()
    piped = servanda("tools", "report", "-", "--format", "markdown", stdin=text)
    assert piped.stdout.startswith("> [!TIP]")
    assert not (folder / DASH).exists()


@pytest.mark.slow
def test_a_saved_contract_goes_to_standard_output_alone(folder):
    sides = ["compare", "table:p.json", "table:q.json", "--prompts", "prompts.jsonl"]
    for more in (["--plan"], ["--quiet"], ["--format", "json"]):
        done = servanda(*sides, "--sequences", 300, *more, "--save-contract", DASH)
        linted = servanda("contract", "lint", DASH, stdin=done.stdout)
        assert linted.stdout.startswith("stdin: ok"), (more, done.stdout, linted.output)
    derive = ["contract", "derive", "--train", "table:p.json", "--infer", "table:q.json"]
    budget = ["--prompts", "prompts.jsonl", "--max-new-tokens", 6, "--reward-drift", 0.5]
    derived = servanda(*derive, *budget, "-o", DASH)
    assert servanda("contract", "lint", DASH, stdin=derived.stdout).exit_code == 0
    assert not (folder / DASH).exists()


def test_a_demo_reads_its_contract_from_standard_input(folder):
    text = (folder / "toy.kernelcontract.yaml").read_text()
    done = servanda("demo", "--fault", "renamed", "--contract", DASH, "--quiet", stdin=text)
    assert done.exit_code == 2 and "there is no fault" in done.stderr
    fault = next(name for name in faults.FAULTS if name == "permuted_ids")
    done = servanda("demo", "--fault", fault, "--contract", DASH, "--quiet", stdin=text)
    assert done.exit_code == 4 and "With the thresholds of other projects" in done.stdout


# shells


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_script(shell):
    env = {"_SERVANDA_COMPLETE": f"{shell}_source"}
    done = CliRunner().invoke(main, [], prog_name="servanda", env=env)
    assert "_SERVANDA_COMPLETE" in done.output and "servanda" in done.output
    page = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
    assert f"_SERVANDA_COMPLETE={shell}_source servanda" in page.read_text(encoding="utf-8")


def completed(shell, *words):
    """What a shell is offered, and which parts of the command line were loaded for it."""
    line = " ".join(["servanda", *words])
    env = {"bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words))}}.get(
        shell, {"COMP_WORDS": line, "COMP_CWORD": words[-1] if shell == "fish" else str(len(words))}
    )
    code = (
        "import sys; from servanda.cli.main import main\n"
        "try:\n    main([], prog_name='servanda')\n"
        "finally:\n"
        "    loaded = sorted(n for n in sys.modules if n.startswith('servanda.cli.'))\n"
        "    print(*loaded, sep=' ', file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"_SERVANDA_COMPLETE": f"{shell}_complete", "PYTHONPATH": ":".join(sys.path), **env},
    )
    return done.stdout, done.stderr.split("\n")[-2].split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_names_of_groups_complete_and_load_no_command(shell):
    known = ["servanda.cli.commands", "servanda.cli.main"]
    for words, offered, not_offered in (
        ([""], "contract", "lint"),
        (["contract", ""], "lint", "approve"),
        (["promotion", "ap"], "approve", "status"),
        (["tools", ""], "selftest", "lint"),
    ):
        text, loaded = completed(shell, *words)
        assert offered in text and not_offered not in text.split(), (words, text)
        assert loaded == known, words


def test_options_complete_too():
    assert "--save-contract" in completed("bash", "compare", "--sa")[0]
    assert "verify" in completed("bash", "promotion", "ledger", "")[0]


# mistakes


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["lnt", "x"], "did you mean `servanda contract lint`?"),
        (["reprot"], "did you mean `servanda tools report`?"),
        (["contract", "report"], "did you mean `servanda tools report`?"),
        (["contract", "check"], "did you mean `servanda check`?"),
        (["tools", "import"], "`servanda check DUMP`"),
        (["gateway", "approve"], "did you mean `servanda promotion approve`?"),
        (["promotion", "promote"], "did you mean `servanda promote`?"),
        (["contract", "zzz"], "known: calibrate, derive"),
        (["help"], "`servanda --help`"),
        (["verify"], "`servanda promotion ledger verify`"),
    ],
)
def test_a_command_in_another_group_is_named_with_its_group(words, hint):
    done = servanda(*words)
    assert done.exit_code == 2 and f"  hint: {hint}" in done.stderr


def test_a_decision_on_a_run_that_is_none_begins_no_ledger(folder):
    done = servanda("promotion", "rollback", "toy", "--reason", "x", "--ledger", "typo.db")
    assert done.exit_code == 4 and "no ledger at typo.db" in done.stderr
    assert not (folder / "typo.db").exists()


def test_a_run_directory_is_explained_by_its_chain(folder):
    (folder / "run").mkdir()
    done = servanda("contract", "explain", "run")
    assert done.exit_code == 2 and "of a run directory: explain --chain" in done.stderr


def test_the_first_page_names_every_command_once():
    names = [*FIRST, *(name for _, lines in GROUPS.values() for name in lines)]
    assert sorted({*names} - {"status"}) == sorted(name for name in names if name != "status")


# progress


def test_progress_says_which_of_several_runs_it_is(capsys):
    with watching(run="run 1 of 2") as watch:
        watch(Progress("prompt groups", 0, 640))
    assert capsys.readouterr().err == "run 1 of 2, prompt groups ...\n"
