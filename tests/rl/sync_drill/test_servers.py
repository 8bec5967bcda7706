# The sync drill over HTTP: real servers in another process take over checkpoints, or fail to.

import re

import pytest

torch = pytest.importorskip("torch")

from servanda.errors import MeasurementError  # noqa: E402
from servanda.rl import Trainee, preflight  # noqa: E402
from tests.rl.served_weights import begun, saved, serving, small_model, trained  # noqa: E402
from tests.rl.server_faults import SERVER_FAULTS  # noqa: E402
from tests.rl.sync_drill.toys import bits  # noqa: E402

REPLICAS = 3
NAMED = [name for name, fault in SERVER_FAULTS.items() if fault.causes]
REFUSED = [name for name, fault in SERVER_FAULTS.items() if fault.error]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(small_model(), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def servers(folder):
    with serving(folder, "vllm", REPLICAS) as urls:
        yield urls


@pytest.fixture(scope="module")
def sglang(folder):
    with serving(folder, "sglang") as (url,):
        yield url


def scores_of(urls, dialect="vllm"):
    module = small_model()
    servers = trained(module, urls, dialect).replicas
    return [replica.score([[1, 2, 3, 4], [5, 6, 7, 8]]) for replica in servers.all]


@pytest.mark.parametrize("name", NAMED)
def test_a_fault_of_a_server_has_its_name(servers, name):
    module, fault = small_model(), SERVER_FAULTS[name]
    before = bits(module)
    begun(servers[0], name)

    result = preflight(trained(module, servers[0]))

    assert result.cause in fault.causes, str(result)
    assert result.outcome == ("violated" if result.cause else "holds")
    assert bits(module) == before
    if name == "none":
        assert not result.warnings and result.exit_code == 0
