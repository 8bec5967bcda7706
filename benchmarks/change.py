"""How often healthy runs are called changed, and how soon broken ones, by number of good runs.

python -m benchmarks.change [--write]     records of the experiment, and drawn runs; five minutes
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np

from benchmarks.experiment.alarms import HEALTHY, Firing, chosen
from benchmarks.experiment.change import ALPHA, good_run
from benchmarks.experiment.pictures import called
from benchmarks.experiment.record import Run, read_runs
from benchmarks.experiment.tables import markdown
from servanda.rl.trend.changes import GoodRun, Reference, RunChart

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "change.md"
ARMS = ("none", "tis", "mis")  # a healthy run is healthy under each
BROKEN = ("never_synced", "tied_head_stale", "one_mlp")
BLOCK, RESAMPLED, SEED = 5, 20, 20261125  # steps; runs per seed
DRAWN, STEPS, TIMES, GOOD = 400, 30, (1, 3, 10), (2, 4, 9)  # runs; steps of a good run

_TEXT = """\
# Has the gap changed?

A limit asks whether the gap between trainer and engine is harmful. A trend asks another question:
whether the gap has changed against runs that were good. A sync that begins to leave out one MLP
changes the gap at once, and harms much later or never.
[Monitor](../how-to/monitor.md#compare-a-run-with-good-runs) shows you how to use a trend. This page
states its promise, and what was measured.

## The statistic

A metric of a step (by default the logarithm of mean k3, and the logprob coverage) is compared with
the good runs: z = (x − mean) / standard deviation. Over the steps, S = max(0, S + min(z, 4) − 1)
adds up (a CUSUM, Page 1954). A lasting change of less than one standard deviation never counts, and
no single step counts for more than 3. The first step of each run is left out, both in the reference
and in the run: its weights are as the engine loaded them, and its gap is smaller than that of all
later steps.

## The promise

The threshold comes from whole runs. For each good run j, the mean and the standard deviation of the
*other* good runs are taken, and the largest S of run j under them. A run is called changed where S
is above 1.2 times that value for every j at once, in one metric. Among R + 1 runs that were made in
the same way (exchangeable), at most one is above all others in this sense. So with R good runs, a
healthy run is called changed with probability **at most 1 / (R + 1)**, for all metrics together,
whatever the dependence of its steps, their tails, and a drift that the good runs have too. The
promise covers as many steps as the shortest good run has. Beyond them a new change is a warning
and no violation, and every print says so; a change that was found before stays *violated*.

- Few good runs promise little: 1/3 with 2, 1/6 with 5, 1/20 with 19. So a gate needs nine: a
  contract whose `trend` is enforced refuses a reference of fewer, and `--reference` only warns.
- The promise is of all healthy runs. The quietest of several are called so by chance, and a later
  run is above them more often. A reference records how many healthy runs there were (`--recorded`).
  A selection promises nothing; a reference that does not state the number can only warn.
- The factor 1.2 makes the
  measured rate smaller than the promise. So does a least threshold, at which independent normal
  steps have a false alarm in {alpha:g} % of the runs.
- One good run promises nothing, because it shows no spread between runs. Its two halves take the
  place of two runs.
- Runs of another set-up (model, engine, precision, learning rate, batch size) are not exchangeable:
  a 4-bit engine needs its own reference. A reference of a noisier set-up would hide a change: where
  a metric of the first five steps is more than three times, and three standard deviations, below
  that of the good runs, its answer is *inconclusive*. A red metric from the first steps on has a
  note that the reference may be of another set-up; runs of other contracts are named.
- S lasts longer than a change does. The sentence of a violation names the step since which S rests
  on a change, the largest change in it, and the value now.
- If good runs drift over the training, their standard deviation is larger, and a change has to be
  larger to be found.
- All metrics share one threshold, so each metric that you add makes the others less sensitive.
- An e-detector (Shin, Ramdas and Rinaldo 2022) would promise a run length without good runs, but
  only against a declared bound on the mean of each step given the past. A few good runs do not show
  such a bound. Ranks of whole runs need none.

## Measured

On the recorded runs of [the experiment](experiment.md). The good runs are uncorrected healthy runs
of other seeds, in all combinations. The healthy runs are {recorded} recorded ones (five seeds;
without a correction, with TIS, with MIS), and {resampled} that are put together from blocks of
{block} steps of the recorded ones of a seed, each at its own place. Runs of one seed are alike, so
these rates are less certain than their counts suggest. The metric was chosen on the same records:
with the 99th percentile of |log ratio| added, 2 of 15 recorded healthy runs were called changed
with four good runs.

{table}

A cell of the last columns is the range of the first steps over seeds and combinations, with the
number of pairs in which the change is found if it is not found in all.

Drawn runs show the rate as a function of the length: {drawn} healthy runs a cell, each with its own
good runs of {length} steps. A step is 0.9 times the step before plus normal noise (strongly
correlated), on a level of each run's own. *Violated* is the answer that the promise is about;
*warned* also counts the changes that are found beyond the steps of the good runs.

{lengths}

`python -m benchmarks.change --write` writes this page.
"""


def resampled(runs: Sequence[Run], number: int) -> Iterator[GoodRun]:
    """Healthy runs from blocks of some runs of one seed, each at its own place."""
    rng = np.random.default_rng([SEED, runs[0].settings["seed"]])
    own = [good_run(run) for run in runs]
    size = len(own[0].steps)
    for n in range(number):
        begins = range(0, size, BLOCK)
        steps = [s for b in begins for s in own[rng.integers(len(own))].steps[b : b + BLOCK]]
        yield replace(own[0], source=f"resampled {n}", steps=tuple(steps))


def first(reference: Reference, run: GoodRun) -> int | None:
    """The first step at which a run is called changed."""
    chart = RunChart(reference)
    for step, values in run.steps:
        if any(cell.outcome == "violated" for cell in chart.add(step, values)):
            return step
    return None


def rows(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    good = {run.settings["seed"]: run for run in chosen(runs, HEALTHY, "none")}
    healthy = {s: [r for a in ARMS for r in chosen(runs, HEALTHY, a) if _is(r, s)] for s in good}
    drawn = {seed: [*resampled(own, RESAMPLED)] for seed, own in healthy.items()}
    for size in range(1, len(good)):
        found: dict[str, list[int | None]] = {}
        for seed in good:
            others = [good_run(run) for s, run in good.items() if s != seed]
            for of in combinations(others, size):
                reference = Reference.of(of, ALPHA)
                for run in healthy[seed]:
                    found.setdefault("recorded", []).append(first(reference, good_run(run)))
                for run in drawn[seed]:
                    found.setdefault("resampled", []).append(first(reference, run))
                for case in BROKEN:
                    own = [r for r in chosen(runs, case, "none") if _is(r, seed)]
                    found.setdefault(case, []).extend(first(reference, good_run(r)) for r in own)
        promise = reference.detector.false_alarms
        yield (
            str(size),
            "none" if promise is None else f"1/{size + 1}",
            *(_rate(found[name]) for name in ("recorded", "resampled")),
            *(str(Firing(tuple(found[case]), 0, 0)) for case in BROKEN),
        )


def drawn(rng: np.random.Generator, steps: int) -> GoodRun:
    """A healthy run whose steps are strongly correlated."""
    x, found = rng.normal() / np.sqrt(1 - 0.81), [(0, {"k3_nats": 1e-3})]
    level = rng.normal()
    for step in range(1, steps + 1):
        x = 0.9 * x + rng.normal()
        found.append((step, {"k3_nats": 1e-3 * float(np.exp((x + level) / 10))}))
    return GoodRun("drawn", "", tuple(found))


def lengths() -> Iterator[tuple[str, ...]]:
    """Of healthy runs longer than their good runs, those called changed."""
    for good in GOOD:
        rng, red, warned = np.random.default_rng([SEED, good]), dict[int, int](), dict[int, int]()
        for _ in range(DRAWN):
            reference = Reference.of([drawn(rng, STEPS) for _ in range(good)], ALPHA)
            chart, at, all_ = RunChart(reference), [], []
            for step, values in drawn(rng, STEPS * max(TIMES)).steps:
                (cell,) = chart.add(step, values)
                all_ += [step] if (cell.value or 0) > 1 else []
                at += [step] if cell.outcome == "violated" else []
            for times in TIMES:
                for found, steps in ((red, at), (warned, all_)):
                    early = bool(steps) and steps[0] <= times * STEPS
                    found[times] = found.get(times, 0) + early
        for times in TIMES:
            shares = (f"{100 * found[times] / DRAWN:.1f} %" for found in (red, warned))
            yield (str(good), f"1/{good + 1}", f"x {times}", *shares)


def _is(run: Run, seed: int) -> bool:
    return run.settings["seed"] == seed


def _rate(found: Sequence[int | None]) -> str:
    red = sum(step is not None for step in found)
    return f"{100 * red / len(found):.1f} % ({red:,} of {len(found):,})"


def page(runs: Sequence[Run]) -> str:
    head = (
        *("good runs", "promise", "recorded healthy runs called changed"),
        *("resampled healthy runs called changed", *(map(called, BROKEN))),
    )
    seeds = len(chosen(runs, HEALTHY, "none"))
    return _TEXT.format(
        recorded=sum(len(chosen(runs, HEALTHY, arm)) for arm in ARMS),
        resampled=seeds * RESAMPLED,
        block=BLOCK,
        alpha=100 * ALPHA,
        table=markdown(head, [*rows(runs)]),
        drawn=DRAWN,
        length=STEPS,
        lengths=markdown(
            ("good runs", "promise", "length of the run", "violated", "warned"), [*lengths()]
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    text = page(read_runs())
    if parser.parse_args().write:
        PAGE.write_text(text, encoding="utf-8")
        print(f"wrote {PAGE}")
    else:
        print(text)


if __name__ == "__main__":
    main()
