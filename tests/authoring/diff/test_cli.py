# `servanda contract diff`: what it prints and how it exits; and two files that are one version.

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from servanda.cli.main import main
from tests.contract.test_messages import GOOD

ROOT = Path(__file__).parents[3]


def servanda(*arguments, stdin=None):
    return CliRunner().invoke(main, [*map(str, arguments)], input=stdin, catch_exceptions=False)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The contracts of these tests lie here; the files that they name do not exist."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name, *edits, base=GOOD):
    text = base
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} is in the text {text.count(old)} times"
        text = text.replace(old, new)
    with open(name, "w", encoding="utf-8") as file:
        file.write(text)
    return name


def diff(*edits, more=()):
    """Of the good contract and an edited one, in two files."""
    return servanda("contract", "diff", write("old.yaml"), write("new.yaml", *edits), *more)


LOOSER = ("aggregate: mean, at_most: 0.02", "aggregate: mean, at_most: 0.05")
TIGHTER = ("aggregate: mean, at_most: 0.02", "aggregate: mean, at_most: 0.01")
NEXT = ("version: 1.0.0", "version: 1.1.0")
MAJOR = ("version: 1.0.0", "version: 2.0.0")


def test_a_looser_limit_breaks_the_consumer(folder):
    done = diff(LOOSER, NEXT)

    assert done.exit_code == 1
    assert done.output == (
        "tiny-int8 1.0.0 -> 1.1.0\n"
        "\n"
        "✗ ▼ loosened  statistical.tv.at_most  0.02 -> 0.05    old.yaml:25  new.yaml:25\n"
        "  · cosmetic  metadata.version        1.0.0 -> 1.1.0  old.yaml:3   new.yaml:3\n"
        "\n"
        "BREAKING for the consumer: 1 loosened; evidence expires: measure again\n"
        "  hint: metadata.version went from 1.0.0 to 1.1.0; a change that breaks wants 2.0.0\n"
    )
    done = diff(LOOSER, MAJOR)  # a new major version may break
    assert (done.exit_code, "hint" in done.output) == (1, False)


@pytest.mark.parametrize(
    ("edit", "side", "code"),
    [
        (LOOSER, "consumer", 1),
        (LOOSER, "producer", 0),
        (TIGHTER, "consumer", 0),
        (TIGHTER, "producer", 1),
    ],
)
def test_who_reads_it_decides_what_breaks(folder, edit, side, code):
    done = diff(edit, more=["--reader", side])

    assert done.exit_code == code
    word = "compatible" if code == 0 else "BREAKING"
    assert f"\n{word} for the {side}: 1 " in done.output


def test_what_only_decides_what_follows_leaves_the_evidence(folder):
    done = diff(("prompt_groups: [400,", "prompt_groups: [800,"))

    assert done.exit_code == 0
    assert done.output.endswith("compatible for the consumer: 1 tightened; evidence carries over\n")


def test_comments_and_the_order_of_keys_are_nothing(folder):
    write("new.yaml", ("kind: KernelContract\n", "# hello\nkind: KernelContract\n"))

    done = servanda("contract", "diff", write("old.yaml"), "new.yaml")

    assert done.exit_code == 0
    assert done.output == ("tiny-int8 1.0.0 -> 1.0.0\nthe same contract; evidence carries over\n")


def test_json_says_all_of_it(folder):
    done = diff(LOOSER, more=["--format", "json"])

    data = json.loads(done.output)
    (change,) = data["changes"]
    assert (data["compatible"], data["evidence"], data["side"]) == (False, "expires", "consumer")
    assert data["old"]["digest"] != data["new"]["digest"]
    assert change == {
        "kind": "loosened",
        "place": "statistical.tv.at_most",
        "what": "0.02 -> 0.05",
        "why": "a kernel within the tighter limit is within the other",
        "enforced": True,
        "where_old": {"file": "old.yaml", "line": 25, "column": 52},
        "where_new": {"file": "new.yaml", "line": 25, "column": 52},
        "breaking": True,
    }


def test_github_annotates_the_new_text(folder):
    done = diff(LOOSER, more=["--format", "github"])

    first, summary = done.output.strip().split("\n")
    assert first == (
        "::error file=new.yaml,line=25,col=52,title=statistical.tv.at_most loosened::0.02 -> 0.05 "
        "(a kernel within the tighter limit is within the other)"
    )
    assert summary.startswith("::notice title=servanda%3A tiny-int8 1.0.0 -> 1.0.0::BREAKING for")
    assert "stayed 1.0.0" in summary
    gone = ("  - {id: k3, metric: k3_nats, aggregate: mean, clip: 1.0, at_most: 0.001}\n", "")
    done = diff(gone, more=["--format", "github"])  # what was removed has no line
    assert "::error title=statistical.k3 removed::mean k3_nats at most 0.001" in done.output


def test_github_does_not_annotate_more_than_a_step_shows(folder):
    clauses = "".join(
        f"  - {{id: c{i}, metric: tv, aggregate: mean, at_most: 0.5}}\n" for i in range(12)
    )
    new = write("new.yaml", ("runtime:\n", f"{clauses}runtime:\n"))

    lines = servanda("contract", "diff", write("old.yaml"), new, "--format", "github").output.split(
        "\n"
    )

    assert sum(line.startswith("::notice file") for line in lines) == 9
    assert any("3 more changes are not annotated" in line for line in lines)


def test_markdown_escapes_what_a_contract_says_and_a_page_of_description_is_cut(folder):
    title = ("metadata: {", "metadata: {title: '<b>@all | $x$</b>', ")
    done = diff(title, more=["--format", "markdown"])

    assert done.output.startswith("> [!TIP]\n> **tiny-int8 1.0.0 -&gt; 1.0.0**: compatible")
    assert "<b>" not in done.output
    assert "@all" not in done.output
    done = diff(("metadata: {", f"metadata: {{description: '{'long ' * 500}', "))
    assert max(map(len, done.output.split("\n"))) < 160


# what cannot be compared


def test_the_problems_of_both_texts_are_told(folder):
    old = write("old.yaml", ("at_most: 0.6", "at_most: -1"))
    new = write("new.yaml", ("metric: tv,", "metric: vt,"))

    done = servanda("contract", "diff", old, new)

    assert done.exit_code == 2
    assert "old.yaml:23:" in done.output
    assert "new.yaml:25:" in done.output
    assert "no metric is named 'vt'" in done.output


@pytest.mark.parametrize("other", ["old.yaml", "./old.yaml", "link.yaml"])
def test_a_file_is_not_compared_with_itself(folder, other):
    write("old.yaml")
    (folder / "link.yaml").symlink_to("old.yaml")

    done = servanda("contract", "diff", "old.yaml", other)

    assert done.exit_code == 2
    assert done.output.startswith(
        f"OLD and NEW are one file: {other}\n  hint: of git: servanda contract diff --since HEAD~1 "
    )


def test_one_of_the_two_may_come_from_standard_input_and_not_both(folder):
    done = servanda("contract", "diff", "-", write("new.yaml", LOOSER), stdin=GOOD)
    assert done.exit_code == 1 and "stdin:25" in done.output

    done = servanda("contract", "diff", "-", "-")
    assert done.exit_code == 2 and "one of the two may be -" in done.output


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none.yaml", "none.yaml cannot be read: No such file or directory"),
        (".", ". cannot be read: Is a directory"),
        ("empty.yaml", "empty.yaml:1:1: the contract is empty"),
        ("bytes.yaml", "bytes.yaml is not UTF-8 text"),
        ("list.yaml", "list.yaml:1:1: a contract is a mapping, found a list"),
        ("tab.yaml", "tab.yaml:2:1: "),
    ],
)
def test_what_is_no_contract_is_named(folder, name, said):
    write("old.yaml")
    (folder / "empty.yaml").write_text("")
    (folder / "bytes.yaml").write_bytes(b"\xff\xfe\xfa")
    (folder / "list.yaml").write_text("- a\n")
    (folder / "tab.yaml").write_text("a: b\n\tc: d\n")

    for done in (
        servanda("contract", "diff", "old.yaml", name),
        servanda("contract", "diff", name, "old.yaml"),
    ):
        assert done.exit_code == 2
        assert said in done.output
        assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("words", "text", "place", "said", "caret"),
    [
        (
            ("contract", "diff", "old.yaml"),
            "apiVersion: servanda.dev/v1alpha1\nkind: ContractTest\nseries: []\n",
            "2:7",
            "this is a ContractTest, not a KernelContract",
            "    2 | kind: ContractTest\n              ^\n",
        ),
        (
            ("check",),
            "model_name_or_path: Qwen/Qwen3-0.6B\nuse_vllm: true\n",
            "1:1",
            "this is no KernelContract",
            "    1 | model_name_or_path: Qwen/Qwen3-0.6B\n        ^\n",
        ),
    ],
)
def test_a_document_of_another_kind_or_program_is_one_problem(
    folder, words, text, place, said, caret
):
    write("old.yaml")
    (folder / "x.yaml").write_text(text)

    done = servanda(*words, "x.yaml")

    assert done.exit_code == 2
    assert done.output == (
        f"x.yaml:{place}: {said}\n{caret}"
        "  hint: give a .kernelcontract.yaml file; `servanda contract init` writes one\n"
    )


def test_a_kind_that_is_misspelt_is_a_misspelt_kind(folder):
    done = diff(("KernelContract", "KernelContrakt"))

    assert done.exit_code == 2
    assert "kind cannot be 'KernelContrakt'" in done.output


# several at once


def test_two_contracts_of_one_version_that_differ_are_a_problem(folder):
    shutil.copytree(ROOT / "examples/audit", folder, dirs_exist_ok=True)
    good = (folder / "toy.kernelcontract.yaml").read_text()
    looser = ("at_most: 0.1}", "at_most: 0.2}")
    named = ("{name: toy-audit}", "{name: toy-audit, version: 1.1.0}")
    files = [write("one.yaml", base=good), write("same.yaml", base=f"# comment\n{good}")]
    files += [write("next.yaml", looser, named, base=good)]
    assert servanda("contract", "lint", *files).exit_code == 0

    done = servanda("contract", "lint", *files, write("other.yaml", looser, base=good))
    said = "other.yaml:1:1: toy-audit 0.0.0 is another contract in one.yaml\n  hint: give one of"
    assert done.exit_code == 2 and done.output.count("hint") == 1
    assert said in done.output


@pytest.fixture
def repository(folder):
    """The folder as a repository of git without a commit."""
    git("init", "-q", "-b", "main")
    return folder


def git(*words):
    who = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", *who, *words], check=True)


def commit():
    git("add", ".")
    git("commit", "-q", "-m", "contracts")


def test_contracts_are_compared_with_their_version_in_git(repository):
    (repository / "sub").mkdir()
    write("sub/one.yaml")
    write("two.yaml")
    commit()
    write("sub/one.yaml", LOOSER)
    write("two.yaml", TIGHTER)
    write("three.yaml")

    done = servanda("contract", "diff", "--since", "main", "sub/one.yaml", "two.yaml", "three.yaml")

    assert done.exit_code == 1
    one, _, rest = done.output.partition("\n\n✗ ▼ loosened")
    assert one == "tiny-int8 1.0.0 -> 1.0.0"
    assert "main:sub/one.yaml:25  sub/one.yaml:25" in rest
    assert "compatible for the consumer: 1 tightened" in rest
    assert done.output.endswith("\n\ntiny-int8: new since main\n")
    assert servanda("contract", "diff", "--since", "main", "two.yaml").exit_code == 0


def test_several_differences_are_a_list_in_json_and_lines_in_github(repository):
    for name in ("one.yaml", "two.yaml"):
        write(name)
    commit()
    write("one.yaml", LOOSER)
    since = ("contract", "diff", "--since", "HEAD", "one.yaml", "two.yaml", "--format")

    assert [d["compatible"] for d in json.loads(servanda(*since, "json").output)] == [False, True]
    lines = servanda(*since, "github").output.splitlines()
    assert [line.split()[0] for line in lines] == ["::error", "::notice", "::notice"]


def test_a_version_that_announces_a_breaking_change_is_accepted_when_asked(repository):
    write("one.yaml")
    commit()
    write("one.yaml", LOOSER, MAJOR)

    assert servanda("contract", "diff", "--since", "HEAD", "one.yaml").exit_code == 1
    assert servanda("contract", "diff", "--since", "HEAD", "--semver", "one.yaml").exit_code == 0
    write("one.yaml", LOOSER, NEXT)
    assert servanda("contract", "diff", "--since", "HEAD", "--semver", "one.yaml").exit_code == 1


def test_before_the_first_commit_every_contract_is_new_and_outside_of_git_none(
    repository, tmp_path_factory, monkeypatch
):
    done = servanda("contract", "diff", "--since", "HEAD", write("one.yaml"))
    assert (done.exit_code, done.output) == (0, "tiny-int8: new since HEAD\n")
    monkeypatch.chdir(tmp_path_factory.mktemp("outside"))
    done = servanda("contract", "diff", "--since", "HEAD", write("one.yaml"))
    said = "one.yaml lies in no repository of git\n  hint: servanda contract diff OLD NEW\n"
    assert (done.exit_code, done.output) == (2, said)


@pytest.mark.parametrize("name", ["nowhere", "--output=x"])
def test_a_revision_that_git_does_not_know_is_named(repository, name):
    write("one.yaml")
    commit()
    done = servanda("contract", "diff", f"--since={name}", "one.yaml")
    assert done.exit_code == 2
    assert done.output.startswith(
        f"git knows no commit '{name}'\n  hint: fetch it first: git fetch"
    )


def test_the_two_ways_of_calling_are_told_apart(folder):
    for words in (["one.yaml"], ["a", "b", "c"]):
        done = servanda("contract", "diff", *words)
        assert done.exit_code == 2
        assert "it takes OLD and NEW; --since REVISION takes any number" in done.output
    done = servanda("contract", "diff", "--since", "HEAD", "-")
    assert done.exit_code == 2
    assert "--since takes files: standard input has no version in git" in done.output
