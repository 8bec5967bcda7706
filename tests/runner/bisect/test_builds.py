# The bad build, commit and setting, by exit codes and by comparisons of real kernels.

import json
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from servanda.cli.main import main
from servanda.runner.bisect.probes import ALPHA
from tests import kit


def servanda(*words):
    return CliRunner().invoke(main, ["bisect", *map(str, words)], catch_exceptions=False)


def git(folder, *words):
    config = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    call = ["git", "-C", folder, *config, *words]
    return subprocess.run(call, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """ref.json, near.json at TV 0.002 and far.json at 0.3 from it, with prompts."""
    monkeypatch.chdir(tmp_path)
    for name, tv in (("ref", 0.0), ("near", 0.002), ("far", 0.3)):
        kit.table(tmp_path, f"{name}.json", {"": kit.moved(kit.BASE, tv)})
    lines = [json.dumps({"prompt": "a b" if i % 2 else "c"}) for i in range(60)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


SMALL = ("--prompts", "prompts.jsonl", "--preset", "nvfp4", "--max-new-tokens", 6, "--quiet")


def lines(path, *texts):
    path.write_text("# a comment\n" + "\n".join(texts) + "\n")
    return path


# by exit code


def test_the_first_bad_build_by_exit_codes_and_the_skipped_ones_are_named(tmp_path):
    script = tmp_path / "judge.py"
    script.write_text(
        "import json, sys\n"
        "n = int(sys.argv[1])\n"
        "print(json.dumps({'tokens': 100 + n}))\n"
        "sys.exit(3 if n in (9, 10) else n >= 11)\n"
    )
    builds = lines(tmp_path / "builds.txt", *map(str, range(1, 17)))
    run = f"{sys.executable} {script} {{}}"
    done = servanda("--builds", builds, "--run", run, "--quiet", "--format", "json")
    data = json.loads(done.stdout)
    assert done.exit_code == 3 and (data["good"], data["bad"]) == ("8", ["11"])
    assert data["unsure"] == ["9", "10"] and data["alpha"] is None
    assert all(p["tokens"] == 100 + int(p["what"]) for p in data["probes"])
    assert len(data["probes"]) < 10
    text = servanda("--builds", builds, "--run", run, "--quiet").stdout
    assert "first bad 11\nlast good 8\n" in text
    assert "unsure    the first bad one may be one that was skipped: 9, 10" in text
    assert "error     as sure as the command" in text


def test_a_planted_commit_is_found_and_the_checkout_stays_as_it_is(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    for i in range(12):
        (folder / "epsilon.txt").write_text("1e-5" if i < 7 else "1e-2")
        (folder / "other.txt").write_text(str(i))
        git(folder, "add", "-A")
        git(folder, "commit", "--quiet", "-m", f"change {i}")
    (folder / "other.txt").write_text("not committed")
    good = git(folder, "rev-parse", "main~11")
    words = ("--git", f"{good}..main", "--repository", folder, "--quiet")
    done = servanda(*words, "--run", "grep -q 1e-5 {}/epsilon.txt && grep -q 1e-5 epsilon.txt")
    assert done.exit_code == 1, done.output
    assert "first bad " in done.stdout and " change 7\n" in done.stdout.split("last good")[0]
    assert "bisect    12 commits, 6 probes" in done.stdout
    assert (folder / "other.txt").read_text() == "not committed"
    assert len(git(folder, "worktree", "list").splitlines()) == 1
    done = servanda("--git", f"main..{good}", "--repository", folder, "--run", "true")
    assert done.exit_code == 2 and "does not come after main" in done.stderr


def test_the_flag_and_the_variable_that_are_bad_together_are_found(tmp_path):
    script = tmp_path / "judge.py"
    script.write_text(
        "import os, sys\nsys.exit('--eager' in sys.argv and os.environ.get('CACHE') == 'fp8 e5')\n"
    )
    settings = lines(
        tmp_path / "settings.txt", "--eager", "--seed 7", "CACHE=fp8 e5", "BLOCK=16", "--log x"
    )
    done = servanda("--settings", settings, "--run", f"{sys.executable} {script} {{}}", "--quiet")
    assert done.exit_code == 1 and "cause     --eager CACHE=fp8 e5\n" in done.stdout, done.output


# by comparison


def test_the_first_build_beyond_the_limit_is_found_by_comparisons(tables):
    for i in range(6):
        source = "near" if i < 4 else "far"
        (tables / f"v{i}.json").write_text((tables / f"{source}.json").read_text())
    builds = lines(tables / "builds.txt", *(f"v{i}" for i in range(6)))
    call = ("table:ref.json", "table:{}.json", "--builds", builds, *SMALL)
    done = servanda(*call, "--format", "json")
    data = json.loads(done.stdout)
    assert (data["good"], data["bad"]) == ("v3", ["v4"]), done.output
    probes = data["probes"]
    assert data["alpha"] == ALPHA and len(probes) <= 5 and all(p["tokens"] > 0 for p in probes)
    assert sum(p["alpha"] for p in probes) <= ALPHA
    tokens = {p["what"]: p["tokens"] for p in probes}
    assert tokens["v5"] <= tokens["v0"]  # what is far away is decided no later


def test_a_comparison_that_is_undecided_is_no_pass(tables):
    kit.table(tables, "edge.json", {"": kit.moved(kit.BASE, 0.04)})  # at the limit
    builds = lines(tables / "builds.txt", "near", "edge", "far")
    call = ("table:ref.json", "table:{}.json", "--builds", builds, "--sequences", 300, *SMALL)
    done = servanda(*call)
    assert done.exit_code == 3 and "first bad far\nlast good near\n" in done.stdout, done.output
    assert "unsure    the first bad one may be one that was skipped: edge" in done.stdout
    assert "  inconclusive\n" in done.stdout


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_the_flag_of_a_server_is_found_by_comparisons(tables):
    """far.json is served with --coarse and MODE=fast together, near.json otherwise."""
    port = free_port()
    (tables / "serve.py").write_text(
        "import os, subprocess, sys\n"
        "bad = '--coarse' in sys.argv and os.environ.get('MODE') == 'fast'\n"
        "table = 'table:far.json' if bad else 'table:near.json'\n"
        "command = [sys.executable, '-m', 'servanda', 'tools', 'serve-kernel', table]\n"
        f"subprocess.run([*command, '--port', '{port}'])\n"
    )
    settings = lines(tables / "settings.txt", "--coarse", "MODE=fast", "--other 3")
    run = f"{sys.executable} serve.py {{}}"
    call = ("table:ref.json", f"http://127.0.0.1:{port}", "--settings", settings, "--run", run)
    done = servanda(*call, *SMALL, "--format", "json")
    data = json.loads(done.stdout)
    assert data["bad"] == ["--coarse", "MODE=fast"] and data["unsure"] == [], done.output
    assert sum(probe["alpha"] for probe in data["probes"]) <= ALPHA
    assert all(probe["tokens"] > 0 for probe in data["probes"])


def test_each_build_is_served_by_its_command_and_ended(tables):
    port = free_port()
    builds = lines(tables / "builds.txt", "near", "far")
    run = f"{sys.executable} -m servanda tools serve-kernel table:{{}}.json --port {port}"
    url = f"http://127.0.0.1:{port}"
    done = servanda("table:ref.json", url, "--builds", builds, "--run", run, *SMALL)
    assert done.exit_code == 1 and "first bad far\nlast good near\n" in done.stdout, done.output
    assert "wrong with probability at most 5.0 %, over all probes together" in done.stdout
    with socket.socket() as again:
        assert again.connect_ex(("127.0.0.1", port)) != 0


# mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--builds", "b.txt", "--run", "true"], "neither the command nor a kernel has {} in it"),
        (["--builds", "b.txt"], "neither the command nor a kernel has {} in it"),
        (["--builds", "b.txt", "--run", "exit 2 # {}"], "the command ended with 2: exit 2 # one"),
        (["--builds", "b.txt", "--run", "no-such {}"], "the command ended with 127"),
        (["--settings", "s.txt", "--run", "true"], "the settings have flags, and the command no"),
        (["--settings", "b.txt", "--run", "true {}"], "'one' is no setting"),
        (["--git", "main", "--run", "true"], "is no range of commits"),
        (["--builds", "none.txt", "--run", "true {}"], "none.txt cannot be read"),
        (["--builds", "b.txt", "--settings", "s.txt"], "give one of --builds, --git and"),
        (["table:ref.json"], "give A and B, or one of"),
    ],
)
def test_a_wrong_call_says_what_to_write(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "b.txt", "one", "two")
    lines(tmp_path / "s.txt", "--eager")
    done = servanda(*words)
    assert done.exit_code == 2 and message in done.stderr, done.output
