# A Ray cluster of three nodes on this machine: run only when asked for, `make test-ray`.

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config, items):
    asked = any("real_ray" in str(arg) for arg in config.args)
    if not asked:
        reason = pytest.mark.skip(reason="make test-ray")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(reason)
