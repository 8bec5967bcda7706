# The slow targets run on a schedule: one that nobody starts finds nothing.  A release is built,
# tested as installed, and published without a stored secret.

import re
import subprocess
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
WORKFLOWS = ROOT / ".github/workflows"


def workflow(name):
    return YAML(typ="safe").load((WORKFLOWS / name).read_text())


def nightly():
    flow = workflow("nightly.yml")
    assert flow["on"]["schedule"][0]["cron"]
    return flow["jobs"]["slow"]["strategy"]["matrix"]["target"]


def test_every_target_of_tests_runs_on_each_change_or_each_night():
    targets = set(
        re.findall(r"^(test[\w-]*|release-check):", (ROOT / "Makefile").read_text(), re.M)
    )
    each_change = set(re.findall(r"^make (\S+)", (ROOT / ".ci/run").read_text(), re.M))

    assert targets <= each_change | set(nightly())
    assert set(nightly()) <= targets


def test_a_target_that_is_not_there_is_named_with_those_that_are():
    refused = subprocess.run([ROOT / ".ci/nightly", "test-slwo"], capture_output=True, text=True)

    assert refused.returncode == 2
    assert refused.stderr == (
        f"no nightly target is named 'test-slwo'; there are: {' '.join(nightly())}\n"
    )


def test_only_a_tag_starts_a_release_and_no_secret_is_stored():
    assert workflow("release.yml")["on"] == {"push": {"tags": ["v*"]}}
    assert "secrets." not in (WORKFLOWS / "release.yml").read_text()


def test_a_release_is_published_after_it_was_tested_as_installed():
    jobs = workflow("release.yml")["jobs"]

    assert jobs["installed"]["needs"] == "build"
    assert jobs["pypi"]["needs"] == ["build", "installed"]
    assert "pypi" in jobs["github"]["needs"]
    builds = [step["run"] for step in jobs["build"]["steps"] if "make " in step.get("run", "")]
    assert builds == ["make release-check", 'make release TAG="$GITHUB_REF_NAME"']
    assert any("make test-installed WHEEL=" in step.get("run", "") for step in steps("installed"))
    for name in ("pypi", "github"):  # they publish what was built, and build nothing
        assert not [step for step in steps(name) if "make " in step.get("run", "")]


def test_each_job_of_a_release_may_do_what_it_needs_and_no_more():
    flow = workflow("release.yml")
    assert flow["permissions"] == {"contents": "read"}
    assert {name: job.get("permissions") for name, job in flow["jobs"].items()} == {
        "build": {"contents": "read", "id-token": "write", "attestations": "write"},
        "installed": None,  # those of the workflow
        "pypi": {"id-token": "write"},
        "github": {"contents": "write"},
    }
    assert [n for n, job in flow["jobs"].items() if job.get("environment")] == ["pypi"]


def test_a_release_attests_every_file_and_sends_the_index_only_packages():
    used = {
        step["uses"].split("@")[0]: step.get("with")
        for step in steps("build", "pypi")
        if "uses" in step
    }

    assert used["actions/attest-build-provenance"] == {"subject-checksums": "dist/SHA256SUMS"}
    assert used["pypa/gh-action-pypi-publish"] == {"packages-dir": "packages/"}
    copied = [step["run"] for step in steps("pypi") if "packages/" in step.get("run", "")]
    assert copied == [
        'mkdir packages && cp dist/*.whl "dist/servanda-${GITHUB_REF_NAME#v}.tar.gz" packages/'
    ]


def test_an_action_has_one_version_in_all_workflows():
    texts = [path.read_text() for path in WORKFLOWS.glob("*.yml")]
    pinned = {one for text in texts for one in re.findall(r"uses: (\S+)", text)}

    assert all(re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", one) for one in pinned), pinned
    assert len({one.split("@")[0] for one in pinned}) == len(pinned)


def steps(*jobs):
    found = workflow("release.yml")["jobs"]
    return [step for job in jobs for step in found[job]["steps"] if {"uses", "run"} & {*step}]
