# What is told of a run, and how often.

import json
from dataclasses import asdict

import msgspec
import pytest

from servanda.judgement.breakdown import Advice
from servanda.judgement.clauses.base import ORDER
from servanda.rl.steps.drift import Trend
from servanda.rl.watch.loop import MOST, last_line, placed, series, step_line
from servanda.rl.watch.transitions import CALM, WatchState, advance
from tests.rl.watch.made import cell, seen


def told(steps, memory=None):
    """(step, kind) of every alert, and the memory behind them."""
    memory, found = memory or WatchState(), []
    for each in steps:
        memory, alerts = advance(memory, each)
        found += [(alert.step, alert.kind) for alert in alerts]
    return found, memory


def outcomes(text):
    names = {"h": "holds", "v": "violated", "i": "inconclusive", "e": "error"}
    return [seen(i + 1, names[c], why="broken" if c == "e" else "") for i, c in enumerate(text)]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("hhhh", []),
        ("hhv", [(3, "violated")]),
        ("vvvv", [(1, "violated")]),
        ("vhhh", [(1, "violated"), (4, "holds")]),
        ("vhhvhhh", [(1, "violated"), (7, "holds")]),
        ("vhvhvhvh", [(1, "violated")]),
        ("vhihh", [(1, "violated"), (5, "holds")]),
        ("viiiiiii", [(1, "violated")]),
        ("vhhhv", [(1, "violated"), (4, "holds"), (5, "violated")]),
        ("hehhh", [(2, "error"), (5, "measured again")]),
        ("eheheh", [(1, "error")]),
        ("vehhh", [(1, "violated"), (2, "error"), (5, "holds"), (5, "measured again")]),
        ("iiii", []),
    ],
)
def test_a_transition_is_told_once_and_flapping_is_one(run, expected):
    assert told(outcomes(run))[0] == expected


def test_every_order_of_outcomes_alternates_what_is_raised_and_lowered():
    """Whatever happens, no one is told twice of the same thing in a row."""
    import itertools

    for run in itertools.product("hvie", repeat=6):
        kinds = [kind for _, kind in told(outcomes(run))[0]]
        for up, down in (("violated", "holds"), ("error", "measured again")):
            pair = [kind for kind in kinds if kind in (up, down)]
            assert pair == [(up, down)[i % 2] for i in range(len(pair))]
    assert set(ORDER) == {"holds", "violated", "inconclusive", "error"}


def sliced(step, **of):
    """A step whose slices have these outcomes."""
    cells = [cell(o, name, 0.05 if o == "violated" else 0.01) for name, o in of.items()]
    outcome = "violated" if "violated" in of.values() else "holds"
    return seen(step, outcome, cell("holds"), *cells)


def test_slices_that_redden_with_the_run_are_one_alert_and_later_ones_their_own():
    steps = [
        sliced(1, a="holds", b="holds"),
        sliced(2, a="violated", b="holds"),
        sliced(3, a="violated", b="violated"),
        *(sliced(i, a="violated", b="holds") for i in (4, 5, 6)),
        *(sliced(i, a="holds", b="holds") for i in (7, 8, 9)),
    ]

    found, memory = told(steps)

    assert found == [(2, "violated"), (3, "slice red"), (6, "slice recovered"), (9, "holds")]
    assert not memory.flags and memory.stop == 2


def test_an_alert_carries_slice_number_interval_limit_n_cause_and_command():
    step = seen(
        7,
        "violated",
        cell("holds"),
        cell("violated", "start-2", 0.05, n=123),
        advice=Advice("", "tool boundaries"),
        command="servanda check runs --steps 7 --mask masks",
    )

    _, (alert,) = advance(WatchState(), step)

    assert alert.lines() == [
        "step 7: violated on first 3 tokens of turn 2",
        "mean total variation (tv), first 3 tokens of turn 2: "
        "0.05 [0.04, 0.06], limit 0.025, n 123",
        "Likely cause: tool boundaries",
        "Next command: servanda check runs --steps 7 --mask masks",
        "would have stopped at step 7",
    ]
    assert (alert.slice, alert.value, alert.limit, alert.n) == ("start-2", 0.05, 0.025, 123)


def coverage(step, outcome, value):
    guard = cell(
        outcome,
        value=value,
        clause="finite",
        metric="usable_ratio",
        section="observability",
        limit=0.999,
    )
    bad = outcome == "error"
    return seen(step, outcome, cell("inconclusive" if bad else "holds"), guard, why="half is NaN")


def test_lost_coverage_is_told_as_such_and_not_as_an_error_besides():
    run = [coverage(1, "holds", 1.0), coverage(2, "error", 0.5), coverage(3, "error", 0.5)]
    run += [coverage(i, "holds", 1.0) for i in (4, 5, 6)]

    found, _ = told(run)

    assert found == [(2, "coverage lost"), (6, "coverage back")]


def test_a_trend_is_told_where_it_is_certain_and_taken_back_where_it_is_small():
    def at(step, ratio, low):
        return seen(step, trend=Trend(ratio, (low, 2 * ratio), 5))

    run = [at(1, 2.5, 0.9), at(2, 2.1, 1.2), at(3, 1.7, 1.1), at(4, 3.0, 2.0)]
    run += [at(i, 1.2, 1.0) for i in (5, 6, 7)]

    assert told(run)[0] == [(2, "trend beyond x2"), (7, "trend back")]


def test_a_warning_or_a_monitored_clause_stops_nothing_and_halt_does():
    shown = seen(1, "holds", cell("holds"), cell("violated", enforced=False))
    halted = seen(2, "holds", cell("holds"), actions=("page", "halt"))

    _, memory = told([shown])
    assert memory.stop is None
    _, memory = told([halted], memory)
    assert (memory.stop, memory.stop_why) == (2, "the contract's escalation says halt")


def test_the_first_step_that_would_have_stopped_stays_the_first():
    _, memory = told(outcomes("hvhhhv"))
    assert memory.stop == 2
    assert memory.stop_why == "an enforced clause was violated: gradient on all trained tokens"


@pytest.mark.parametrize("at", range(1, 8))
def test_a_memory_that_was_written_and_read_goes_on_the_same(at):
    run = outcomes("vhehhhv")
    whole, _ = told(run)
    first, memory = told(run[:at])
    rest, _ = told(run[at:], msgspec.convert(json.loads(json.dumps(asdict(memory))), WatchState))
    assert first + rest == whole


def test_a_run_has_at_most_thirteen_series_whichever_slices_redden():
    places, names = (), set()
    for step in range(30):
        of = {f"s{i}": "violated" if i == step % 10 else "holds" for i in range(10)}
        each = sliced(step, **of)
        each = seen(
            step,
            each.outcome,
            *each.cells,
            cell(metric="usable_ratio", section="observability"),
            cell(metric="abs_log_ratio_nats", threshold=0.182),
            trend=Trend(1.0, (0.9, 1.1), 5),
            staleness=2.0,
            drafts=0.5,
        )
        before, places = places, placed(places, each)
        assert places[: len(before)] == before
        names |= series(each, places).keys()
    assert len(names) == MOST == 13


def test_a_series_has_no_number_where_the_step_has_none():
    values = series(seen(1, "error", cell()), ())
    assert values["servanda/outcome"] == 4
    assert values["servanda/gradient_share"] == pytest.approx(0.02)
    assert not {"servanda/trend", "servanda/staleness", "servanda/coverage"} & values.keys()


def test_a_step_is_one_line_with_its_worst_number_against_its_limit():
    trend = Trend(1.234, (1.0, 1.5), 5)
    line = step_line(seen(14, "violated", cell(), cell("violated", "env-math", 0.05), trend=trend))
    assert line == (
        "step 14     ✗ violated       gradient, env math: 0.05 [0.04, 0.06], limit 0.025  "
        "trend x1.23"
    )
    assert step_line(seen(3, "error", why="half is NaN")).endswith("! error          half is NaN")


def test_the_last_line_says_how_the_run_went():
    assert last_line(WatchState()) == "no complete step was found"
    _, memory = told(outcomes("hhvve"))
    assert last_line(memory) == (
        "watched 5 steps, 1 to 5: 2 holds, 2 violated, 1 error · red since step 3 · "
        "would have stopped at step 3"
    )
    assert CALM == 3


def test_a_step_of_too_few_tokens_says_how_many_it_needs():
    open_ = seen(3, "inconclusive", cell("inconclusive"), needs_tokens=2880, judged=1000)

    assert step_line(open_).endswith("needs about 2,880 tokens, has 1,000")
    assert "needs about" not in step_line(seen(3, "holds", cell(), needs_tokens=2880))
    assert "needs about" not in step_line(seen(3, "inconclusive", cell("inconclusive")))


def test_an_alert_prints_the_number_that_a_webhook_sends():
    _, (alert,) = advance(WatchState(), seen(3, "violated", cell("violated", value=0.0521)))
    assert alert.value == 0.0521 and ": 0.0521 [" in alert.words
    assert alert.limit == 0.025 and "limit 0.025," in alert.words
