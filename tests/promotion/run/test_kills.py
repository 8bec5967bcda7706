# Promoters that are killed: in the end the promotion is the one that nobody killed.

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from servanda.promotion.ledger.ledger import open_ledger, verify
from servanda.promotion.notify.base import message
from servanda.promotion.run.history import disagreements, replayed
from servanda.promotion.state import Effect
from servanda.traces.serialization import from_plain
from tests.promotion.run.killing import Site

ROOT = Path(__file__).parents[3]
KILLS = 20  # two hundred in tests/slow
RACES = 4


def processes(what, where, swift_path, *numbers):
    """What the program of that name printed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    program = [sys.executable, "-m", "tests.promotion.run.killing", what]
    done = subprocess.run(
        [*program, str(swift_path), where, str(swift_path / "head"), *map(str, numbers)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def promotions(where, swift_path, kills, seed):
    """(what the processes of each promotion said, how many of them were killed)."""
    found = processes("killed", where, swift_path, kills, seed)
    return found["said"], found["kills"]


def nothing_is_lost_or_doubled(said, where, swift_path):
    """Every promotion of the ledger came to its end, and is what its processes said of it."""
    with open_ledger(where, witness=swift_path / "head") as ledger:
        assert verify(ledger).problems == disagreements(ledger) == ()
        entries = {run: [*ledger.entries(run)] for run in ledger.runs()}
    unkilled = shown(entries, Site(swift_path, 0))
    for number, lines in enumerate(said, start=1):
        site = Site(swift_path, number)
        own = of_contract(entries, site)
        came_to_its_end(own, site)
        assert shown(entries, site) == {leg: unkilled[leg] for leg in shown(entries, site)}
        kept_what_was_said(own, lines)
        told_once(own, site)


def of_contract(entries, site):
    return {
        run: found
        for run, found in entries.items()
        if found[0].body["contract"]["name"] == site.name
    }


def shown(entries, site):
    """Leg -> the numbers with which it was left, in the first attempt."""
    first = next(iter(of_contract(entries, site).values()))
    history, found = None, {}
    for entry in first:
        before, history = history, replayed([entry], history)
        if before is not None and before.state.leg != history.state.leg:
            found[before.leg.name] = history.evaluations[-1].finding.cells
    return found


def came_to_its_end(own, site):
    stories = [replayed(entries) for entries in own.values()]
    assert len(stories) >= 1 + (site.end == "fresh")
    assert len(stories) == 1 or site.end == "fresh"
    for history, entries in zip(stories, own.values(), strict=True):
        through = site.end == "completed"
        assert history.state.status == ("completed" if through else "rolled_back")
        kinds = Counter(e.kind for e in entries)
        assert kinds["opened"] == 1
        assert kinds["rolled_back"] == (0 if through else 1)
        assert kinds["approved"] == (1 if history.leg.stage == "full" else 0)
        legs = [e.body["state"]["leg"] for e in entries if e.kind != "told"]
        steps = [after - before for before, after in pairwise(legs)]
        assert set(steps) <= {0, 1}  # each is left once, for the next one


def kept_what_was_said(own, lines):
    """What a process said to be decided is what the entries up to there say."""
    for run, last, *found in lines:
        if isinstance(last, int):
            history = replayed(own[run][:last])
            state = history.state
            assert found == [state.status, history.leg.name, state.turn]
    noted = {
        (run, e.body["key"], e.body["sink"])
        for run, entries in own.items()
        for e in entries
        if e.kind == "told"
    }
    delivered = [(run, key, sink) for run, key, sink, *_ in lines if isinstance(key, str)]
    assert {*delivered} <= noted


def told_once(own, site):
    """Every sink took every effect of the ledger, in one body, and none that it does not know."""
    rows = [e for entries in own.values() for e in entries]
    effects = [from_plain(Effect, one) for e in rows for one in e.body.get("effects", [])]
    known = {e.key: json.loads(json.dumps(message(e))) for e in effects}
    assert len(known) == len(effects)
    notes = [
        (e.body["key"], e.body["sink"], e.body.get("why", "")) for e in rows if e.kind == "told"
    ]
    for sink, file in zip(site.sinks, (site.got, site.folder / "commanded"), strict=True):
        got = [json.loads(line) for line in file.read_text().splitlines()]
        assert all(known[body["key"]] == body for body in got)
        noted = Counter(key for key, name, _ in notes if name == sink.name)
        assert noted == dict.fromkeys(known, 1)
        # a route that a later one makes void need not be sent any more
        void = {key for key, name, why in notes if name == sink.name and why}
        assert {*known} - void <= {body["key"] for body in got}


# in PostgreSQL in tests/slow: a store's own kills are tests/ledger's, in both
@pytest.mark.slow
@pytest.mark.parametrize("where", ["sqlite"], indirect=True)
def test_a_promotion_survives_every_kill(where, swift_path):
    said, kills = promotions(where, swift_path, KILLS, 31)

    assert kills >= KILLS
    nothing_is_lost_or_doubled(said, where, swift_path)


@pytest.mark.slow
def test_of_many_at_one_run_no_two_move_it_over_a_leg_and_none_after_a_rollback(where, swift_path):
    """Three promoters, each where it measures by itself, and people who approve and take back."""
    found = processes("raced", where, swift_path, 3, RACES, 32)

    with open_ledger(where, witness=swift_path / "head") as ledger:
        assert verify(ledger).problems == disagreements(ledger) == ()
        entries = {run: [*ledger.entries(run)] for run in ledger.runs()}
    for number, lines in enumerate(found["said"], start=1):
        site = Site(swift_path, number)
        own = of_contract(entries, site)
        ((run, rows),) = own.items()
        moved_as_allowed(rows)
        assert rows[0].run == run and replayed(rows).state.status == "rolled_back"
        kept_what_was_said(own, lines)
        told_once(own, site)


def moved_as_allowed(rows):
    """One leg at a time, each by one entry, and nothing but news after a rollback."""
    kinds = [e.kind for e in rows]
    assert kinds.count("opened") == kinds.count("rolled_back") == 1
    assert {*kinds[kinds.index("rolled_back") + 1 :]} <= {"told"}
    assert kinds.count("approved") <= 1
    legs = [e.body["state"]["leg"] for e in rows if e.kind != "told"]
    assert {after - before for before, after in pairwise(legs)} <= {0, 1}
