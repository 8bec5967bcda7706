# Real engines, each in an environment of its own: `make test-engines` makes them and says where.

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def venvs():
    """The folder of virtual environments, one for each engine."""
    folder = Path(os.environ.get("SERVANDA_VENVS", ".venvs")).resolve()
    assert folder.is_dir(), f"{folder} is not there: run `make test-engines`"
    return folder
