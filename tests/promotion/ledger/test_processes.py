# Whatever is killed, and whatever appends at the same time: no entry is lost or doubled.

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from servanda.promotion.ledger.ledger import open_ledger, verify

ROOT = Path(__file__).parents[3]
KILLS = 30  # two hundred in tests/slow


def processes(what, where, swift_path, *numbers):
    """What the program of that name printed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.promotion.ledger.processes",
            what,
            where,
            str(swift_path / "head"),
        ]
        + [str(number) for number in numbers],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def nothing_is_lost_or_doubled(acknowledged, where, swift_path):
    """Each batch that was told is there once and whole; one that was not is there so or not."""
    with open_ledger(where, witness=swift_path / "head") as ledger:
        assert verify(ledger).problems == ()
        marks = [e.body["mark"] for e in ledger.entries("run")]
    assert len(marks) == len({*marks})
    kept = Counter(mark.rpartition(".")[0] for mark in marks)
    assert len(acknowledged) == len({*acknowledged})
    for batch in acknowledged:
        assert kept[batch], batch
    for batch, count in kept.items():
        assert count == 1 + int(batch.partition(".")[2]) % 3, batch
    return kept


@pytest.mark.slow
def test_what_was_acknowledged_survives_every_kill(where, swift_path):
    acknowledged = processes("killed", where, swift_path, KILLS, 11)

    kept = nothing_is_lost_or_doubled(acknowledged, where, swift_path)

    assert len(acknowledged) > KILLS
    assert len(kept) >= len(acknowledged)


def test_what_was_acknowledged_survives_the_end_of_each_connection(cluster, swift_path):
    """The server's side is killed; the client opens the ledger again and reads it."""
    where = cluster.place()

    acknowledged = processes("terminated", where, swift_path, KILLS, 12)

    nothing_is_lost_or_doubled(acknowledged, where, swift_path)
    assert len(acknowledged) > KILLS


@pytest.mark.slow
def test_of_those_who_append_behind_the_same_entry_one_wins(where, swift_path):
    rounds = 8

    results = processes("raced", where, swift_path, 4, rounds, 1)

    for turn in zip(*results, strict=True):
        assert sorted(turn) == ["l", "l", "l", "w"]
    with open_ledger(where, witness=swift_path / "head") as ledger:
        won = [e.body["mark"] for e in ledger.entries("one")]
        assert verify(ledger).problems == ()
    assert won == [
        f"{child}.{turn}"
        for turn in range(rounds)
        for child, letters in enumerate(results)
        if letters[turn] == "w"
    ]


def test_of_those_who_begin_a_ledger_at_once_one_does(cluster):
    """All of them saw that there is none, and stand in line to begin it."""
    import psycopg

    from servanda.promotion.ledger.postgres import LINE

    where, n = cluster.place(), 3
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with psycopg.connect(cluster.url, autocommit=True) as db, ThreadPoolExecutor(n) as pool:
        db.execute("SELECT pg_advisory_lock(%s)", (LINE,))
        opened = [pool.submit(open_ledger, where) for _ in range(n)]
        while db.execute(waiting).fetchone() != (n,):
            assert not any(one.done() for one in opened), opened
        db.execute("SELECT pg_advisory_unlock(%s)", (LINE,))
        for one in opened:
            with one.result() as ledger:
                assert verify(ledger).problems == ()


@pytest.mark.slow
def test_runs_that_grow_at_once_make_one_chain(where, swift_path):
    assert processes("raced", where, swift_path, 4, 8, 0) == ["w" * 8] * 4

    with open_ledger(where, witness=swift_path / "head") as ledger:
        found = verify(ledger)
        assert (found.entries, found.problems) == (32, ())
        for child in range(4):
            marks = [e.body["mark"] for e in ledger.entries(f"own {child}")]
            assert marks == [f"{child}.{turn}" for turn in range(8)]
        assert json.loads((swift_path / "head").read_text())["seq"] == 32
