# Exit codes: the help of each command, the one table of the documents, and what calls end with.
#
# tests/conftest.py holds every call of every test to them, too: none ends with a code that the
# help of its command does not state.

import contextlib
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from scripts.reference import codes_of

from servanda.cli.main import main
from servanda.promotion.run import history as runs
from servanda.runner.compare.selftest import SelftestCase
from tests.gateway.controller.web import fake
from tests.gateway.controller.web.serving import KEY, live
from tests.report import made
from tests.rl.watch.made import state_line
from tests.test_command_line import COMMANDS, servanda
from tests.test_help_examples import CALLS, LEDGER, TOY, folder  # noqa: F401

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "reference" / "cli.md"
OUTCOMES = {0: "holds", 1: "violated", 3: "inconclusive"}
SIDE = "table:p.json --prompts prompts.jsonl"
# (command, code) -> a call on the files of `prepared`; of others one of CALLS ends with it
ENDS = {
    ("check", 1): "far.kernelcontract.yaml --quiet",
    ("check", 3): f"{TOY} --quiet --fresh --max-time 1ms",
    ("compare", 1): f"{SIDE.replace(' ', ' table:far.json ', 1)} --sequences 300 --quiet",
    ("compare", 3): f"{SIDE.replace(' ', ' table:q.json ', 1)} --sequences 1300 --max-time 1ms",
    ("relations", 3): f"{SIDE} --only update",
    (
        "bisect",
        3,
    ): "--settings settings.txt --run 'case \"{}\" in *a*b) exit 1;; *-*) exit 3; esac'",
    ("watch", 0): "holds.jsonl --once",
    ("watch", 3): "inconclusive.jsonl --once",
    ("promote", 0): f"{TOY} --quiet --until offline --ledger new.db",
    ("promote", 1): "far.kernelcontract.yaml --quiet --ledger far.db",
    ("demo", 0): "--fault list",
    ("demo", 1): f"--fault undisclosed_temperature --value 0.7 --contract {TOY} --quiet",
    ("demo", 3): "--fault undisclosed_temperature --value 0.9 --contract few.kernelcontract.yaml",
    ("contract init", 0): "new.kernelcontract.yaml",
    ("contract schema", 0): "",
    ("contract diff", 1): f"strict.kernelcontract.yaml {TOY}",
    ("contract test", 0): "toy.kerneltest.yaml",
    ("contract test", 1): "wrong.kerneltest.yaml",
    ("contract test", 3): "toy.kerneltest.yaml --faults --max-time 1ms --quiet",
    ("promotion can-promote", 1): "far.kernelcontract.yaml --to offline --ledger far.db",
    ("promotion can-promote", 3): f"strict.kernelcontract.yaml --to offline {LEDGER}",
    ("promotion approve", 0): f"toy --reason x {LEDGER}",
    ("promotion ledger verify", 1): "--ledger changed.jsonl",
    ("gateway status", 0): "",
    ("gateway pin", 0): "all --to stable --ttl 1h --reason x",
    ("gateway audit", 1): "strict.kernelcontract.yaml --log served",
    ("gateway audit", 3): f"{TOY} --log empty",
    **{("tools selftest", code): "http://127.0.0.1:9" for code in (0, 1, 3)},
    ("tools weights", 1): "models/tiny-lm models/tiny-moe",
}
# what needs a server, a library or minutes -> the test that calls it, and its words about the code
ELSEWHERE = {
    ("relations", 1): ("runner/test_relations.py", "assert changed.exit_code == 1"),
    ("bisect", 0): ("runner/bisect/test_modules.py", "assert done.exit_code == 0"),
    ("preflight", 0): ("rl/sync_drill/test_cli.py", "[0] == 0"),
    ("preflight", 1): ("rl/sync_drill/test_cli.py", "assert code == 1"),
    ("preflight", 3): ("rl/sync_drill/test_servers.py", "assert result.exit_code == 3"),
    ("serve", 0): ("gateway/test_serve.py", "assert serving.end() == 0"),
    ("gateway envoy", 0): ("gateway/test_envoy.py", "assert stranger.end() == 0"),
    ("tools serve-kernel", 0): ("engines/test_server.py", "running.returncode, output"),
    ("tools kld", 0): ("engines/test_kld_file.py", "other.exit_code == 0"),
}


def stated(name):
    return codes_of(COMMANDS[name].help)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_states_the_codes_of_the_table_with_the_same_words_and_once(name):
    head, *lines = re.findall(r"^\| (?!---)(.*) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    rows = {cells[0]: cells[1:] for cells in (line.split(" | ") for line in lines)}
    row = dict(zip(head.split(" | ")[1:], rows[f"`{name}`"], strict=True))

    assert stated(name) == {code: text for code, text in row.items() if text}
    assert {*stated(name)} <= {*codes_of(main.help)} and rows.keys() >= {"**in general**"}
    assert len(re.findall(r"exit codes?: |exits \d", COMMANDS[name].help, re.I)) == 1


def test_the_table_of_the_readme_has_every_code_and_the_outcome_that_ends_with_it():
    readme = (TESTS.parent / "README.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| (\d) \| (.*) \|$", readme, re.M))
    named = {code: re.match(r"\*\*(\w+)\*\*", text) for code, text in rows.items()}

    assert {*rows} == {*codes_of(main.help)} - {"130"}
    assert {int(code): word[1] for code, word in named.items() if word} == OUTCOMES


@pytest.fixture(scope="module")
def prepared(folder):  # noqa: F811
    """The folder of the examples of help texts, with a kernel that is far off and the like."""
    toy = Path(TOY).read_text()
    table = {**json.loads(Path("p.json").read_text()), "rows": {"": [0.1, 0.5, 0.2, 0.1, 0.1]}}
    far = toy.replace("q.json", "far.json").replace("name: toy", "name: far")
    other = {"few": ("2000", "300"), "strict": ("0.05", "1e-7")}
    changed = {name: toy.replace(*words) for name, words in other.items()}
    tested = "apiVersion: servanda.dev/v1alpha1\nkind: ContractTest\nmetadata: {name: t}\n"
    tested += f"contract: {TOY}\ncases: [{{name: a, expect: [{{after: 0, verdict: VERDICT}}]}}]\n"
    files = {
        "far.json": json.dumps(table),
        "empty/served.jsonl": "",
        "toy.kerneltest.yaml": tested.replace("VERDICT", "inconclusive"),
        "wrong.kerneltest.yaml": tested.replace("VERDICT", "holds"),
        **{f"{outcome}.jsonl": state_line(1, outcome) for outcome in OUTCOMES.values()},
    }
    contracts = {"far": far, **changed}
    files |= {f"{name}.kernelcontract.yaml": text for name, text in contracts.items()}
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    servanda("promote", "far.kernelcontract.yaml", "--quiet", "--ledger", "far.db")
    lines = servanda("promotion", "ledger", "export", *LEDGER.split()).stdout
    Path("changed.jsonl").write_text(lines.replace('"actor":"', '"actor":"not ', 1))
    return folder


OF_ANY = {"2", "4"}  # `main` ends with 4 for all commands: test_bad_input.py
ALL = [(name, int(code)) for name in COMMANDS for code in stated(name) if code not in OF_ANY]


@pytest.mark.sampled(28)
@pytest.mark.parametrize(("name", "code"), [end for end in ALL if end not in ELSEWHERE])
def test_a_call_ends_with_each_code_of_its_help(prepared, name, code, monkeypatch, tmp_path):
    monkeypatch.chdir(shutil.copytree(prepared, tmp_path / "own", symlinks=True))
    monkeypatch.setattr(runs, "approve_run", lambda _, history, **__: history)  # none is awaited
    monkeypatch.setenv("SERVANDA_ADMIN_KEY", KEY["admin"])
    cases = [SelftestCase("itself", True, made.VERDICTS[OUTCOMES[code]])]
    monkeypatch.setattr("servanda.cli.selftest.selftest", lambda *_, **__: iter(cases))

    with contextlib.ExitStack() as stack:
        at = ()
        if name in {"gateway status", "gateway pin"}:
            at = "--gateway", stack.enter_context(live(fake.Controller())).base_url
        calls = [ENDS[name, code]] if (name, code) in ENDS else CALLS[name]
        ends = [servanda(*name.split(), *shlex.split(call), *at).exit_code for call in calls]

    assert code in ends


def test_every_code_of_a_help_is_met_here_or_in_a_test_that_says_so():
    assert {*ENDS, *ELSEWHERE} <= {*ALL} and not {*ENDS} & {*ELSEWHERE}
    for file, words in ELSEWHERE.values():
        assert words in (TESTS / file).read_text(encoding="utf-8"), (file, words)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_call_that_is_wrong_ends_with_2(name):
    assert servanda(*name.split(), "--nonsense").exit_code == 2
