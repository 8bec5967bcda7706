# A gateway between two servers that say who they are.

import pytest

from tests.gateway.serving import NOBODY, Fake, Running, config, everything, reply, snapshot


@pytest.fixture
def pools():
    with Fake(reply({"by": "infer"})) as infer, Fake(reply({"by": "stable"})) as stable:
        yield infer, stable


@pytest.fixture
def running(pools):
    """Infer serves everything, and every request is sampled."""
    with Running(config(*pools, controller=NOBODY)) as running:
        running.gateway.take(snapshot(whole=everything(sample=1.0)))
        yield running
