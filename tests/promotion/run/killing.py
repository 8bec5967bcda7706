# Promoters that are killed and continued: python -m tests.promotion.run.killing
#
# A program of its own, with one thread, as tests/promotion/ledger/processes.py is.  Anyone who
# promotes says a point at every turn of its work, and a line for whatever it takes to be
# decided; the kills fall a random time behind a random point.

import json
import os
import random
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from servanda.promotion.ledger.entry import LedgerError, Outrun
from servanda.promotion.ledger.ledger import open_ledger
from servanda.promotion.notify.base import KINDS, message
from servanda.promotion.notify.sinks import Command
from servanda.promotion.run import history as runs
from servanda.promotion.run.history import approve_run, roll_back_run
from servanda.promotion.run.outbox import deliver, deliver_late
from servanda.promotion.run.promoter import Build, promote
from servanda.promotion.state import Override
from servanda.runner.run import in_process
from tests import kit, serving
from tests.promotion.ledger.processes import drained, end_with, forked

STAGES = """\
promotion:
  offline: {prompt_groups: [32, 640]}
  shadow: {prompt_groups: [32, 640], share: 0.25}
  canary: {steps: [0.1, 0.5], prompt_groups: [32, 640], dwell: 60s, approval: required}
  full: {prompt_groups: [32, 640], sample: 0.5}
stable: {engine: table, model: p.json}
"""
LEGS = ("shadow", "canary-1", "canary-2", "full-1")
# how a promotion ends: through, by a person's hand at a leg or instead of an approval, or by
# another attempt, which is taken back once it has left offline
ENDS = ("completed", "canary-1", "fresh", "awaiting_approval", "completed", "shadow", "full-1")
RUN = "the run"  # in the log, until there is one
N = 192  # served requests of a leg
_DELAYS_S = (0.0005, 0.005, 0.05)
_REACH = 14  # points before a kill


class Site:
    """A contract of its own name, its run directory, and the log of what it serves."""

    def __init__(self, folder, number):
        self.folder, self.name = Path(folder) / f"toy-{number}", f"toy-{number}"
        self.end = ENDS[number % len(ENDS)]
        self.run = self.folder / "run"
        self.log, self.got = self.folder / "served.jsonl", self.folder / "got"
        self.path = self.folder / "toy.kernelcontract.yaml"

    def write(self):
        kit.write(self.folder, limit=0.2)
        text = self.path.read_text().replace("name: toy", f"name: {self.name}")
        self.path.write_text(text[: text.index("promotion:")] + STAGES)

    def serve(self, history, log):
        """What the same servers answer in this run: all legs at once, there or not."""
        whole = self.log.with_suffix(".partial")
        whole.write_text(log.replace(RUN, history.run))
        whole.replace(self.log)

    @property
    def sinks(self):
        program = f"sh -c 'row=$(cat); echo \"$row\" >> {self.folder}/commanded'"
        return Filed(self.got), Command(program)


class Filed:
    """A sink that appends what it is given to a file, and is sure of it."""

    name, kinds = "filed", KINDS

    def __init__(self, path):
        self._path = path

    def deliver(self, effect):
        row = json.dumps(message(effect)) + "\n"
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, row.encode())
            os.fsync(file)
        finally:
            os.close(file)


def clock():
    """A thousand times as fast as this machine's, and the same in every process of it."""
    return 1e6 + 1000 * time.monotonic()


def go(site, where, witness, told, log):
    """Promote a build until its end, from wherever the ledger says it stands."""
    while True:
        try:
            with open_ledger(where, witness=witness) as ledger:
                return Driver(site, ledger, told).go(log)
        except Outrun:
            pass  # by what a killed one had sent before it died: read again
        except LedgerError as error:
            if "lost" not in str(error) and "cannot be opened" not in str(error):
                raise


class Driver:
    """What `servanda promote`, `approve` and `rollback` do, one after the other."""

    def __init__(self, site, ledger, pipe):
        self.site, self.ledger, self.pipe = site, ledger, pipe

    def go(self, log):
        deliver_late(self.ledger, self.site.name, self.site.sinks, now=self.clock, wait=self.wait)
        if not self.site.log.exists():
            self.site.serve(self.promoted("offline"), log)
        while True:
            history = self.told(self.promoted())
            if not history.state.ended and self.meant(history):
                self.decided(
                    roll_back_run(
                        self.ledger, history, actor="Ada", reason="enough", now=self.clock()
                    )
                )
            elif history.state.status == "awaiting_approval":
                self.decided(
                    approve_run(self.ledger, history, actor="Ada", reason="well", now=self.clock())
                )
            elif history.state.ended or history.state.status == "completed":
                return

    def promoted(self, until=None):
        fresh = False
        if until is None:
            until, fresh = self.next()
        build = Build(self.site.path, self.site.run, (self.site.log,), fresh)
        return promote(
            build,
            self.ledger,
            actor="promoter",
            clock=self.clock,
            until=until or None,
            open=self.open,
            deadline=self.deadline,
            stepped=lambda step: self.told(self.decided(step.history)),
        )

    def next(self):
        """(until, fresh) of the next call."""
        end = self.site.end
        if end != "fresh":
            return (end.partition("-")[0] if end in LEGS else None), False
        own = self.own()
        if own[0].leg.stage != "canary":
            return "canary", False
        # what is begun twice before it is in the ledger is another attempt each time
        return "shadow", not own[0].state.ended

    def own(self):
        """The runs of its contract, in order."""
        return [
            s for s in runs.histories(self.ledger) if s.opened["contract"]["name"] == self.site.name
        ]

    def meant(self, history):
        """Whether a person takes the run back where it stands now."""
        end = self.site.end
        if end == "fresh":
            return history.state.key.attempt > 1 and history.leg.stage == "shadow"
        return end in (history.leg.name, history.state.status) and end != "completed"

    def decided(self, history):
        state = history.state
        said = [history.run, history.last, state.status, history.leg.name, state.turn]
        os.write(self.pipe, f"{json.dumps(said)}\n".encode())
        return history

    def told(self, history):
        for one in deliver(
            self.ledger, history.run, self.site.sinks, now=self.clock, wait=self.wait
        ):
            assert not one.problem, one
            said = [history.run, one.key, one.sink, one.why]
            os.write(self.pipe, f"{json.dumps(said)}\n".encode())
        return runs.refreshed(self.ledger, history)

    def point(self):
        os.write(self.pipe, b".\n")

    def clock(self):
        self.point()
        return clock()

    def open(self, kernel, side):
        self.point()
        return in_process(kernel, side)

    def deadline(self):
        self.point()
        return False

    def wait(self, seconds):
        raise AssertionError("no one is busy")


def first(folder, where, witness):
    """One that no one kills; what its servers answer, for all who follow."""
    site = Site(folder, 0)
    site.write()
    legs = (
        serving.rows(site.path, leg, N, run=RUN, seed=seed, at=1e6) for seed, leg in enumerate(LEGS)
    )
    log = "".join(f"{json.dumps(row)}\n" for rows in legs for row in rows)
    process, reads = forked(lambda told: go(site, where, witness, told, log))
    heard = drained(reads)
    os.waitpid(process, 0)
    assert b"!" not in heard, heard
    return log


def killed(folder, where, witness, kills, seed):
    """What each promotion's processes said before they were killed or through, and the kills."""
    rng, said, done = random.Random(seed), [], 0
    log = first(folder, where, witness)
    number = 0
    while done < kills:
        number += 1
        site = Site(folder, number)
        site.write()
        lines = []
        while True:
            delay = rng.uniform(0, rng.choice(_DELAYS_S))
            heard, ended = one(site, where, witness, rng.randint(0, _REACH), delay, log)
            lines += heard
            done += not ended
            if ended:
                break
        said.append(lines)
    return {"said": said, "kills": done}


def one(site, where, witness, reach, delay, log):
    """(the lines of one process, whether it came to its end before it was killed)."""

    def work(told):
        go(site, where, witness, told, log)
        os.write(told, b"through\n")

    process, reads = forked(work)
    heard, points = b"", 0
    while points < reach:
        more = os.read(reads, 4096)
        if not more:
            break
        heard += more
        points = heard.count(b".\n")
    else:
        time.sleep(delay)  # spreads the kills; nothing depends on how long it is
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    heard += drained(reads)
    assert b"!" not in heard, heard
    *lines, _ = heard.decode().split("\n")
    ended = "through" in lines
    return [json.loads(line) for line in lines if line[:1] == "["], ended


def raced(folder, where, witness, promoters, rounds, seed):
    """What promoters and two people said who were at one run at the same time, round by round.

    Each promoter measures in a folder of its own, as on a machine of its own.
    """
    rng, said = random.Random(seed), []
    log = first(folder, where, witness)
    for number in range(1, rounds + 1):
        site = Site(folder, number)
        site.write()
        with open_ledger(where, witness=witness) as ledger:
            quiet = os.open(os.devnull, os.O_WRONLY)
            site.serve(Driver(site, ledger, quiet).promoted("offline"), log)
        until = rng.choice(("shadow", "canary-1", "canary-2", "full-1", "completed"))
        works = [
            *(partial(promoting, number=number) for number in range(promoters)),
            approving,
            partial(taking_back, until=until, pause=rng.uniform(0, 0.05)),
        ]
        lines = together([partial(work, site, where, witness) for work in works])
        said.append([json.loads(line) for line in lines.decode().split("\n") if line[:1] == "["])
    return {"said": said}


def together(works):
    """What processes say that work at the same time; when one fails, all end."""
    children = [forked(work) for work in works]
    heard = {reads: b"" for _, reads in children}
    waiting = {*heard}
    while waiting and not any(b"!" in said for said in heard.values()):
        for reads in select.select([*waiting], [], [])[0]:
            more = os.read(reads, 4096)
            heard[reads] += more
            waiting -= set() if more else {reads}
    failed = [said for said in heard.values() if b"!" in said]
    for process, reads in children:
        if failed:
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(reads)
    assert not failed, failed
    return b"".join(heard.values())


def promoting(site, where, witness, told, number):
    """A promoter on a machine of its own; it promotes until a person took the run back."""
    site.run = shutil.copytree(site.run, site.folder / f"run-{number}")
    with open_ledger(where, witness=witness) as ledger:
        driver = Driver(site, ledger, told)
        while not driver.own()[0].state.ended:
            with suppress(Outrun):
                driver.told(driver.promoted(""))
        driver.told(driver.own()[0])


def approving(site, where, witness, told):
    """A person who says yes whenever that is asked, and waives what shows nothing."""
    with open_ledger(where, witness=witness) as ledger:
        driver = Driver(site, ledger, told)
        while not (history := driver.own()[0]).state.ended:
            now = driver.clock()
            try:
                if history.state.status == "awaiting_approval":
                    driver.decided(
                        approve_run(ledger, history, actor="Ada", reason="well", now=now)
                    )
                elif history.evaluations and not history.state.overrides:
                    given = Override("usable_ratio", "*", "Ada", "noise", now + 1e5)
                    driver.decided(runs.override_cell(ledger, history, given, now=now))
            except Outrun:
                pass
            time.sleep(0.002)


def taking_back(site, where, witness, told, until, pause):
    """A person who takes the run back, a while after it has come to a leg or its end."""
    with open_ledger(where, witness=witness) as ledger:
        driver = Driver(site, ledger, told)
        while not (history := driver.own()[0]).state.ended:
            if until in (history.leg.name, history.state.status):
                time.sleep(pause)
                try:
                    history = runs.refreshed(ledger, history)
                    now = driver.clock()
                    taken = roll_back_run(ledger, history, actor="Grace", reason="enough", now=now)
                    driver.told(driver.decided(taken))
                except Outrun:
                    continue
            time.sleep(0.002)


def main(what, folder, where, witness, *numbers):
    end_with(os.getppid())
    work = {"killed": killed, "raced": raced}[what]
    print(json.dumps(work(folder, where, Path(witness), *map(int, numbers))))


if __name__ == "__main__":
    main(*sys.argv[1:])
