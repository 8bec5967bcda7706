# Processes that append to one ledger and are killed, or race:
# python -m tests.promotion.ledger.processes
#
# A program of its own, with one thread: it imports the ledger once and forks, which costs a
# hundredth of starting Python each time.

import ctypes
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from servanda.promotion.ledger.entry import LedgerError, Outrun, Record
from servanda.promotion.ledger.ledger import open_ledger

_MOST_BYTES = 25  # of acknowledgements before a kill: up to five appends
_PR_SET_PDEATHSIG = 1  # of Linux's <sys/prctl.h>
_DELAYS_S = (0.0005, 0.005, 0.03)  # behind the last byte: a part of one append, one, or a few


def record(mark):
    return Record("advanced", "ci", 1.0, {"mark": mark})


def append_for_ever(where, witness, run, child, told):
    """One batch after another; each is sent once it is acknowledged."""
    batch = 0
    while True:
        try:
            with open_ledger(where, witness=witness) as ledger:
                after = max((e.n for e in ledger.entries(run)), default=0)
                while True:
                    marks = [f"{child}.{batch}.{i}" for i in range(1 + batch % 3)]
                    batch += 1
                    kept = ledger.append(run, [record(mark) for mark in marks], after=after)
                    after = kept[-1].n
                    os.write(told, f"{child}.{batch - 1} ".encode())
        except Outrun:
            pass  # by what a killed one had sent before it died: read again
        except LedgerError as error:
            if "lost" not in str(error) and "cannot be opened" not in str(error):
                raise


def end_with(parent):
    """Be killed when this parent is: a test that is stopped leaves no one who works on."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # gone before it could be said
            os._exit(1)


def forked(work, ours=()):
    """(process id, the end of a pipe that it writes to) of a child that does the work.

    `ours` are pipes of this process alone: anyone who holds an end of one keeps it from ending.
    """
    reads, writes = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child:
        os.close(writes)
        return child, reads
    end_with(parent)
    for pipe in (reads, *ours):
        os.close(pipe)
    try:
        work(writes)
        os._exit(0)
    except BaseException as error:
        os.write(writes, f"!{type(error).__name__}: {error}".encode())
        os._exit(1)


def drained(reads):
    with os.fdopen(reads, "rb") as pipe:
        return pipe.read()


def heard(reads, most):
    """Up to so many bytes of a child that is well."""
    said = os.read(reads, most)
    assert said and b"!" not in said, said + drained(reads)
    return said


def killed(where, witness, kills, seed):
    """The batches that were acknowledged by children that were killed, one after the other."""
    rng, acknowledged = random.Random(seed), []
    for child in range(kills):
        reach, delay = rng.randint(0, _MOST_BYTES), rng.uniform(0, rng.choice(_DELAYS_S))
        process, reads = forked(
            lambda told, child=child: append_for_ever(where, witness, "run", child, told)
        )
        said = b""
        while len(said) < reach:
            said += heard(reads, reach - len(said))
        time.sleep(delay)  # spreads the kills over one write; nothing depends on how long it is
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        said += drained(reads)
        assert b"!" not in said, said
        acknowledged += said.decode().split()
    return acknowledged


def terminated(where, witness, kills, seed):
    """The same with the server's side killed under one child that opens the ledger again."""
    import psycopg

    rng = random.Random(seed)
    process, reads = forked(lambda told: append_for_ever(where, witness, "run", 0, told))
    said = b""
    with psycopg.connect(where, autocommit=True) as db:
        for _ in range(kills):
            reach = len(said) + rng.randint(0, _MOST_BYTES)
            while len(said) < reach:
                said += heard(reads, reach - len(said))
            time.sleep(rng.uniform(0, rng.choice(_DELAYS_S)))
            db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name = 'servanda'"
            )
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    said += drained(reads)
    return said.decode().split()


def raced(where, witness, processes, rounds, shared):
    """For each process, a letter a round: w for won, l for lost.

    All append at once, to one run behind the same entry, or each to a run of its own.
    """
    children, ours = [], []
    for child in range(processes):
        waits, opens = os.pipe()
        ours.append(opens)
        run = "one" if shared else f"own {child}"

        def work(told, child=child, waits=waits, run=run):
            with open_ledger(where, witness=witness) as ledger:
                for turn in range(rounds):
                    os.write(told, b".")
                    if not os.read(waits, 1):
                        return  # anyone who asked is gone
                    try:
                        ledger.append(run, [record(f"{child}.{turn}")], after=turn)
                        os.write(told, b"w")
                    except Outrun:
                        os.write(told, b"l")

        process, reads = forked(work, ours)
        ours.append(reads)
        children.append((process, reads, opens))
        os.close(waits)
    results = [""] * processes
    for _ in range(rounds):
        for _, reads, _ in children:
            assert heard(reads, 1) == b"."
        for _, _, opens in children:
            os.write(opens, b"g")
        for i, (_, reads, _) in enumerate(children):
            results[i] += heard(reads, 1).decode()
    for process, _, _ in children:
        os.waitpid(process, 0)
    return results


def main(what, where, witness, *numbers):
    end_with(os.getppid())
    work = {"killed": killed, "terminated": terminated, "raced": raced}[what]
    print(json.dumps(work(where, Path(witness), *map(int, numbers))))


if __name__ == "__main__":
    main(*sys.argv[1:])
