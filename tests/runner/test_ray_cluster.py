# What is said where there is no Ray, or no cluster; a real cluster is in tests/real_ray.

import socket
import sys
from types import SimpleNamespace

import pytest

from servanda.errors import MeasurementError
from servanda.runner.ray_cluster import Cluster, connected


@pytest.fixture
def installed(monkeypatch):
    """Ray as far as an address is looked up."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(MeasurementError, match=r"needs Ray.*\n.*pip install 'servanda\[ray\]'"),
        connected("local"),
    ):
        pass


@pytest.mark.parametrize("form", ["ray://127.0.0.1:{}", "127.0.0.1:{}"])
def test_an_address_without_a_listener_is_refused_at_once(installed, form):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = form.format(free.getsockname()[1])
    with (
        pytest.raises(MeasurementError, match=rf"no Ray cluster at {address}: .*\n.*ray://HOST"),
        connected(address),
    ):
        pass


@pytest.mark.parametrize("address", ["ray://127.0.0.1:none", "no-such-host.invalid:1"])
def test_an_address_that_is_none_is_refused(installed, address):
    with pytest.raises(MeasurementError, match="no Ray cluster at"), connected(address):
        pass


def test_what_a_cluster_did_is_said_in_one_line():
    cluster = Cluster("auto", 4, [("a", 1.0), ("b", 40.2), ("a", 0.1)])
    assert str(cluster) == "3 tasks on 2 nodes of auto, 41 core-seconds"
    assert str(Cluster("local", 4, [("a", 0.4)])).startswith("1 task on 1 node of local")
