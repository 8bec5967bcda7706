import shutil

import pytest

from tests.deploy import live as running


@pytest.fixture(scope="session")
def live(tmp_path_factory):
    with running.gateway(tmp_path_factory.mktemp("live")) as live:
        yield live


@pytest.fixture(scope="session")
def prometheus(live, tmp_path_factory):
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    with running.prometheus(program, folder, live.leader) as server:
        yield server


@pytest.fixture(scope="session")
def promtool():
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    return program
