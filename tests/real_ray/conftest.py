# A Ray cluster of three nodes on this machine: run only when asked for, `make test-ray`.

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}
CLIENTS = 20_101  # port of ray://


def pytest_collection_modifyitems(config, items):
    asked = any("real_ray" in str(arg) for arg in config.args)
    if not asked:
        reason = pytest.mark.skip(reason="make test-ray")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(reason)


@pytest.fixture(scope="session")
def nodes():
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    head = {**NODE, "include_dashboard": False, "ray_client_server_port": CLIENTS}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()
