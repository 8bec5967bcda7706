# A leader without a kernel: it stands as it is told, and remembers what it was asked.

import math
from dataclasses import replace

import msgspec

from servanda.errors import EvidenceError
from servanda.gateway.controller.status import (
    CellStatus,
    ControllerStatus,
    GatewayStatus,
    PoolStatus,
    ScoringStatus,
    SliceStatus,
    UnwatchedCell,
)
from servanda.gateway.routing.model import Pin, SliceRoute, Snapshot
from servanda.gateway.routing.router import Router
from servanda.gateway.routing.state import Transition
from servanda.judgement.slices.rules import Cut

NOW = 1_800_000_000.0
LIMIT, PRICE, LEAVE = 0.05, math.log(1000 * 6), math.log(20 * 6)


def cell(clause="tv-mean", value=0.012, log_evidence=-2.0, log_below=6.0, **more):
    known = {
        "limit": LIMIT,
        "unit": "",
        "interval": (0.8 * value, 1.2 * value),
        "floor": 0.0004,
        "log_alarm_price": math.log(10_000 * 6),
        "log_alarm": 1.0,
        "log_leave_price": LEAVE,
        "log_price": PRICE,
        "n": 188,
    }
    return CellStatus(
        clause, value=value, log_evidence=log_evidence, log_below=log_below, **(known | more)
    )


def slice_(name, status="active", *, log_evidence=-2.0, **more):
    known = {
        "since": NOW - 760,
        "share": 0.24,
        "served": {"infer": 9_800},
        "cells": (cell(log_evidence=log_evidence),),
        "keys": 41,
        "scored": 412,
        "sample": 0.01,
    }
    return SliceStatus(name, status, **(known | more))


def broken(name="long", **more):
    bad = cell(value=0.1727, log_evidence=9.1, log_below=-12.0, diverts="slice")
    known = {
        "status": "quarantined",
        "log_evidence": 9.1,
        "acts": True,
        "route": 0.0,
        "share": 0.06,
        "served": {"infer": 1_120, "stable": 380},
        "cells": (bad, cell("flips", value=0.229, log_evidence=3.0, limit=0.1)),
        "scored": 188,
        "keys": 27,
    }
    return slice_(name, **(known | more))


def status(**more):
    known = {
        "slices": (
            broken(),
            slice_("domain=code"),
            slice_("domain=prose", served={"infer": 8_000, "stable": 12}),
            slice_("all", share=1.0, served={"infer": 39_900, "stable": 1_400}, scored=1_912),
        ),
        "transitions": (
            transition(1, "active", "suspect", NOW - 900),
            transition(2, "suspect", "quarantined", NOW - 760),
        ),
        "moves": 2,
        "left_out": (UnwatchedCell("tail", "late", "its tokens are known only after the answer"),),
        "pools": {
            "infer": PoolStatus(12, 31, 64),
            "stable": PoolStatus(3, 9, 16),
        },
        "diverted": 0.06,
        "gateways": (gateway(),),
        "scoring": ScoringStatus(
            alive=True,
            queued=14,
            room=512,
            scored=1_912,
            missing=7,
            dropped=3,
            seconds=212.0,
            budget=0.5,
            lag_s=4.2,
            lags={"buckets": {"1": 10, "5": 30, "inf": 2}, "sum": 99.5},
            outside={"another kernel": 4},
        ),
        "made": NOW - 3.0,
        "began": NOW - 3_600,
        "ledger_where": "ledger/",
    }
    return ControllerStatus(
        **(
            {
                "name": "gateway-demo",
                "contract": "3982d4a0e1b2c3d4",
                "mode": "enforce",
                "now": NOW,
                "version": 17,
                "valid_until": NOW + 597,
            }
            | known
            | more
        )
    )


def transition(number, before, after, at=NOW, **more):
    known = {
        "acted": True,
        "reason": "tv-mean on long is above its limit",
        "cell": "tv-mean on long",
        "value": 0.1727,
        "limit": LIMIT,
        "log_evidence": 9.1,
        "log_price": PRICE,
        "n": 188,
        "keys": 27,
    }
    return Transition(number, at, "long", before, after, **(known | more))


def gateway(name="gateway-1", start=NOW - 4_000, **more):
    decisions = {
        "long\tinfer\tshare": 1_120,
        "long\tstable\tlong quarantined": 380,
        "domain=code\tinfer\tshare": 9_800,
        "all\tinfer\tshare": 20_000,
        "all\tstable\tno snapshot": 81,
    }
    counts = {
        "decisions": decisions,
        "launched": {"all": 41_300},
        "answers": {
            "long\tinfer": 1_100,
            "long\tstable": 400,
            "domain=code\tinfer": 9_800,
            "all\tinfer": 19_990,
            "all\tnone": 10,
        },
        "statuses": {"infer\t2xx": 30_890, "infer\t5xx": 20, "stable\t2xx": 400},
        "failovers": {"5xx": 20},
        "prompts": {"equal": 90, "other": 2},
        "refused_keys": {"gateway": 6},
        "observer_failed": {"capture": 3, "log": 0},
        "unsampled": {"stop": 7, "no max_tokens": 3},
        "overhead": {"buckets": {"0.0001": 5, "0.0002": 10, "1.0": 3, "inf": 1}, "sum": 2.5},
        "first_byte": {"infer": {"buckets": {"0.1": 7, "inf": 1}, "sum": 61.0}},
    }
    known = {"heard": NOW - 0.3, "version": 17, "taken": 412, "counts": counts}
    return GatewayStatus(name, start, **(known | more))


class Controller:
    """The attributes of controller.Controller."""

    leads, term = True, 3

    def __init__(self, now=None):
        self.now = now or status()
        self.asked = []
        self.refuse_reload = ""
        self.wait = None  # a call of it holds up anyone who follows

    def status(self):
        return self.now

    @property
    def snapshot(self):
        slices = tuple(
            SliceRoute(Cut(s.name, ()), status=s.status, share=s.route, acts=s.acts)
            for s in self.now.slices
        )
        at = self.now
        return Snapshot(at.version, at.contract, at.name, at.valid_until, "00" * 16, slices=slices)

    def decide(self, known):
        self.asked.append(("decide", known))
        return Router(self.snapshot).decide(known, now=NOW)

    def follow(self, message):
        if self.wait is not None:
            self.wait()
        if not isinstance(message.get("gateway"), str):
            raise EvidenceError("a message needs the name of its gateway", hint="send gateway")
        self.asked.append(("follow", message))
        return {"taken": message["first"] + len(message["rows"]), "version": 17, "snapshot": None}

    def pin(self, slice_, to, ttl_s=0.0, *, actor, reason):
        if to is None:
            return self._unpin(slice_, actor, reason)
        self.asked.append(("pin", slice_, to, ttl_s, actor, reason))
        self._change(slice_, pin=Pin(to, actor, reason, NOW + ttl_s))
        return (transition(3, "active", f"active, pinned to {to}", actor=actor, reason=reason),)

    def _unpin(self, slice_, actor, reason):
        self.asked.append(("unpin", slice_, actor, reason))
        if next(s for s in self.now.slices if s.name == slice_).pin is None:
            raise EvidenceError(
                f"{slice_} has no pin", hint="`servanda gateway status` shows the pins"
            )
        self._change(slice_, pin=None)
        return (transition(4, "active, pinned to stable", "active", actor=actor, reason=reason),)

    def route(self, route):
        self.asked.append(("route", msgspec.structs.asdict(route)))

    def reload(self):
        self.asked.append(("reload",))
        return self.refuse_reload

    def close(self):
        pass

    def _change(self, name, **what):
        slices = tuple(replace(s, **what) if s.name == name else s for s in self.now.slices)
        self.now = replace(self.now, slices=slices)
