# Hands that change what a ledger holds, behind its back.

import sqlite3
from contextlib import closing

import pytest


@pytest.fixture
def direct(where, request):
    """Statements on the store itself, without the ledger's code."""

    def execute(*statements):
        if where.startswith("postgresql"):
            request.getfixturevalue("cluster").execute(*statements, url=where)
            return
        with closing(sqlite3.connect(where, isolation_level=None)) as db:
            for statement in statements:
                db.execute(statement)

    return execute


@pytest.fixture
def tamper(where, direct):
    """The same by somebody who owns the store, and takes its triggers away for a moment."""

    def execute(*statements):
        if where.startswith("postgresql"):
            tables = ("servanda_ledger", "servanda_ledger_meta")
            off = (f"ALTER TABLE {table} DISABLE TRIGGER USER" for table in tables)
            on = (f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER {table}_kept" for table in tables)
            direct(*off, *statements, *on)
            return
        with closing(sqlite3.connect(where)) as db:
            query = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
            triggers = db.execute(query).fetchall()
        drop = [f"DROP TRIGGER {name}" for name, _ in triggers]
        direct(*drop, *statements, *(sql for _, sql in triggers))

    return execute
