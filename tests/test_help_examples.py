# Each "such as X" of an option's help is a value that the option takes: it is typed on a call of
# its command, on files of this repository and a contract of tables, and the call answers.

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from servanda.cli.main import EXAMPLES, main
from tests import kit, serving
from tests.gateway.controller import controllers
from tests.test_command_line import COMMANDS, options, servanda

ROOT = Path(__file__).parents[1]
TOY = "toy.kernelcontract.yaml"
SIDES = "table:p.json table:q.json --prompts prompts.jsonl --sequences 300"
DERIVED = (
    "--train table:p.json --infer table:q.json --prompts prompts.jsonl --max-new-tokens 6 "
    "--policy-gradient-bias 0.1 --score-norm logit_space"
)
SETTINGS = "--settings settings.txt --run './judge.sh {}'"
LEDGER = "--ledger ledger.db"
# command -> calls that answer in a second or two; an example has to fit one of them
CALLS = {
    "check": ("examples/tiny-dump --quiet", f"{TOY} --quiet", f"{TOY} --quiet --fresh"),
    "compare": (SIDES, f"{SIDES} --fresh"),
    "relations": (
        "table:p.json --prompts prompts.jsonl",
        f"{TOY} --requests 2 --prompts prompts.jsonl",
    ),
    "watch": ("examples/tiny-dump --once",),
    "promote": (f"{TOY} --quiet --max-time 1s",),
    "bisect": (SETTINGS,),
    "contract lint": (TOY,),
    "contract explain": (TOY,),
    "contract plan": (f"{TOY} --no-probe",),
    "contract derive": (
        f"{DERIVED} --advantage 1",
        f"{DERIVED} --group-size 4",
        f"{DERIVED} --advantage 1 --clip-range 0.1 0.2 --ratio-share 0.5",
        f"{DERIVED} --advantage 1 --reward-drift 0.1",
    ),
    "contract presets": ("",),
    "contract diff": (f"{TOY} other.kernelcontract.yaml", TOY),
    "contract calibrate": ("runs/first", "examples/tiny-dump --save-reference x.json"),
    "contract test": ("examples/tiny-int8.kerneltest.yaml",),
    "promotion status": (LEDGER,),
    "promotion can-promote": (f"{TOY} --to canary {LEDGER}",),
    "promotion override": (f"toy --clause tv --ttl 1h --reason x {LEDGER}",),
    "promotion rollback": (f"toy --reason x {LEDGER}",),
    "promotion ledger show": (LEDGER,),
    "promotion ledger verify": (LEDGER,),
    "promotion ledger export": (LEDGER,),
    "gateway audit": (f"{TOY} --log served",),
    "tools measure": (
        "table:p.json --prompts prompts.jsonl --sequences 8 -o y.pack",
        f"{TOY} -o z.pack",
    ),
    "tools report": ("runs/first",),
    "tools weights": ("models/tiny-lm models/tiny-lm",),
}
# commands that need a server, or a model for longer, and options of others: read as they are typed
SERVERS = {"serve", "gateway status", "gateway pin", "gateway envoy", "tools serve-kernel"}
MODELS = {"preflight", "demo", "tools kld", "tools selftest", "promotion approve"}
READ = {
    *((name, None) for name in SERVERS | MODELS),
    *((name, "--ray-actor") for name in COMMANDS),
    *((name, "--referee") for name in ("check", "compare")),
    *(("bisect", option) for option in ("--prompts", "--sequences", "--max-new-tokens")),
    *(("contract test", option) for option in ("--fault", "--max-time")),
    ("promote", "--every"),
    ("relations", "--prompt-ids"),
}


def values(text, n):
    """What a help text gives as examples of a value of n words.

    >>> values("Port, such as 8000; 0 takes a free one.", 1)
    [['8000']]
    >>> values("Start nothing new after this time, such as 30s or 10m; undecided cells stay.", 1)
    [['30s'], ['10m']]
    >>> values("Range, such as -1 1.  [default: 0 1]", 2), values("Folder, such as ., and run.", 1)
    ([['-1', '1']], [['.']])
    """
    found = []
    for tail in re.findall(r"(?:such as|for example) (.*?)(?:; |\.  |\. |\.?$)", text):
        quoted = tail if tail.count("'") % 2 == 0 else tail.replace("'", "")
        words = [
            word if word == "." else re.sub(r"[,:;]+$", "", word) for word in shlex.split(quoted)
        ]
        while len(words) >= n:
            found.append(words[:n])
            words = words[n + 1 :] if words[n : n + 1] == ["or"] else []
    return found


GIVEN = [
    (name, param, value)
    for name, param in options()
    if not param.is_flag
    for value in values(param.help or "", param.nargs)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("help")
    for name in ("examples", "models", "data"):
        (folder / name).symlink_to(ROOT / name)
    path = controllers.contract(folder, golden=kit.golden(folder))
    (folder / "other").mkdir()
    for name in ("my", "other", "other/other"):
        shutil.copy(path, folder / f"{name}.kernelcontract.yaml")
    (folder / "settings.txt").write_text("--a\n--b\n")
    (folder / "judge.sh").write_text('#!/bin/sh\ncase "$*" in *--b*) exit 1;; esac\n')
    (folder / "judge.sh").chmod(0o755)
    (folder / "served").mkdir()
    rows = controllers.rows(path, 500)  # enough for each slice to be decided
    serving.log(
        folder / "served", [{k: v for k, v in row.items() if k != "x-chance"} for row in rows]
    )
    for words in (
        "init -q",
        "add toy*",
        "commit -qm x",
        "update-ref refs/remotes/origin/main HEAD",
    ):
        git = ["git", "-c", "user.name=x", "-c", "user.email=x@y", *words.split()]
        subprocess.run(git, cwd=folder, check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        servanda("check", TOY, "--quiet", "--run-dir", "runs/first")
        servanda("promote", TOY, "--quiet", *LEDGER.split())
        yield folder


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("name", "param", "value"), GIVEN, ids=[f"{n} {p.opts[0]} {' '.join(v)}" for n, p, v in GIVEN]
)
def test_an_example_of_a_help_text_is_answered(folder, name, param, value, tmp_path, monkeypatch):
    if {(name, None), (name, param.opts[0])} & READ:
        words = typed(EXAMPLES[name][0], param, value)
        COMMANDS[name].make_context(
            name, words, parent=click.Context(main, **main.context_settings)
        )
        return
    own = shutil.copytree(folder, tmp_path / "own", symlinks=True)
    monkeypatch.chdir(own)
    if (name, param.opts[0]) in {("check", "--contract"), ("watch", "--contract")}:
        Path(*value).unlink()
        servanda("check", "examples/tiny-dump", "--save-contract", *value)
    said = []
    for call in CALLS[name]:
        done = servanda(*name.split(), *typed(call, param, value))
        if done.exit_code in (0, 1, 3):
            return
        said.append(done.output)
    pytest.fail("\n".join(said))


def typed(call, param, value):
    """The words of a call with this value of an option, in place of one that it has."""
    words = shlex.split(call, comments=True)
    for option in {*param.opts} & {*words}:
        at = words.index(option)
        del words[at : at + 1 + param.nargs]
    return [*words, param.opts[0], *value]
