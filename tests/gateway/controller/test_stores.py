# What both stores of a controller do: all of a commit or nothing, and what is kept of it.

import pytest

from servanda.errors import MeasurementError
from servanda.gateway.controller.store import Commit, Sample, open_store
from tests.gateway.controller import killed

SAMPLE = Sample(1000.0, "all", "tv", 0.5, 6, 0, 1.0, "k")


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request, tmp_path):
    """Of a store that is not there yet."""
    return tmp_path if request.param == "sqlite" else request.getfixturevalue("cluster").place()


@pytest.fixture
def kept(monkeypatch):
    """Set what a store keeps."""

    def keep(**most):
        for name, value in most.items():
            monkeypatch.setattr(f"servanda.gateway.controller.store.{name}", value)

    return keep


def test_what_was_committed_is_there_after_a_restart(place):
    store = open_store(place, "toy")
    taken = {("g", 1.5): 7, ("h", 2.0): 3}
    store.commit(Commit({"a": [1]}, taken, {1: {"kind": "x"}}, samples=[SAMPLE], seeds=[5, 2**70]))
    store.close()
    again = open_store(place, "toy")
    assert again.meta("a") == [1]
    assert again.meta("b") is None
    assert again.taken() == taken
    assert again.outbox() == {1: {"kind": "x"}} and again.behind() == 1
    assert killed.stored_samples(place) == [SAMPLE]
    assert again.seeds() == (5, 2**70)
    again.delete_outbox(1)
    assert again.outbox() == {}
    again.close()


def test_a_later_commit_replaces_what_has_the_same_name(place):
    store = open_store(place, "toy")
    store.commit(Commit({"a": 1, "b": 1}, {("g", 1.0): 1, ("h", 1.0): 1}))
    store.commit(Commit({"a": 2}, {("g", 1.0): 2}))
    assert (store.meta("a"), store.meta("b")) == (2, 1)
    # the latest last
    assert [*store.taken().items()] == [(("h", 1.0), 1), (("g", 1.0), 2)]
    store.close()


def test_a_commit_that_fails_keeps_nothing_of_it(place):
    store = open_store(place, "toy")
    with pytest.raises(MeasurementError, match="cannot be used"):
        store.commit(Commit({"a": 1}, {("g", 1.0): None}))
    assert store.meta("a") is None
    store.commit(Commit({"a": 2}))
    assert store.meta("a") == 2 and store.leads and not store.lost
    store.close()


def test_old_samples_are_swept(place, kept):
    kept(SAMPLES=3, CLEANED_EVERY=1, SEEDS=2)
    store = open_store(place, "toy")
    for n in range(10):
        store.commit(Commit(samples=[SAMPLE], seeds=[n]))
    assert len(killed.stored_samples(place)) == 3
    assert store.seeds() == (8, 9)
    store.close()


def test_samples_are_kept_for_a_time(place, kept):
    kept(SAMPLES_S=100.0, CLEANED_EVERY=1)
    store = open_store(place, "toy")
    for at in (1000.0, 1050.0, 1120.0):
        store.commit(Commit(samples=[Sample(at, "all", "tv", 0.5, 6, 0, 1.0, "k")]))
    assert [sample.at for sample in killed.stored_samples(place)] == [1050.0, 1120.0]
    store.close()


def test_a_gateway_that_lives_on_is_remembered_beside_many_that_began_later(place, kept):
    kept(CLEANED_EVERY=1, STARTS=20)
    store = open_store(place, "toy")
    for start in range(1, 50):
        store.commit(Commit(taken={("old", 0.0): start, ("crashing", float(start)): 1}))
    taken = store.taken()
    store.close()
    assert (len(taken), taken["old", 0.0]) == (20, 49)
