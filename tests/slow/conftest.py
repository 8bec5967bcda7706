# Slow tests run only when asked for by their folder: `make test-slow`.

from pathlib import Path

import pytest


def pytest_collection_modifyitems(config, items):
    asked = any("slow" in str(arg) for arg in config.args)
    if not asked:
        here = Path(__file__).parent
        reason = pytest.mark.skip(reason="make test-slow")
        for item in items:
            if here in item.path.parents:
                item.add_marker(reason)
