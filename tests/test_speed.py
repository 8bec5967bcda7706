# The check of CI on speed: only what became much slower beside its peer fails.

import json

import pytest
from benchmarks import speed_page
from benchmarks.speed_rows import Row, beside

KNOWN = {("path", "peer"): (0.1, 2.0)}


def row(ratio, low=None, high=None):
    return Row("path", "peer", "token", 10.0, 10.0 * ratio, ratio, low or ratio, high or ratio)


def test_only_a_path_that_became_twice_as_slow_is_a_regression():
    assert speed_page.regressions([row(0.1)], KNOWN) == []
    assert speed_page.regressions([row(0.06)], KNOWN) == []
    assert speed_page.regressions([row(0.04, high=0.06)], KNOWN) == []  # it may be noise
    (said,) = speed_page.regressions([row(0.04)], KNOWN)
    assert said == "path: 25 times peer, recorded were 10; at most 2 times as much are accepted"
    assert speed_page.regressions([row(0.04)], {}) == []


def test_the_newest_run_on_a_processor_like_this_one_counts(tmp_path):
    history = tmp_path / "speed.jsonl"
    runs = [
        ("AVX512", [("a", 1.0), ("b", 2.0)]),
        ("AVX512", [("a", 3.0)]),
        ("AVX2", [("a", 4.0)]),
    ]
    lines = [
        {
            "instructions": instructions,
            "rows": [{"path": path, "peer": "p", "ratio": ratio} for path, ratio in run],
        }
        for instructions, run in runs
    ]
    history.write_text("\n".join(json.dumps(line) for line in lines))
    known = {on: speed_page.recorded(on, history) for on in ("AVX512", "AVX2", "DEFAULT")}
    assert known == {
        "AVX512": {("a", "p"): (3.0, 2.0), ("b", "p"): (2.0, 2.0)},
        "AVX2": {("a", "p"): (4.0, 2.0), ("b", "p"): (2.0, 4.0)},
        "DEFAULT": {("a", "p"): (4.0, 4.0), ("b", "p"): (2.0, 4.0)},
    }


def test_every_checked_row_is_recorded_with_its_peer():
    assert {*speed_page.CHECKED.values()} <= {peer for _, peer in speed_page.recorded("AVX2")}


def test_a_row_is_timed_in_turn_with_its_peers():
    order, clock = [], iter(range(1_000))
    work = {name: lambda name=name: order.append(name) for name in ("ours", "one", "two")}
    rows = beside(
        "path",
        "token",
        2,
        work["ours"],
        {"1": work["one"], "2": work["two"]},
        3,
        lambda: next(clock),
    )
    assert order == ["ours", "one", "two"] * 4
    assert [(r.peer, r.ours, r.ratio) for r in rows] == [
        ("1", pytest.approx(0.5e9), 1.0),
        ("2", pytest.approx(0.5e9), 1.0),
    ]
