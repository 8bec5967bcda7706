# What goes wrong with the place of a ledger is said with its place and the next move.

import builtins
import sqlite3
import sys
from urllib.parse import quote

import pytest

from servanda.errors import ServandaError
from servanda.promotion.ledger.entry import LedgerError, Record
from servanda.promotion.ledger.ledger import open_ledger, verify_at
from tests.cluster import PASSWORD, USER


def refused(where, **how):
    with pytest.raises(LedgerError) as error:
        open_ledger(str(where), **how)
    assert error.value.exit_code == 4
    return str(error.value)


def test_a_folder(tmp_path):
    assert refused(tmp_path) == (
        f"{tmp_path} is a folder, and a ledger is a file\n"
        f"  hint: name a file in it, such as {tmp_path / 'ledger.db'}"
    )


def test_a_place_under_a_file(tmp_path):
    (tmp_path / "file").write_text("x")

    assert refused(tmp_path / "file" / "a" / "ledger.db") == (
        f"{tmp_path}/file/a/ledger.db cannot be created: Not a directory\n"
        "  hint: give another location for the ledger"
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_a_place_where_nobody_may_write():
    assert refused("/proc/ledger.db") == (
        "/proc/ledger.db: unable to open database file\n"
        "  hint: check that the disk is local and writable, and has free space"
    )


def test_a_file_of_something_else(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("to be done: everything" * 100)

    for call in (open_ledger, verify_at):
        with pytest.raises(LedgerError) as error:
            call(str(path))
        assert str(error.value) == (
            f"{path} is not an SQLite file\n"
            "  hint: give another location for the ledger; an exported one ends in .jsonl"
        )
    assert path.read_text() == "to be done: everything" * 100


def test_a_database_of_something_else(tmp_path):
    path = tmp_path / "notes.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE notes (text)")
    db.close()
    before = path.read_bytes()

    assert refused(path) == (
        f"{path} is an SQLite file without a ledger\n  hint: give another location for the ledger"
    )
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "found", "hint"),
    [
        ("UPDATE {} SET value = '99'", "schema 99", "upgrade it: pip install --upgrade servanda"),
        ("UPDATE {} SET value = '1'", "schema 1", "start a new ledger: give another location for"),
        ("DELETE FROM {}", "no schema", "start a new ledger: give another location for"),
    ],
)
def test_a_ledger_of_another_schema(where, tamper, change, found, hint):
    with open_ledger(where) as ledger:
        name = ledger.store.name
    tamper(f"{change.format('servanda_ledger_meta')} WHERE name = 'schema'")

    for reading in (True, False):
        assert refused(where, reading=reading).startswith(
            f"{name} has {found}, and this version of Servanda reads schema 2\n  hint: {hint}"
        )


@pytest.mark.parametrize("where", ["mysql://ana:secret@db/x", "http://ana:secret@db/x"])
def test_a_store_that_is_none(where):
    scheme = where.partition(":")[0]
    assert refused(where) == (
        f"no ledger is kept at {scheme}://\n"
        "  hint: a path keeps it in SQLite, postgresql://... in PostgreSQL"
    )


def test_a_url_of_sqlite_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for where in (f"sqlite:///{tmp_path}/a.db", "sqlite:///b.db"):
        open_ledger(where).close()

    assert (tmp_path / "a.db").is_file()
    assert (tmp_path / "b.db").is_file()


def test_psycopg_is_not_installed(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest, **how):
        if name.startswith("servanda.promotion.ledger.postgres"):
            raise ModuleNotFoundError("No module named 'psycopg'")
        return real(name, *rest, **how)

    monkeypatch.setattr(builtins, "__import__", missing)

    assert refused("postgresql://ana:secret@db/x") == (
        "a ledger in PostgreSQL needs psycopg: No module named 'psycopg'\n"
        "  hint: pip install 'servanda[postgres]'"
    )


def test_a_witness_in_a_place_where_it_cannot_be(where, tmp_path):
    assert refused(where, witness=tmp_path).startswith(f"{tmp_path} cannot be read: Is a directory")


def test_an_entry_is_kept_though_its_witness_is_not(where, swift_path, monkeypatch):
    witness = swift_path / "witness" / "head"
    with open_ledger(where, witness=witness) as ledger:
        ledger.append("a", [Record("k", "ci", 1.0, {})], after=0)
        witness.with_name(".head.lock").unlink()
        witness.with_name(".head.lock").mkdir()

        with pytest.raises(LedgerError) as error:
            ledger.append("a", [Record("k", "ci", 1.0, {})], after=1)

        assert str(error.value) == (
            f"entry 2 is kept, and {witness} cannot be written: Is a directory\n"
            "  hint: free disk space, or give another location for the head checkpoint"
        )
        assert [e.seq for e in ledger.entries()] == [1, 2]


def test_another_process_that_does_not_let_go(tmp_path, monkeypatch):
    monkeypatch.setattr("servanda.promotion.ledger.ledger.PATIENCE_S", 0)
    path = tmp_path / "ledger.db"
    with open_ledger(str(path)) as ledger:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")

        with pytest.raises(LedgerError) as error:
            ledger.append("a", [Record("k", "ci", 1.0, {})], after=0)

        other.close()
        assert str(error.value) == (
            f"{path}: another process has been writing for 0 s\n"
            "  hint: wait for it, or stop it; nothing was written"
        )
        assert len(ledger.append("a", [Record("k", "ci", 1.0, {})], after=0)) == 1


def test_a_server_that_is_not_there(cluster):
    pytest.importorskip("psycopg")
    said = refused("postgresql://ana:s3cret@127.0.0.1:1/ledgers")

    first, hint = said.split("\n")
    assert first.startswith("postgresql://ana@127.0.0.1:1/ledgers cannot be opened: ")
    assert "refused" in first
    assert hint == (
        "  hint: is the server running there? A path instead of a URL keeps the ledger in SQLite"
    )


def over_tcp(cluster, password, database="postgres"):
    return f"postgresql://{USER}:{quote(password, safe='')}@127.0.0.1:{cluster.port}/{database}"


def test_a_wrong_password(cluster):
    place = f"postgresql://{USER}@127.0.0.1:{cluster.port}/postgres"

    said = refused(over_tcp(cluster, "wr0ng"))

    first, hint = said.split("\n")
    assert first.startswith(f"{place} cannot be opened: ")
    assert first.endswith(f'password authentication failed for user "{USER}"')
    assert "wr0ng" not in said
    assert hint == "  hint: give user and password in the URL, in PGPASSWORD or in ~/.pgpass"


def test_a_database_that_is_not_there(cluster):
    said = refused(over_tcp(cluster, PASSWORD, "nowhere"))

    assert 'database "nowhere" does not exist\n' in said
    assert said.endswith("hint: create it with createdb or createuser, or correct the URL")


def test_a_role_that_may_not_make_tables(cluster):
    said = refused(over_tcp(cluster, PASSWORD))

    assert "permission denied for schema public\n  hint: the role needs SELECT and INSERT" in said


def test_a_role_that_may_append_and_nothing_else(cluster):
    where = cluster.place()
    open_ledger(where).close()
    schema = where.rpartition("%3D")[2]
    cluster.execute(
        f"GRANT USAGE ON SCHEMA {schema} TO {USER}",
        f"GRANT SELECT, INSERT ON ALL TABLES IN SCHEMA {schema} TO {USER}",
    )

    with open_ledger(f"{over_tcp(cluster, PASSWORD)}?options=-csearch_path%3D{schema}") as ledger:
        assert len(ledger.append("a", [Record("k", "ana", 1.0, {})], after=0)) == 1


@pytest.mark.parametrize(
    "where",
    [
        "postgresql://ana:pa@ss@db/x",
        "postgresql://ana:pa/ss@db/x",
        "postgresql://ana:pa?ss@db/x",
        "postgresql://ana:p@a@s/s@db/x",
    ],
)
def test_a_password_that_cannot_be_told_from_the_rest_is_not_shown(cluster, where):
    assert refused(where) == (
        "the postgresql URL of the ledger has an @ where none can be\n"
        "  hint: in a user or a password write %40 for @, %2F for /, %3F for ?, %3A for :"
    )


@pytest.mark.parametrize(
    "where",
    [
        "postgresql://ana:s3cret@127.0.0.1:1/x",
        "postgresql://ana@127.0.0.1:1/x?password=s3cret",
        "postgresql://ana@127.0.0.1:1/x?password=s3cret&nonsense=1",
        "postgresql://ana:s3cr%65t@127.0.0.1:1/x",
        "postgresql://ana:s3cr%zzt@127.0.0.1:1/x",
    ],
)
def test_no_password_is_ever_printed(cluster, where):
    with pytest.raises(ServandaError) as error:
        open_ledger(where)

    assert "s3cr" not in str(error.value)


def test_a_connection_that_is_cut_off_in_a_write(cluster):
    """Whether the entry was kept is read from the run, never guessed."""
    where = cluster.place()
    with open_ledger(where) as ledger:
        ledger.append("a", [Record("k", "ci", 1.0, {})], after=0)
        end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s"
        process = ledger.store._db.info.backend_pid
        cluster.execute(end.replace("%s", str(process)))

        with pytest.raises(LedgerError) as error:
            ledger.append("a", [Record("k", "ci", 1.0, {})], after=1)

        first, hint = str(error.value).split("\n")
        assert first == (
            f"the connection to {ledger.store.name} was lost; it is not known whether the entry "
            "was kept; read the run again"
        )
        assert hint.startswith("  hint: open the ledger again; the server said: ")
        with pytest.raises(LedgerError, match="is closed\n  hint: open the ledger again"):
            [*ledger.entries()]
    with open_ledger(where) as ledger:
        after = len([*ledger.entries("a")])
        assert ledger.append("a", [Record("k", "ci", 1.0, {})], after=after)[0].n == after + 1
