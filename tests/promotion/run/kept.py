# A ledger in memory, and sinks that fail as they are told to.

from collections import deque

from servanda.errors import MeasurementError
from servanda.promotion.ledger.entry import Entry, Outrun
from servanda.promotion.notify.base import KINDS
from servanda.promotion.notify.http_post import Busy
from servanda.traces.serialization import to_plain

RUN = "llama-int8-3f9a"


class Killed(BaseException):
    """The process ended here."""


class Kept:
    """A ledger.  Before each append by `tell` the next of `fates` happens, if one is left."""

    def __init__(self):
        self.written, self.fates = [], deque()

    def append(self, run, records, *, after):
        fate = self.fates.popleft() if self.fates else None
        if fate == "killed before":
            raise Killed
        if callable(fate):
            fate()
        made = self._append(run, records, after=after)
        if fate == "killed behind":
            raise Killed
        return made

    def _append(self, run, records, *, after):
        n = len([*self.entries(run)])
        if n != after:
            raise Outrun(f"{run} has {n} entries, and not {after}")
        seq = len(self.written)
        made = tuple(
            Entry(seq + i, run, n + i, r.at, r.actor, r.kind, to_plain(r.body), "", "")
            for i, r in enumerate(records, 1)
        )
        self.written += made
        return made

    def entries(self, run=None, *, since=0):
        return iter([e for e in self.written if e.seq > since and run in (None, e.run)])

    def runs(self):
        return tuple(dict.fromkeys(e.run for e in self.written))

    def decide(self, *effects, run=RUN):
        """Somebody writes down a decision with these effects."""
        seq, n = len(self.written) + 1, len([*self.entries(run)]) + 1
        body = {"effects": to_plain(list(effects))}
        self.written.append(Entry(seq, run, n, 0.0, "somebody", "advanced", body, "", ""))

    def hear(self, effect, sink):
        """Somebody else notes that it is told."""
        self.decide()
        last = self.written[-1]
        body = {"key": effect.key, "sink": sink}
        self.written[-1] = Entry(last.seq, RUN, last.n, 0.0, "other", "told", body, "", "")

    @property
    def told(self):
        """(key, sink, why) of each entry, in order."""
        bodies = [e.body for e in self.written if e.kind == "told"]
        return [(b["key"], b["sink"], b.get("why", "")) for b in bodies]


class Taker:
    """A sink.  Each try meets the next of `fates`, if one is left; `got`: what it took."""

    def __init__(self, name="sink", *fates, kinds=KINDS, before=None):
        self.name, self.kinds, self.fates = name, kinds, deque(fates)
        self.got, self.tried, self.before = [], [], before

    def deliver(self, effect):
        fate = self.fates.popleft() if self.fates else "taken"
        if self.before:
            self.before(effect)
        self.tried.append(effect.key)
        if fate == "killed before":
            raise Killed
        if fate == "busy":
            raise Busy(f"{self.name}: status 503")
        if fate == "refused":
            raise MeasurementError(f"{self.name}: status 404")
        self.got.append(effect.key)
        if fate == "killed behind":
            raise Killed
