# Hypothesis is derandomised in the default suite: a red test is red for everyone.  Its nightly
# profile draws new examples, and prints how to see a failure again.

import importlib.util
import os
import re
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, settings

from servanda.cli.commands import exit_codes
from servanda.cli.main import EXAMPLES, main
from tests import cluster as clusters

_MACHINES_ARE_SHARED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("servanda", derandomize=True, **_MACHINES_ARE_SHARED)
settings.register_profile(
    "nightly", derandomize=False, print_blob=True, max_examples=1000, **_MACHINES_ARE_SHARED
)
settings.load_profile("servanda")


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config, items):
    """Tests of tests/slow, and those marked slow beside their like, run only when asked for.

    Of the cases of a test that is marked `sampled(n)` one in n is not slow, the first among them.
    """
    folder = Path(__file__).parent / "slow"
    asked = "slow" in config.option.markexpr or any("slow" in str(arg) for arg in config.args)
    cases = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None:
            name, _, _ = item.nodeid.partition("[")
            cases[name] += 1
        if folder in item.path.parents or (sampled and (cases[name] - 1) % sampled.args[0]):
            item.add_marker("slow")
        if not asked and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="make test-long, or make test-slow"))


@pytest.fixture(scope="session")
def cluster():
    """A PostgreSQL server that lives as long as the session; one for each worker of xdist."""
    if clusters.binaries() is None:
        pytest.skip("PostgreSQL is not installed: no initdb in /usr/lib/postgresql/*/bin")
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("psycopg is not installed: pip install 'servanda[postgres]'")
    with clusters.running() as found:
        yield found


@pytest.fixture(scope="session", autouse=True)
def codes_that_helps_state():
    """Every call of the command line in this process ends with a code that its help states."""
    invoke = CliRunner.invoke
    stated = {words: set(re.findall(r"[:;] (\d+) ", exit_codes(words))) for words in EXAMPLES}

    def invoked(self, cli, args=None, **named):
        done = invoke(self, cli, args, **named)
        typed = [" ".join(args[:n]) for n in (3, 2, 1)] if cli is main and args else []
        for words in [words for words in typed if words in stated]:
            assert str(done.exit_code) in {*stated[words], "130"}, (args, done.output)
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CliRunner, "invoke", invoked)
        yield


@pytest.fixture
def swift_path(tmp_path):
    """A folder in memory where the system has one: what is killed is processes, not machines."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="servanda-") as folder:
        yield Path(folder)


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request, swift_path):
    """The place of a ledger that is not there yet, in either store."""
    return clusters.place(request.param, swift_path, request)


@pytest.fixture(autouse=True)
def settings_of_ours():
    """A variable of ours that a test leaves behind is met by those that come after it."""
    before = _ours()
    yield
    assert _ours() == before, "the test changed the environment"


def _ours():
    return {name: value for name, value in os.environ.items() if name.startswith("SERVANDA_")}
