# Hypothesis is derandomised: a red test is red for everyone.

import importlib.util

import pytest
from hypothesis import HealthCheck, settings

from tests import cluster as clusters

settings.register_profile(
    "servanda",
    derandomize=True,
    deadline=None,  # machines are shared; time belongs in benchmarks
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("servanda")


@pytest.fixture(scope="session")
def cluster():
    """A PostgreSQL server that lives as long as the session; one for each worker of xdist."""
    if clusters.binaries() is None:
        pytest.skip("PostgreSQL is not installed: no initdb in /usr/lib/postgresql/*/bin")
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("psycopg is not installed: pip install 'servanda[postgres]'")
    with clusters.running() as found:
        yield found


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request, tmp_path):
    """The place of a ledger that is not there yet, in either store."""
    if request.param == "sqlite":
        return str(tmp_path / "ledger.db")
    return request.getfixturevalue("cluster").place()
