# The store in a file: all of a commit or nothing, and a caller that cannot write.  What both stores
# do is in test_stores.py.

import sqlite3

import pytest

from servanda.errors import MeasurementError
from servanda.gateway.controller.store import FILE, Commit, SqliteStore


def test_nobody_else_reads_the_key_of_the_split(tmp_path):
    store = SqliteStore(tmp_path / "state")
    store.commit(Commit(meta={"kept": {}}))
    rights = {path.name: path.stat().st_mode & 0o077 for path in store.path.parent.iterdir()}
    store.close()
    assert rights and not any(rights.values())


def test_a_locked_store_is_told_and_works_again_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr("servanda.gateway.controller.store._PATIENCE_S", 0.01)
    store = SqliteStore(tmp_path)
    other = sqlite3.connect(tmp_path / FILE)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(MeasurementError, match="database is locked"):
        store.commit(Commit({"a": 1}))
    other.rollback()
    other.close()
    store.commit(Commit({"a": 1}))
    assert store.meta("a") == 1
    store.close()


def test_a_store_that_is_gone_is_never_written_to_unseen(tmp_path):
    store = SqliteStore(tmp_path)
    (tmp_path / FILE).unlink()
    with pytest.raises(MeasurementError, match="is gone"):
        store.commit(Commit({"a": 1}))
    store.renew(Commit({"a": 2}))
    assert store.meta("a") == 2
    store.close()


def test_two_leaders_do_not_share_a_folder(tmp_path):
    store = SqliteStore(tmp_path)
    with pytest.raises(MeasurementError, match="is in use by another leader"):
        SqliteStore(tmp_path)
    store.close()
    SqliteStore(tmp_path).close()


def test_a_file_that_is_no_store_is_refused(tmp_path):
    (tmp_path / FILE).write_text("something else, and long enough to be looked at" * 50)
    with pytest.raises(MeasurementError, match="cannot be used: file is not a database"):
        SqliteStore(tmp_path)
    (tmp_path / FILE).unlink()
    SqliteStore(tmp_path).close()  # the folder was let go


@pytest.mark.parametrize(
    ("version", "found", "hint"),
    [
        (99, "schema 99", "upgrade it: pip install --upgrade servanda"),
        (0, "no schema", "start a new state: name another --state"),
    ],
)
def test_a_store_of_another_schema_is_refused(tmp_path, version, found, hint):
    SqliteStore(tmp_path).close()
    db = sqlite3.connect(tmp_path / FILE)
    db.execute(f"PRAGMA user_version={version}")
    db.close()
    with pytest.raises(MeasurementError) as refused:
        SqliteStore(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path / FILE} has {found}, and this version of Servanda reads schema 1\n"
        f"  hint: {hint}"
    )


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MeasurementError, match="name another --state"):
        SqliteStore(tmp_path / "file" / "state")


def test_nothing_of_a_text_is_in_the_file(tmp_path):
    """Numbers, names of slices and clauses, and keyed hashes: there is no column for more."""
    store = SqliteStore(tmp_path)
    store.close()
    db = sqlite3.connect(tmp_path / FILE)
    columns = [row[1] for row in db.execute("PRAGMA table_info(samples)")]
    db.close()
    names = ["at", "slice", "clause", "total", "tokens", "missing", "chance", "key"]
    assert columns == ["id", *names]
