# Ledgers of older schemas are read as they are, and upgraded once they are written to.
#
# data/ holds one ledger of each layout that a version of Servanda made, written by its code:
#   schema_1_first     the first one, without an index by run
#   schema_1_indexed   of the same number, with the index

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from servanda.cli.main import main
from servanda.promotion.ledger.entry import Damaged, LedgerError, Record
from servanda.promotion.ledger.open import open_ledger, verify_at
from servanda.promotion.ledger.postgres import PostgresStore
from servanda.promotion.ledger.sqlite import SqliteStore
from tests.cluster import PASSWORD, USER

DATA = Path(__file__).parent / "data"
HEAD = "1a3ea85ee5d242eef8a52097fc686c81"
NEWEST = str(len(SqliteStore.migrations))
OLD = sorted({path.stem for path in DATA.iterdir()})


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request):
    return request.param


@pytest.fixture(params=OLD)
def old(request, kind, swift_path):
    """The place of a ledger that old code wrote."""
    if kind == "sqlite":
        return str(shutil.copy(DATA / f"{request.param}.db", swift_path / "ledger.db"))
    cluster = request.getfixturevalue("cluster")
    where = cluster.place()
    cluster.execute((DATA / f"{request.param}.sql").read_text(), url=where)
    return where


def schema(where):
    with open_ledger(where, reading=True) as ledger:
        return ledger.store.marks()["schema"]


def indexes(where, request):
    if where.startswith("postgresql"):
        query = "SELECT indexname FROM pg_indexes WHERE schemaname = current_schema()"
        return {name for (name,) in request.getfixturevalue("cluster").execute(query, url=where)}
    with closing(sqlite3.connect(where)) as db:
        query = "SELECT name FROM sqlite_master WHERE type = 'index'"
        return {name for (name,) in db.execute(query)}


def test_both_stores_have_the_same_schemas():
    assert len(SqliteStore.migrations) == len(PostgresStore.migrations)
    assert OLD == ["schema_1_first", "schema_1_indexed"]


def test_one_that_is_read_stays_as_it_is(old, kind):
    before = Path(old).read_bytes() if kind == "sqlite" else None

    with open_ledger(old, reading=True) as ledger:
        entries = [*ledger.entries()]
    found = verify_at(old)

    assert [e.kind for e in entries] == ["begun", "begun", "advanced"]
    assert (found.problems, found.entries, found.head) == ((), 3, HEAD)
    assert schema(old) == "1"
    if before is not None:
        assert Path(old).read_bytes() == before


def test_one_that_is_written_is_upgraded_and_keeps_its_entries(old, request):
    with open_ledger(old, reading=True) as ledger:
        before = [*ledger.entries()]

    with open_ledger(old) as ledger:
        upgraded = [*ledger.entries()]
        (new,) = ledger.append("a", [Record("finished", "ci", 1003.0, {})], after=2)

    assert upgraded == before and new.prev == HEAD
    assert schema(old) == NEWEST
    assert "servanda_ledger_run" in indexes(old, request)
    found = verify_at(old)
    assert (found.problems, found.entries) == ((), 4)
    with open_ledger(old):  # and a second time there is nothing to do
        assert schema(old) == NEWEST


def test_an_upgraded_one_is_append_only(old, direct):
    open_ledger(old).close()
    for table, column in (("servanda_ledger", "run"), ("servanda_ledger_meta", "value")):
        with pytest.raises(Exception, match="append-only"):
            direct(f"UPDATE {table} SET {column} = '9'")


@pytest.fixture
def where(old):
    return old


def test_a_damaged_one_is_not_upgraded(old, kind, direct):
    gone = "servanda_ledger_kept ON servanda_ledger"
    direct(f"DROP TRIGGER {gone if kind == 'postgresql' else 'servanda_ledger_delete'}")

    with pytest.raises(Damaged, match=rf"is not upgraded from schema 1 to {NEWEST}: .*servanda_"):
        open_ledger(old)

    assert schema(old) == "1"


def test_an_upgrade_that_fails_changes_nothing(old, monkeypatch, request):
    of = PostgresStore if old.startswith("postgresql") else SqliteStore
    before = indexes(old, request)
    broken = (*of.migrations, ("CREATE TABLE half (x INTEGER)", "CREATE NONSENSE"))
    with monkeypatch.context() as patch:
        patch.setattr(of, "migrations", broken)
        with pytest.raises(LedgerError, match="syntax error"):
            open_ledger(old)

    assert schema(old) == "1" and indexes(old, request) == before
    assert verify_at(old).problems == ()


def test_a_process_that_had_it_open_does_not_write_what_a_newer_version_upgraded(old, monkeypatch):
    of = PostgresStore if old.startswith("postgresql") else SqliteStore
    record = Record("finished", "ci", 1003.0, {})
    with open_ledger(old) as ledger:
        newer = (*of.migrations, ("CREATE TABLE more (x INTEGER)",))
        with monkeypatch.context() as patch:
            patch.setattr(of, "migrations", newer)
            open_ledger(old).close()
        with pytest.raises(LedgerError) as caught:
            ledger.append("a", [record], after=2)

    assert str(caught.value.problems[0]) == (
        f"{ledger.store.name} has schema {len(newer)}, and this version of Servanda reads up to "
        f"{NEWEST}\n"
        "  hint: use the version that wrote it, or a newer one: pip install --upgrade servanda"
    )


def test_the_verb_upgrades_and_says_so(old):
    def upgrade():
        done = CliRunner().invoke(main, ["promotion", "ledger", "upgrade", "--ledger", old])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert f": upgraded from schema 1 to {NEWEST}\n" in upgrade()
    assert upgrade().endswith(f" has schema {NEWEST} already\n")
    assert verify_at(old).head == HEAD


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_a_role_that_may_only_append_is_told_who_upgrades(old, cluster):
    name = old.rpartition("%3D")[2]
    cluster.execute(
        f"GRANT USAGE ON SCHEMA {name} TO {USER}",
        f"GRANT SELECT, INSERT ON ALL TABLES IN SCHEMA {name} TO {USER}",
    )
    password = PASSWORD.replace("/", "%2F").replace("@", "%40")
    narrow = f"postgresql://{USER}:{password}@127.0.0.1:{cluster.port}/postgres"
    narrow += f"?options=-csearch_path%3D{name}"

    with pytest.raises(LedgerError) as caught:
        open_ledger(narrow)
    assert str(caught.value.problems[0]).endswith(
        f" has schema 1, and this role may not upgrade it to {NEWEST}\n"
        "  hint: run `servanda promotion ledger upgrade` once, as the owner of its tables"
    )
    assert verify_at(narrow).problems == ()

    open_ledger(old).close()
    with open_ledger(narrow) as ledger:
        ledger.append("a", [Record("finished", "ci", 1003.0, {})], after=2)
