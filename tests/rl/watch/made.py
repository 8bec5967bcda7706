# Made steps: what a watch sees, lines of a monitor, dumps that grow, and a watch with its clock.

import json
from contextlib import suppress

import numpy as np

from servanda.judgement.clauses.base import CellVerdict
from servanda.rl.watch.dump import WatchOptions
from servanda.rl.watch.loop import WatchLoop
from servanda.rl.watch.open import DetectedSource
from servanda.rl.watch.state_file import StateFile
from servanda.rl.watch.step import WatchedStep
from tests.rl.dumps import made as dumps

LIMIT = 0.025


def cell(outcome="holds", slice_="all", value=0.01, **more):
    how = {"enforced": True, "kind": "certificate", "n": 1000, "limit": LIMIT, **more}
    clause, metric = how.pop("clause", "gradient"), how.pop("metric", "tv")
    return CellVerdict(
        clause,
        how.pop("section", "statistical"),
        metric,
        "mean",
        slice_,
        outcome,
        value=value,
        interval=(0.8 * value, 1.2 * value),
        **how,
    )


def seen(step, outcome="holds", *cells, **more):
    return WatchedStep(step, outcome, cells or (cell(outcome),), 1000, 10, **more)


def state_line(weights, outcome="holds", *, tv=0.01, cells=None, **more):
    """A line as a monitor writes it."""
    whole = {
        "clause": "gradient",
        "slice": "all",
        "metric": "tv",
        "aggregate": "mean",
        "outcome": outcome,
        "value": tv,
        "low": 0.9 * tv,
        "high": 1.1 * tv,
        "limit": LIMIT,
        "threshold": None,
        "n": 5000,
        "missing": 0,
        "enforced": True,
    }
    finite = {
        **whole,
        "clause": "finite",
        "metric": "usable_ratio",
        "outcome": "holds",
        "value": 1.0,
        "low": None,
        "high": None,
        "limit": 0.999,
    }
    line = {
        "schema": 2,
        "generation": 0,
        "weights": weights,
        "step": weights,
        "at": 1000.0 + weights,
        "name": "rollout",
        "contract": "0123abcd",
        "outcome": outcome,
        "action": [],
        "would": [],
        "cause": "",
        "tokens": 5000,
        "judged": 5000,
        "needs_tokens": None,
        "sequences": 50,
        "cells": [whole, finite, *(cells or [])],
        "metrics": {"servanda/staleness/max": 1.0},
        "groups": [[500 * tv, 500]] * 10,
        **more,
    }
    return json.dumps(line) + "\n"


def step(folder, number, seed=None, **how):
    """One step of a dump of our own format."""
    rng = np.random.default_rng(number if seed is None else seed)
    how = {"n": 24, **how}
    dumps.store(dumps.Writer(folder), dumps.rollouts(rng, number, how.pop("n"), **how))


class Out:
    """What was printed, and a wait that plays a script of what happens meanwhile.

    When the script is over, the watch is interrupted as by Ctrl-C.
    """

    def __init__(self, *script):
        self.lines, self.waits, self._script = [], [], [*script]

    def say(self, text):
        self.lines.append(text)

    def wait(self, seconds):
        self.waits.append(seconds)
        if not self._script:
            raise KeyboardInterrupt
        self._script.pop(0)()

    @property
    def steps(self):
        return [line.split()[1] for line in self.lines if line.startswith("step ")]

    @property
    def alerts(self):
        return [
            line.strip() for line in self.lines if line.startswith("  ") and "step " in line[:9]
        ]

    def count(self, text):
        return sum(text in line for line in self.lines)


def following(path, out, *, state=None, asked=None, **how):
    source = DetectedSource(WatchOptions(path, **(asked or {})))
    kept = StateFile(state, path)
    return WatchLoop(source, str(path), kept, out.say, wait=out.wait, now=lambda: 5.0, **how)


def run(path, out, **how):
    """Follow until the script is over; returns the watch."""
    watch = following(path, out, **how)
    with suppress(KeyboardInterrupt):
        watch.run()
    return watch
