# Faults x checks, on records that are written out by hand.

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.experiment import alarms
from benchmarks.experiment.alarms import BEFORE, HEALTHY
from benchmarks.experiment.guards import FIELD, measure
from benchmarks.experiment.record import Run, name_of

QUIET = measure([[-1.0, -2.0]], [[-1.0, -2.0]], [[1, 1]])
LOUD = measure([[-5.0, -6.0]], [[-0.5, -1.5]], [[1, 1]])


def run(fault, arm, seed, loud_from, *, violated_from=None, drill=None, steps=12):
    """A run that is quiet until a step, and then 4.5 nats off; the monitor has its own."""
    found = [LOUD if step >= loud_from else QUIET for step in range(steps)]
    columns = {name: [step[name] for step in found] for name in QUIET}
    outcomes = ["violated" if s >= (violated_from or 0) else "holds" for s in range(steps)]
    return Run(
        name_of(fault, "bfloat16", arm, seed),
        {"fault": fault, "engine": "bfloat16", "arm": arm, "seed": seed, "steps": steps},
        steps={"step": list(range(steps)), **columns},
        monitor=[] if violated_from is None else [{"outcome": o} for o in outcomes],
        preflight={} if drill is None else {"outcome": drill, "seconds": 2.0},
    )


RUNS = [
    run(HEALTHY, "none", 0, 99, violated_from=99),
    run(HEALTHY, "none", 1, 11),
    run(HEALTHY, "contract", 0, 99, violated_from=99, drill="holds"),
    run("one_mlp", "none", 1, 6),
    run("one_mlp", "none", 0, 4, violated_from=5),
    run("one_mlp", "none", 2, 99),
    run("one_mlp", "contract", 0, 99, violated_from=99, drill="violated"),
    run("never_synced", "none", 0, 2),
]


def test_a_check_is_shown_by_its_first_step_on_each_seed():
    first = alarms.firings(RUNS)["slime"]["one_mlp"]

    assert first.first == (4, 6, None)
    assert str(first) == "4-6 (2 of 3)"


def test_false_alarms_are_counted_in_steps_and_runs():
    assert alarms.firings(RUNS)["slime"][HEALTHY].alarms == "1 of 24 steps, 1 of 2 runs"


def test_the_monitor_is_read_from_the_same_runs_as_the_field():
    told = alarms.firings(RUNS)["monitor"]

    assert (told["one_mlp"].first, told[HEALTHY].alarms) == ((5,), "0 of 12 steps")
    assert told["never_synced"] is None


def test_the_preflight_test_comes_before_the_first_step():
    told = alarms.firings(RUNS)["drill"]

    assert (told["one_mlp"].first, str(told["one_mlp"])) == ((BEFORE,), "before 0")
    assert told[HEALTHY].alarms == "0 of 1 tests"


def test_a_monitored_run_whose_records_disagree_is_an_error():
    short = run("one_mlp", "none", 0, 4, violated_from=5)
    short.monitor.pop()

    with pytest.raises(ValueError, match="shorter"):
        alarms.GUARDS["monitor"].fires(short)


def test_cases_come_in_the_order_of_the_catalogue():
    four_bits = run(HEALTHY, "none", 0, 99)
    four_bits = replace(four_bits, settings={**four_bits.settings, "engine": "int4_g32"})

    found = alarms.cases_of([*RUNS, four_bits])

    assert found == [HEALTHY, "never_synced", "one_mlp", f"{HEALTHY} int4_g32"]
    assert alarms.chosen([*RUNS, four_bits], HEALTHY, "none") == RUNS[:2]


def test_a_spread_that_is_not_on_record_follows_from_what_is():
    kept = run(HEALTHY, "none", 0, 6)
    wanted = kept.steps["is_std"]
    steps = {name: column for name, column in kept.steps.items() if name != "is_std"}

    found = [step["is_std"] for step in alarms.steps_of(replace(kept, steps=steps))]

    assert found == pytest.approx(wanted, abs=1e-7)


def test_a_check_whose_statistic_is_not_on_record_is_not_quiet_but_absent():
    kept = run(HEALTHY, "none", 0, 6)
    steps = {name: column for name, column in kept.steps.items() if name != "k3"}

    assert alarms.GUARDS["prime-rl"].fires(replace(kept, steps=steps)) is None


def test_every_statistic_that_a_check_reads_is_measured():
    assert {bar.reads for guard in FIELD.values() for bar in guard.bars} <= set(QUIET)


def test_checks_fire_alike_on_a_run_and_on_its_arrays():
    rng = np.random.default_rng(3)
    infer = -rng.exponential(1.0, (12, 8, 20))
    train = infer - np.linspace(0, 1, 12)[:, None, None] * rng.random((8, 20))
    steps = [measure(p, q, np.ones((8, 20))) for p, q in zip(train, infer, strict=True)]
    columns = {name: [step[name] for step in steps] for name in QUIET}
    kept = Run("", {}, steps={"step": [*range(12)], **columns})

    for name in FIELD:
        assert alarms.GUARDS[name].fires(kept) == FIELD[name].fires(steps)
