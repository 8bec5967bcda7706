# The store in PostgreSQL: one leader of several, and connections that are lost.

import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from servanda.errors import MeasurementError
from servanda.gateway.controller.store import Commit, Sample, StandbyError, open_store
from tests.cluster import PASSWORD, USER
from tests.gateway.running import until

SAMPLE = Sample(1000.0, "all", "tv", 0.5, 6, 0, 1.0, "k")


@pytest.fixture
def place(cluster):
    return cluster.place()


def leads(place, **more):
    """The store of a leader; None where another leads."""
    try:
        return open_store(place, "toy", **more)
    except StandbyError:
        return None


def taken_over(place, **more):
    """The store of the next leader, once it can lead."""
    return until(lambda: leads(place, **more), "the next one leads")


def frozen(store):
    """A leader that renews nothing, as one whose machine stands still."""
    store._lease._ended.set()
    store._lease._thread.join()
    return store


def test_a_second_leader_is_told_who_leads_and_leads_when_that_one_ends(place):
    first = open_store(place, "toy", leader="http://one:8081", lease_s=60)
    with pytest.raises(StandbyError, match=r"http://one:8081 leads toy, for \d+\.\d s without"):
        open_store(place, "toy", leader="http://two:8081")
    other = open_store(place, "another contract")  # of the same database
    first.close()
    second = open_store(place, "toy")
    assert (first.term, second.term, other.term) == (1, 2, 1)
    second.close()
    other.close()


@pytest.mark.slow
def test_a_leader_that_renews_its_lease_keeps_the_lead(place):
    first = open_store(place, "toy", lease_s=12.0)
    until = first._lease._until
    while first._lease._until == until:  # a renewal
        with pytest.raises(StandbyError):
            open_store(place, "toy")
        assert not first.lost
    first.commit(Commit({"a": 1}))
    first.close()


def test_a_leader_that_stands_still_has_ended_by_its_own_clock_before_another_leads(place):
    for _ in range(5):
        first = frozen(open_store(place, "toy", lease_s=0.3))
        second = taken_over(place)
        assert not first.leads and not first.lost
        second.close()
        first.close()


def test_what_a_replaced_leader_stores_is_refused_as_a_whole(place):
    first = frozen(open_store(place, "toy", lease_s=0.2))
    first.commit(Commit({"a": 1}, {("g", 1.0): 1}))
    second = taken_over(place, leader="http://two")
    with pytest.raises(StandbyError, match="http://two leads toy now"):
        first.commit(Commit({"a": 2, "b": 2}, {("g", 1.0): 9}, {1: {}}, [SAMPLE], [7]))
    assert first.lost and not first.leads
    for act in (lambda: first.commit(Commit({"a": 3})), lambda: first.delete_outbox(9)):
        with pytest.raises(StandbyError):
            act()
    assert (second.meta("a"), second.meta("b"), second.taken()) == (1, None, {("g", 1.0): 1})
    assert (second.behind(), second.seeds()) == (0, ())
    first.close()
    assert second.leads  # the end of the first one ends only its own term
    second.commit(Commit({"a": 4}))
    second.close()


def test_a_leader_whose_lease_ended_leads_again_if_no_other_led(place):
    store = frozen(open_store(place, "toy", lease_s=0.1))
    while store.leads:
        time.sleep(0.02)
    store.commit(Commit({"a": 1}))
    assert store.leads and store.meta("a") == 1
    store.close()


class Slow:
    """A connection whose every answer comes a second of a clock after its statement."""

    closed = False

    def __init__(self, clock):
        self.clock = clock

    def execute(self, *_):
        self.clock.now += 1.0
        return SimpleNamespace(fetchone=lambda: (1,), rowcount=1)

    def close(self):
        self.closed = True


def test_a_lease_ends_no_later_than_its_time_after_each_request_to_renew_it(monkeypatch):
    """The database counts it from some time between the request and the answer."""
    postgres_store = pytest.importorskip("servanda.gateway.controller.postgres_store")
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(postgres_store, "time", clock)

    def led_at(*times):
        found = []
        for clock.now in times:
            found.append(lease.holds)
        return found

    db = Slow(clock)
    lease = postgres_store.Lease(lambda: db, "toy", "one", lease_s=60.0)
    assert led_at(59.0, 61.0) == [True, False]  # its row was asked for at 1
    lease._ended.set()
    lease._thread.join()
    clock.now = 100.0
    lease.renewed(lease.fence(db))
    assert led_at(159.5, 160.5) == [True, False]
    clock.now, turns = 200.0, iter([False, True])
    lease._ended = SimpleNamespace(wait=lambda _: next(turns), set=lambda: None)
    lease._renew()  # once
    assert led_at(259.5, 260.5) == [True, False]
    lease.end()


@pytest.mark.parametrize("over", [True, False])
def test_the_next_leader_ends_the_session_of_one_that_stands_still_once_its_lease_is_over(
    cluster, place, over
):
    first = frozen(open_store(place, "toy", lease_s=60))
    if over:
        schema = place.rpartition("%3D")[2]
        cluster.execute(f"UPDATE {schema}.servanda_leader SET until = clock_timestamp()")
    with pytest.raises(MeasurementError) if over else nullcontext(), first._changing():
        assert leads(place) is None  # the row is locked
        if over:
            second = until(lambda: leads(place), "the next one leads", wait_s=20)
    assert first.leads != over
    (second if over else first).commit(Commit({"a": 1}))
    for store in (second, first) if over else (first,):
        store.close()


def terminate(cluster, store):
    """End the server's side of the connection of a store."""
    cluster.execute(f"SELECT pg_terminate_backend({store._db.info.backend_pid})")


def test_a_connection_that_is_lost_between_two_commits_is_opened_again(cluster, place):
    store = open_store(place, "toy")
    terminate(cluster, store)
    with pytest.raises(MeasurementError, match="nothing is lost, and the write is retried"):
        store.commit(Commit({"a": 1}))
    assert not store.lost
    store.commit(Commit({"a": 1}))
    assert store.meta("a") == 1 and store.term == 1
    store.close()


def test_a_reader_that_waits_for_a_transaction_that_fails_opens_a_connection(cluster, place):
    store, found = leads(place), []
    store.commit(Commit(outbox={1: "a"}))
    with pytest.raises(MeasurementError, match="cannot be used"), store._changing():
        reader = threading.Thread(target=lambda: found.append(store.behind()))
        reader.start()
        reader.join(0.2)  # it waits for the lock, or will
        terminate(cluster, store)
        store.behind()
    reader.join()
    store.close()
    assert found == [1]


def test_a_leader_that_does_not_know_whether_a_commit_was_stored_leads_no_more(cluster, place):
    store = open_store(place, "toy")
    with pytest.raises(MeasurementError, match="cannot be used"), store._changing():
        terminate(cluster, store)  # before COMMIT
    assert store.lost and not store.leads
    with pytest.raises(StandbyError):
        store.commit(Commit({"a": 1}))
    store.close()
    open_store(place, "toy").close()


def test_of_many_that_begin_at_once_one_leads(place):
    opened, refused, odd = [], [], []
    begin = threading.Barrier(6)

    def lead():
        begin.wait()
        try:
            opened.append(open_store(place, "toy"))
        except StandbyError as error:
            refused.append(error)
        except BaseException as error:
            odd.append(error)

    threads = [threading.Thread(target=lead) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(opened), len(refused), odd) == (1, 5, [])
    opened[0].close()


def test_tables_of_a_later_version_are_refused(cluster, place):
    open_store(place, "toy").close()
    schema = place.rpartition("%3D")[2]
    cluster.execute(f"UPDATE {schema}.servanda_leader_layout SET layout = 99")
    with pytest.raises(MeasurementError, match=r"has schema 99, .* reads schema 1"):
        open_store(place, "toy")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://127.0.0.1:1/x", "is the server running there"),
        ("postgresql://{user}:wrong@127.0.0.1:{port}/postgres", "give user and password"),
        ("postgresql://{user}:a@b@127.0.0.1:{port}/postgres", "write %40 for @"),
        ("postgresql://{user}:{password}@127.0.0.1:{port}/nowhere", "create it with createdb"),
    ],
)
def test_a_database_that_cannot_be_used_is_told_without_the_password(cluster, url, words):
    url = url.format(
        user=USER, port=cluster.port, password=PASSWORD.replace("/", "%2F").replace("@", "%40")
    )
    with pytest.raises(MeasurementError) as told:
        open_store(url, "toy")
    assert words in str(told.value)
    assert PASSWORD not in str(told.value) and "wrong@" not in str(told.value)


def test_nothing_of_a_text_is_in_the_database(cluster, place):
    """Numbers, names of slices and clauses, and keyed hashes: there is no column for more."""
    open_store(place, "toy").close()
    columns = cluster.execute(
        "SELECT column_name FROM information_schema.columns WHERE table_schema = "
        f"'{place.rpartition('%3D')[2]}' AND table_name = 'servanda_leader_samples' "
        "ORDER BY ordinal_position"
    )
    names = ["at", "slice", "clause", "total", "tokens", "missing", "chance", "key"]
    assert [name for (name,) in columns] == ["contract", "id", *names]


COMMITTING = """
import sys
from servanda.gateway.controller.store import Commit, Sample, open_store
store = open_store(sys.argv[1], "toy", lease_s=0.5)
rows = [Sample(1000.0, "all", "tv", 0.5, 6, 0, 1.0, "k")] * 300
n = 0
while True:
    n += 1
    store.commit(Commit({"n": n}, {("g", 1.0): n}, {n: {}}, rows, [*range(300)]))
    if n == 1:
        print("committing", flush=True)
"""


@pytest.mark.slow
def test_a_leader_that_is_stopped_in_the_middle_of_a_commit_keeps_no_lock(place):
    """In the middle of a message, the server waits for its rest without any timeout."""
    rng = random.Random(1)
    for _ in range(6):
        words = [sys.executable, "-c", COMMITTING, place]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as first:
            assert first.stdout.readline() == "committing\n"
            for _ in range(rng.randrange(200_000)):
                pass
            first.send_signal(signal.SIGSTOP)
            try:
                second = taken_over(place)
            finally:
                first.kill()
        n = second.meta("n")
        assert second.taken() == {("g", 1.0): n} and second.behind() == n
        second.delete_outbox(n)
        second.close()
