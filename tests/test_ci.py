# The slow targets run on a schedule: one that nobody starts finds nothing.

import re
import subprocess
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]


def nightly():
    flow = YAML(typ="safe").load((ROOT / ".github/workflows/nightly.yml").read_text())
    assert flow["on"]["schedule"][0]["cron"]
    return flow["jobs"]["slow"]["strategy"]["matrix"]["target"]


def test_every_target_of_tests_runs_on_each_change_or_each_night():
    targets = set(re.findall(r"^(test[\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    each_change = set(re.findall(r"^make (\S+)", (ROOT / ".ci/run").read_text(), re.M))

    assert targets <= each_change | set(nightly())
    assert set(nightly()) <= targets


def test_a_target_that_is_not_there_is_named_with_those_that_are():
    refused = subprocess.run([ROOT / ".ci/nightly", "test-slwo"], capture_output=True, text=True)

    assert refused.returncode == 2
    assert refused.stderr == (
        f"no nightly target is named 'test-slwo'; there are: {' '.join(nightly())}\n"
    )
