# What the documents say is true: their commands print what they show, their Python runs, their
# contracts parse, their links lead somewhere.

import ast
import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import click
import pytest
from pydantic import BaseModel
from scripts import reference

from servanda.cli.commands import GROUPS
from servanda.cli.main import main
from servanda.contract.model import Contract
from servanda.engines import BUILTIN
from servanda.engines.faults import FAULTS
from servanda.judgement.slices.rules import FIELDS, OPERATORS
from servanda.theory.divergence.base import DIVERGENCES
from tests import transcripts
from tests.kit import parse
from tests.test_command_line import COMMANDS as ALL_COMMANDS
from tests.test_command_line import options
from tests.transcripts import COMMANDS, blocks

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
CALL = re.compile(r"`(servanda [^`]+)`")
LINK = re.compile(r"\]\(([^)#]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_leads_to_a_file(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target


# a key in the arguments of a process, where every user of the machine reads it
IN_ARGUMENTS = re.compile(
    r"""(?:-H|--header)[ =]?["']?[\w-]*authorization:"""  # curl takes @FILE
    r"""|--(?:oauth2-bearer|password|token|api-key)[ =]|\s(?:-u|--user)[ =]?["']?\S+:[^\s"']"""
    r"""|--from-literal[ =]\S*key|(?:--[\w-]+[ =]|\bcurl\b[^|;#]*\s)["']?(?:\w+=)?"""
    r"""[a-z+]+://[^/\s"'@:]*:[^@\s/"']+@|--(?:slack|webhook)[ =]["']?\$"""
    r"""|line \+= .*://\w+:\{""",  # of a program that starts a browser
    re.I,
)
WITH_COMMANDS = ("*.md", "*.yaml", "*.yml", "*.sh", "*.tpl", "*.service", "Dockerfile", "Makefile")


def test_no_document_puts_a_key_into_arguments():
    folders = [ROOT / name for name in ("docs", "deploy", "examples", "scripts", ".github")]
    files = {*PAGES, *(file for at in folders for end in WITH_COMMANDS for file in at.rglob(end))}
    files |= {file for end in WITH_COMMANDS for file in ROOT.glob(end)}
    for file in {*files, *(ROOT / "examples").rglob("*.py")}:
        text = file.read_text(encoding="utf-8").replace("\\\n", " ")
        found = [line.strip() for line in text.splitlines() if IN_ARGUMENTS.search(line)]
        assert not found, (file, found)


@pytest.mark.parametrize(
    "line",
    [
        'servanda promote c.yaml --webhook "http://promoter:$OPERATOR_KEY@127.0.0.1/v1/admin/route"',
        "servanda promote c.yaml --notify=apprise=mailto://USER:PASSWORD@mail.example",
        'curl -s $LEADER/v1/status -H "Authorization: Bearer $KEY"',
        "curl --header='authorization: Basic eA==' http://a",
        "curl -s http://ana:$KEY@127.0.0.1:8081/",
        "curl -u ana:$KEY http://127.0.0.1:8081/",
        'kubectl create secret generic keys --from-literal=gateway_key="$KEY"',
        'servanda watch logs --slack "$HOOK"',
        'line += [f"--screenshot={file}", f"http://ana:{self.key}@{host}/"]',
    ],
)
def test_a_key_in_arguments_is_found(line):
    assert IN_ARGUMENTS.search(line)


def test_the_contract_of_the_readme_is_one():
    contracts = [text for text in blocks(PAGES[0], "yaml") if "apiVersion" in text]
    assert contracts
    for text in contracts:
        parse(text, "README.md", engines=BUILTIN, faults=[*FAULTS])


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    """What commands find around them: the examples, and the finished run of the tutorial."""
    for name in ("examples", "models", "data"):
        shutil.copytree(ROOT / name, tmp_path / name)
    run = tmp_path / "runs" / "first" / "attempt-1"
    run.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "data" / "first.verdict.json", run / "verdict.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def quick(page):
    return [block for block in transcripts.transcripts(page) if not transcripts.is_slow(block)]


@pytest.mark.parametrize("page", [page for page in PAGES if quick(page)], ids=lambda p: p.name)
def test_quick_commands_print_what_the_page_shows(page, workshop):
    for block in quick(page):
        for command in block:
            output, code = transcripts.in_process(command)
            assert code == command.expected_code, (command.line, output)
            if command.shown:
                missing = transcripts.differing(command.shown, output.split("\n"))
                assert missing is None, (command.line, missing, output)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_command_of_a_page_exists(page):
    """Its verb and its options; what it names need not be there."""
    shown = transcripts.blocks(page, "console", "sh", "yaml")
    lines = "\n".join(shown).replace("\\\n", " ").split("\n")
    for line in lines:
        found = re.match(r"\s*(?:\$ |- run: |run: )?(servanda .*)", line)
        if found:
            transcripts.parsed(shlex.split(found[1], comments=True))


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_verb_and_option_that_a_sentence_names_exists(page):
    text = transcripts.FENCE.sub("", page.read_text(encoding="utf-8"))
    for call in CALL.findall(text.replace("\n", " ")):
        name, rest = transcripts.split(call.split()[1:])
        if name.startswith("-") or name in GROUPS or name.isupper():
            continue
        assert name in COMMANDS, call
        known = {opt for param in COMMANDS[name].params for opt in param.opts} | {"--help"}
        own = rest[: rest.index("--")] if "--" in rest else rest  # what follows is a script's
        assert {word for word in own if word.startswith("-")} <= known, call


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_the_python_of_a_page_reads_and_names_what_is_public(page):
    import servanda

    for code in blocks(page, "python"):
        ast.parse(code)
        for name in re.findall(r"\bsv\.(\w+)", code):
            assert name in servanda.__all__, name


def test_the_quick_python_of_the_pages_runs(workshop, capsys):
    """A block that measures nothing: its last lines are comments of what it prints."""
    ran = 0
    for page in PAGES:
        for code in blocks(page, "python"):
            if "sv.measure" in code or "sv.check" in code:
                continue
            if "import torch" in code and find_spec("torch") is None:
                continue
            exec(compile(code, str(page), "exec"), {})
            printed = capsys.readouterr().out.strip().splitlines()
            assert printed == re.findall(r"# prints: (.*)", code)
            ran += 1
    assert ran


def test_the_reference_names_every_metric_field_operator_and_fault():
    pages = ("contract", "metrics", "fields", "faults")
    page = "".join((REFERENCE / f"{name}.md").read_text() for name in pages)
    for name in [*DIVERGENCES, *FIELDS, *OPERATORS, *FAULTS, *BUILTIN]:
        assert f"`{name}`" in page, name


@pytest.mark.parametrize("name", [*reference.PAGES])
def test_the_written_pages_are_in_step_with_the_registries(name):
    """python scripts/reference.py writes them again."""
    assert (REFERENCE / name).read_text(encoding="utf-8") == reference.PAGES[name]()


def test_the_reference_names_every_key_of_the_language():
    page = (REFERENCE / "contract.md").read_text(encoding="utf-8")
    for model in models(Contract):
        for key, field in model.model_fields.items():
            word = field.alias or key
            assert re.search(rf"[`.{{ ]{word}[`:,}}. ]", page), f"{model.__name__}.{word}"


def models(annotation):
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from models(field.annotation)
    for part in get_args(annotation):
        yield from models(part)


VARIABLE = re.compile(r"\b_?SERVANDA_[A-Z_]+\b")
ROW = re.compile(r"^\| `(_?SERVANDA_[A-Z_]+)` \| (.+?) \|", re.M)


def of_code(*folders):
    """The variables that a program of these folders names: a text that is nothing else is one."""
    found = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if VARIABLE.fullmatch(node.value) else set()
    return found


def of_helps():
    """variable -> the commands with an option whose help says that it reads the variable."""
    found = {}
    for name, param in options():
        _, text = param.get_help_record(click.Context(ALL_COMMANDS[name]))
        said = re.findall(r"env var: (\w+)", text)
        assert param.envvar is None or said == [param.envvar], (name, param.name)
        for variable in said:
            found.setdefault(variable, set()).add(name)
    return found


def table_of_variables():
    """variable -> the text of what reads it."""
    return dict(ROW.findall((REFERENCE / "environment.md").read_text(encoding="utf-8")))


@pytest.mark.slow
def test_each_variable_that_is_read_is_in_the_table_and_each_of_the_table_is_read():
    table, helps = table_of_variables(), of_helps()
    named = of_code("src", "examples") | {*helps} | {"_SERVANDA_COMPLETE"}  # which click reads
    parts = {name for name in named if name.endswith("_")}  # of a text that is put together
    assert all(any(name.startswith(part) for name in helps) for part in parts), parts
    assert {*table} == named - parts

    for variable, commands in helps.items():
        words = re.findall(r"`([\w -]+)`", table[variable])
        if words[0].startswith("--"):  # every command with it, but for those behind it
            having = {name for name, param in options() if words[0] in param.opts}
            assert commands == having - {*words[1:]}, variable
        else:
            assert commands == {*words}, variable


def test_no_document_service_or_help_names_a_variable_that_nothing_reads():
    names = {*table_of_variables()}
    ours = names | of_code("scripts") | {"SERVANDA_CRDS"}  # of scripts, and of a test
    deployed = [p for at in ("deploy", "examples") for p in (ROOT / at).rglob("*") if p.is_file()]
    for path in (*PAGES, *deployed, ROOT / "action.yml"):
        found = {*VARIABLE.findall(path.read_text(encoding="utf-8", errors="ignore"))}
        assert found <= (ours if path in PAGES else names), (path, found - ours)
    for name, command in ALL_COMMANDS.items():
        context = click.Context(command, **main.context_settings)
        assert {*VARIABLE.findall(command.get_help(context))} <= names, name


def test_every_example_of_the_readme_is_there():
    for name in re.findall(r"`(tiny-[\w-]+\.kernelcontract\.yaml)`", PAGES[0].read_text()):
        assert (ROOT / "examples" / name).is_file()


def test_wherever_observe_mode_is_named_it_is_said_who_serves():
    """The candidate does, which nobody expects who reads only that nothing is moved."""
    names = r"mode[`:]*[ |]+`?observe\b|observe mode|\| `observe` \||`enforce` or `observe`"
    pages = [*PAGES, *(path for path in (ROOT / "deploy").rglob("*") if path.is_file())]
    found = set()
    for page in (*pages, *(ROOT / "src/servanda/gateway").rglob("*.html")):
        for part in re.split(r"\n\n|\n(?=\||- )", page.read_text(encoding="utf-8")):
            if re.search(names, part := " ".join(part.split())):
                found.add(page.name)
                serves = re.search(r"infer( kernel)?( that)? serves?|stable serves", part)
                assert serves, f"{page}: say who serves:\n{part}"
    assert {"README.md", "gateway.md", "platform.md", "cli.md", "contract.md"} <= found
    gateway = (ROOT / "docs/how-to/gateway.md").read_text(encoding="utf-8")
    assert gateway.index("## Let stable serve, and mirror") < gateway.index("## Observe\n")


def test_every_method_is_where_the_page_of_methods_says():
    page = (ROOT / "docs/explanation/methods.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and "`" in line]
    where = [cell for row in rows for cell in row.split("|")[2:3]]
    stats, named, module = ROOT / "src/servanda/theory/stats", 0, ""
    for name in re.findall(r"`([^`]+)`", " ".join(where)):
        if "/" in name:
            assert any((root / name).exists() for root in (ROOT, ROOT / "src/servanda")), name
            continue
        module, _, known = name.rpartition(".") if "." in name else (module, "", name)
        code = (stats / f"{module}.py").read_text(encoding="utf-8")
        assert re.search(rf"(?m)^(?: {{4}})?(?:def |class )?{known}\b", code), name
        named += 1
    assert named >= 20
