# Leaders for tests: a contract on table kernels, rows that its infer kernel answered, messages
# as a gateway sends them, and a clock that is turned by hand.

from pathlib import Path

from servanda.engines import open_engine
from servanda.gateway.controller.controller import Controller
from servanda.gateway.controller.store import open_store
from tests import kit, serving

LABELS = {"a": {"first": "a"}, "b": {"first": "b"}, "c": {"first": "c"}}
SLICES = "slices: [{name: first, split: labels.first}]"
ACTING = """\
routing: {mode: enforce, stable_in_flight: 100, min_users: 5, enter_evidence: 100,
  most_diverted: 0.6, dwell: 60s}
escalation:
  - {when: {section: statistical, is: violated}, do: [{divert: slice}, {page: oncall}]}
"""
OBSERVING = """\
routing: {min_users: 5, enter_evidence: 100, most_diverted: 0.6, stable_in_flight: 100}
"""
# infer is what train is, but after an "a": there it moves a tenth of the mass
SOUND = {"": kit.BASE}
FAULTY = {"": kit.BASE, "a": kit.moved(kit.BASE, 0.3)}
NEARLY = {"": kit.moved(kit.BASE, 0.002)}
START = 1000.0


class Clock:
    """Unix seconds that go on when they are told to."""

    def __init__(self, now=START):
        self.now = now

    def __call__(self):
        return self.now


def here(kernel, _side):
    return open_engine(kernel)


def contract(folder, *, q=None, routing=OBSERVING, limit=0.05, **more):
    path, _ = kit.write(
        folder, q=q or NEARLY, slices=SLICES, more=routing, limit=limit, width=6, **more
    )
    return path


def controller(path, clock, *, state="state", ledger="ledger.db", **more):
    """A leader that does nothing by itself, on engines in this process."""
    folder = Path(path).parent
    place = state if "://" in state else folder / state
    more = {"open": here, "threads": False, "key": b"", **more}
    ledger = str(folder / ledger) if ledger and "://" not in ledger else ledger
    return Controller(
        path, store=lambda: open_store(place, "toy"), ledger=ledger, clock=clock, **more
    )


def rows(path, n, *, seed=0, users=40, kernel=None, start=0, at=START, prompts=None, **more):
    """n sampled rows as a gateway sends them, one a tenth of a second."""
    made = serving.rows(
        path, "gateway", n, seed=seed, kernel=kernel, start=start, prompts=prompts, run="toy"
    )
    return [
        {**row, "at": at + i / 10, "key": f"user-{(start + i) % users}", "x-chance": 1.0, **more}
        for i, row in enumerate(made)
    ]


def message(rows, *, first=0, gateway="g1", start=1.0, version=0, **counts):
    """A message of a gateway, with traffic that stable has room for."""
    seen = first + len(rows)
    names = ("all", "first=a", "first=b", "first=c")
    share = {"all": seen, **dict.fromkeys(names[1:], seen / 3)}
    return {
        "gateway": gateway,
        "start": start,
        "version": version,
        "first": first,
        "rows": rows,
        "counts": {
            "decisions": {f"{name}\tinfer\tshare": n for name, n in share.items() if name != "all"},
            "launched": share,
            "peak": {"infer": 3, "stable": 1},
            "slice_in_flight": dict.fromkeys(names, 1.0),
            **counts,
        },
    }


def drive(leader, clock, rows, *, batch=16, first=0, **more):
    """Send rows in messages of some, and let the leader do all there is to do after each."""
    leader.follow(message([], first=first, **more))
    for i in range(0, len(rows), batch):
        part = rows[i : i + batch]
        clock.now = max(clock.now, part[-1]["at"]) + 1
        leader.follow(message(part, first=first + i, **more))
        while leader.step():
            pass


def status(leader, name):
    return next(one for one in leader.status().slices if one.name == name)
