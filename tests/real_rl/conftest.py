# Trainers that live in environments of their own: run only when asked for, `make test-rl`.
#
# SERVANDA_VENVS names the folder with the environments, default .venvs.

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
collect_ignore = [
    "trl_ranks.py",
    "trl_async_run.py",
    "trl_drills.py",
    "trl_runs.py",
    "verl_fits.py",
    "verl_steps.py",
    "zero3_drills.py",
]  # for other interpreters than this one


def pytest_collection_modifyitems(config, items):
    asked = any("real_rl" in str(arg) for arg in config.args)
    if not asked:
        reason = pytest.mark.skip(reason="make test-rl")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(reason)


@pytest.fixture(scope="session")
def venvs():
    return Path(os.environ.get("SERVANDA_VENVS", ".venvs")).absolute()
