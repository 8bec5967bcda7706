# A leader that is killed: a child that follows one gateway's rows, and the one who kills it.

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from servanda.gateway.controller.ledger_history import gateway_runs, run_problems
from servanda.gateway.controller.store import FILE, Sample, is_server
from servanda.promotion.ledger.ledger import open_ledger

CHILD = "from tests.gateway.controller.killed import child; import sys; child(*sys.argv[1:])"
ROOT = Path(__file__).parents[3]


def child(path, rows):
    """Send rows as a gateway does, from what is durable on; a line for every step."""
    from tests.gateway.controller import controllers

    rows = json.loads(Path(rows).read_text())
    clock = controllers.Clock()
    leader = controllers.controller(Path(path), clock)
    taken = leader.follow(controllers.message([], first=0))["taken"]
    while taken < len(rows):
        part = rows[taken : taken + 8]
        clock.now = max(clock.now, part[-1]["at"])
        taken = leader.follow(controllers.message(part, first=taken))["taken"]
        leader.step()
        print(taken, flush=True)
    while leader.step():
        pass
    leader.close()
    print("done", flush=True)


def survived(path, rows, kills, seed):
    """Kill the child so many times, let the last one end; the child's last line each time."""
    file = path.parent / "rows.json"
    file.write_text(json.dumps(rows))
    rng, said = random.Random(seed), []
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    for kill in range(kills + 1):
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            cwd=ROOT,
        )
        steps = rng.randrange(1, 6) if kill < kills else 10**9
        last = ""
        for line in process.stdout:
            last, steps = line.strip(), steps - 1
            if not steps:
                # somewhere in the step after it
                for _ in range(rng.randrange(20_000)):
                    pass
                process.send_signal(signal.SIGKILL)
                break
        process.stdout.close()
        error = process.stderr.read()
        process.stderr.close()
        process.wait()
        assert process.returncode in (0, -signal.SIGKILL), error
        said.append(last)
        if last == "done":
            break
    return said


def samples(path):
    """(slice, clause, at) of what was counted, in order; each request once."""
    return [(s.at, s.slice, s.clause) for s in stored_samples(path.parent / "state")]


def stored_samples(place):
    """The samples of a store, the oldest first."""
    if is_server(place):
        import psycopg

        query = "SELECT * FROM servanda_leader_samples ORDER BY id"
        with psycopg.connect(place) as db:
            return [Sample(*row[2:]) for row in db.execute(query)]
    with closing(sqlite3.connect(place / FILE)) as db:
        return [Sample(*row[1:]) for row in db.execute("SELECT * FROM samples ORDER BY id")]


def ledger(path):
    """Kinds of the entries, and what is wrong with them."""
    with open_ledger(str(path.parent / "ledger.db"), reading=True, key=b"") as found:
        wrong = [str(p) for run in gateway_runs(found) for p in run_problems(found.entries(run))]
        return [entry.kind for entry in found.entries()], wrong
