# Follow: which version of the weights an engine holds, from the scores of both sides.

import itertools
import json
import math

import numpy as np
import pytest

from servanda.errors import ContractError, EvidenceError
from servanda.rl import Follow
from servanda.rl.follow.follow_step import STACKED, STOP, Window, ages, is_kept, passing
from servanda.rl.follow.stale_rows import StaleRows, sign_probability
from servanda.theory.bounds.assumptions import ASSUMPTIONS
from tests.rl.follow.made import HELD, PROBES, ROWS, TOKENS, Walk


def causes(steps):
    return {step.cause for step in steps} - {""}


def test_an_engine_that_follows_is_undecided_and_then_holds():
    steps = Walk().follow(Walk().engine(HELD[""]))

    outcomes = [step.outcome for step in steps]
    first = outcomes.index("holds")
    assert {*outcomes[:first]} == {"inconclusive"} and {*outcomes[first:]} == {"holds"}
    assert steps[-1].interval[0] < 1 < steps[-1].interval[1]
    assert (steps[0].exit_code, steps[-1].exit_code) == (3, 0)
    asked = [step for step in steps if step.worst.needs is not None]
    assert asked and all(step.outcome == "inconclusive" for step in asked)
    assert f"about {asked[-1].worst.needs} more sync" in asked[-1].sentence
    assert str(steps[-1]).startswith("✓ version 15: the engine follows the trainer\n  slope 1.0")
    assert f"\n  assumes: {ASSUMPTIONS['independent_rows'].text}" in str(steps[-1])


@pytest.mark.parametrize("name", [name for name in HELD if name])
def test_an_engine_that_holds_other_weights_is_violated_and_gets_its_cause(name):
    cause, _, _ = name.replace(",", "").partition(" ")

    steps = Walk().follow(Walk().engine(HELD[name]))

    assert steps[-1].outcome == "violated" and steps[-1].cause == cause
    assert causes(steps) - {"undecided", cause} <= ({"never_synced"} if "late" in name else set())
    if "late" in name:
        assert steps[-1].sentence.startswith(f"the engine is {name}".replace("late", "late by"))


def test_a_sync_that_stops_is_named_with_a_version_since_which_nothing_arrived():
    steps = Walk().follow(Walk().engine(HELD["stopped"]))

    assert next(s.version for s in steps if s.outcome == "violated") == 6
    assert steps[-1].cause == "stopped" and int(steps[-1].worst.detail) >= 5


def test_a_change_that_arrives_twice_over_is_scaled_with_an_interval():
    step = Walk().follow(Walk().engine(HELD[""], factor=2.0))[-1]

    assert step.cause == "scaled" and step.interval[0] < 2 < step.interval[1]
    assert step.sentence == "the engine changes by 2.0 times the trainer's change".replace(
        "2.0 ", f"{step.slope:.2f} "
    )


def test_part_of_the_weights_is_unexplained_and_named_where_its_effect_is_known():
    walk = Walk()
    engine = [part + r for part, r in zip(walk.part, walk.rounding, strict=True)]
    parts = {
        "one": walk.part,
        "other": [2 * t - p for t, p in zip(walk.train, walk.part, strict=True)],
    }

    blind = walk.follow(engine)[-1]
    asked = walk.follow(engine, parts=lambda k: lambda: {n: p[k] for n, p in parts.items()})[-1]

    assert (blind.outcome, blind.cause) == ("violated", "unexplained")
    assert (asked.cause, asked.worst.detail) == ("part", "one")


def test_the_effect_of_parts_finds_one_that_carries_little_of_the_change():
    """Its share of the change is below the limit, so that the slope of all holds."""
    walk = Walk(looks=24)
    small = [t - 0.25 * (t - p) for t, p in zip(walk.train, walk.part, strict=True)]
    engine = [part + r / 4 for part, r in zip(small, walk.rounding, strict=True)]

    blind = walk.follow(engine, limit=0.2)
    asked = walk.follow(engine, limit=0.2, parts=lambda k: {"one": small[k]})

    assert "violated" not in {step.outcome for step in blind}
    assert asked[-1].outcome == "violated" and asked[-1].worst.detail == "one"


@pytest.mark.parametrize("seed", range(4))
def test_engines_with_a_fault_of_no_name_get_none(seed):
    walk = Walk(seed)
    healthy, late = walk.engine(HELD[""]), walk.engine(HELD["late 2"])
    unnamed = {
        "half of the change": walk.engine(HELD[""], factor=0.5),
        "half of the tokens are late": [
            np.where(np.arange(TOKENS) % 2, a, b) for a, b in zip(healthy, late, strict=True)
        ],
        "every third sync arrives": walk.engine(lambda k: k - k % 3),
    }
    for what, engine in unnamed.items():
        steps = walk.follow(engine)
        assert any(s.outcome == "violated" for s in steps), what
        named = {s.cause for s in steps if s.version > 3} - {"", "undecided", "unexplained"}
        # of every third sync, two in a row are missing: then it has stopped, until the next
        assert named <= ({"stopped"} if "third" in what else set()), what


def test_one_replica_of_eight_is_named():
    walk = Walk()
    healthy, stale = walk.engine(HELD[""]), walk.engine(HELD["never_synced"])

    def engines(k):
        return {f"r{i}": stale[k] if i == 3 else healthy[k] for i in range(8)}

    step = walk.follow(engines)[-1]

    assert (step.outcome, step.cause) == ("violated", "stale_replicas")
    assert step.sentence.startswith("1 of 8 replicas (r3): no sync has reached the engine")
    assert step.metrics["servanda/follow/replicas_violated"] == 1.0
    assert step.replicas["r0"].outcome == "holds"


def test_a_trainer_that_does_not_move_is_undecided_for_ever():
    steps = Walk(step=0.0).follow(Walk(step=0.0).engine(HELD[""]))

    assert {step.outcome for step in steps} == {"inconclusive"}
    assert steps[-1].sentence == "the trainer's scores have not changed yet"
    assert "servanda/follow/slope" not in steps[-1].metrics and math.isnan(steps[-1].slope)


def test_an_engine_of_the_same_bits_holds():
    walk = Walk(noise=0.0)

    assert walk.follow(walk.train)[-1].interval == pytest.approx((1, 1), abs=1e-5)
    assert walk.follow(walk.train)[-1].outcome == "holds"


def test_missing_scores_are_counted_and_never_agreement():
    walk = Walk()
    engine = walk.engine(HELD[""])
    holes = [np.where(walk.rng.random(e.shape) < 0.1, np.nan, e) for e in engine]
    empty = [np.full_like(e, -np.inf) for e in engine]

    some, none = walk.follow(holes), walk.follow(empty)

    assert some[-1].worst.missing == int(np.isnan(holes[-1]).sum()) > 0
    assert some[-1].metrics["servanda/follow/missing_tokens"] == some[-1].worst.missing
    assert {s.outcome for s in some} <= {"inconclusive", "holds"}
    assert {(s.outcome, s.exit_code) for s in none} == {("error", 4)}


def test_an_engine_of_nan_is_an_error_that_says_so():
    walk = Walk()
    engine = walk.engine(HELD[""])
    broken = [
        np.where((k > 0) & (np.arange(ROWS) % 4 > 0)[:, None], np.nan, e)
        for k, e in enumerate(engine)
    ]

    steps = walk.follow(broken)

    assert [s.outcome for s in steps[:2]] == ["inconclusive", "error"]
    assert steps[-1].sentence.startswith("the engine gives no logprob of 480 of 640 probe tokens")


@pytest.mark.parametrize("rounds, far", [(0.16, False), (0.3, False), (0.6, True)])
def test_an_engine_that_jumps_away_at_a_sync_is_violated_beyond_what_rounding_may_begin(
    rounds, far
):
    """Its changes are unrelated to those of the trainer, so no slope says anything."""
    walk = Walk(step=0.01)
    jump = walk.rng.normal(0, rounds, (ROWS, TOKENS))
    engine = [e + jump * (k > 0) for k, e in enumerate(walk.engine(HELD[""]))]

    steps = walk.follow(engine)

    assert [s.outcome == "violated" for s in steps] == [far and s.version > 0 for s in steps]
    if far:
        assert steps[1].cause == "unexplained"
        assert "nats from the trainer, and was 0.02 from it at version 0" in steps[1].sentence


def test_a_replica_that_vanishes_is_an_error_and_not_left_out():
    walk = Walk()
    engine = walk.engine(HELD[""])

    steps = walk.follow(lambda k: {"a": engine[k]} | ({"b": engine[k]} if k < 12 else {}))

    assert steps[11].outcome == "holds" and steps[12].outcome == "error"
    assert steps[12].replicas["a"].outcome == "holds"


def test_a_run_that_goes_back_replaces_later_scores():
    walk = Walk()
    engine, follow = walk.engine(HELD[""]), Follow(PROBES)
    walk.follow(engine, follow)

    step = follow.observe(10, walk.train[10], engine[10])

    assert step.notes == ("the scores of 6 syncs from version 10 on are replaced",)
    assert step.outcome == "holds"


@pytest.mark.slow
def test_a_long_run_keeps_few_scores_of_each_age_and_its_file_stays_small(tmp_path):
    kept = [look for look in range(5001) if is_kept(look, 5000)]
    assert kept[0] == 0 and kept[-32:] == [*range(4969, 5001)] and len(kept) < 200
    for look in range(300):  # what is dropped is never needed again
        there = [is_kept(look, newest) for newest in range(look, 1500)]
        assert there == sorted(there, reverse=True)
    assert ages(kept, 5000)[-1] == 0 and len(ages(kept, 5000)) <= 13

    state, follow = tmp_path / "follow.jsonl", Follow(PROBES, state=tmp_path / "follow.jsonl")
    flat = -np.ones((ROWS, TOKENS))
    for version in range(300):
        follow.observe(version, flat, flat)
    lines = [json.loads(line) for line in state.read_text().splitlines()]
    assert lines[0]["version"] == 0 and lines[-1]["version"] == 299
    assert len(lines) < 300 and Follow(PROBES, state=state).observe(300, flat, flat)


def test_bad_scores_and_probes_are_refused_with_their_place(tmp_path):
    follow, good = Follow(PROBES), -np.ones((ROWS, TOKENS))
    for scores, words in (
        (good[1:], "the trainer scored 63 rows, and there are 64 probe rows"),
        (good[:, 1:], r"the trainer gave row 1 logprobs of shape \(9,\), and it has 11 tokens"),
        (-good, "the trainer gave row 1 a logprob of 1"),
        (None, "the trainer scored 0 rows"),
    ):
        with pytest.raises(EvidenceError, match=words):
            follow.observe(0, scores, good)
    for texts in (["a text"] * 30, "a text", [None]):
        with pytest.raises(ContractError, match="the probe tokens are not rows of token ids"):
            Follow(texts)
    with pytest.raises(ContractError, match="6 rows of probe tokens, and at least 24 are needed"):
        Follow(PROBES[:6])
    with pytest.raises(ContractError, match="row 2 of the probe tokens has 1"):
        Follow([[1, 2], [3]])
    with pytest.raises(ContractError, match="limit is 0"):
        Follow(PROBES, limit=0)
    (tmp_path / "other").write_text('{"schema": 1, "weights": 0}\n')
    with pytest.raises(EvidenceError, match="other:1 is no line of this follow"):
        Follow(PROBES, state=tmp_path / "other")


@pytest.mark.parametrize("seed", range(4))
def test_what_rounding_explains_is_undecided_and_says_so(seed):
    """Errors of a trainer pull every slope towards 0, and rows share those of rounded weights."""
    walk = Walk(seed, step=0.03)
    healthy, stale = walk.engine(HELD[""]), walk.engine(HELD["never_synced"])
    walk.train = [np.minimum(t + walk.rng.normal(0, 0.02, t.shape), 0) for t in walk.train]
    shared = walk.rng.choice([-0.02, 0.02], len(walk.train))  # an offset of all tokens
    healthy = [np.minimum(e + s, 0) for e, s in zip(healthy, shared, strict=True)]

    steps = walk.follow(healthy)

    assert not any(step.outcome == "violated" for step in steps)
    assert any("the engine may round by itself" in step.sentence for step in steps)
    assert walk.follow(stale)[-1].cause == "never_synced"


STALE = {
    "a cache": (lambda _: np.arange(ROWS) % 10 < 3, "rows, the same at each sync"),
    "one of ten replicas": (lambda rng: rng.random(ROWS) < 0.1, "of the rows, others at each sync"),
    "half of the rows": (lambda _: np.arange(ROWS) % 2, "rows, the same at each sync"),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", STALE)
def test_rows_that_are_answered_as_before_every_sync_are_named(name, seed):
    chosen, words = STALE[name]
    walk = Walk(seed)
    pairs = zip(walk.engine(HELD["never_synced"]), walk.engine(HELD[""]), strict=True)

    steps = walk.follow([np.where(chosen(walk.rng)[:, None], *pair) for pair in pairs])

    assert steps[-1].cause == "part_of_rows" and steps[-1].worst.since == 0
    assert f"is answered as at version 0: {steps[-1].worst.detail}" in steps[-1].sentence
    assert words in steps[-1].sentence
    assert causes(steps) <= {"part_of_rows", "unexplained", "undecided"}


@pytest.mark.parametrize(
    ("stale", "known", "said"),
    [
        ([[1, 0, 0]], [[1, 1, 1]], "1 of 3 rows"),
        ([[1, 0, 0], [0, 1, 0]], [[1, 0, 1], [0, 1, 1]], "2 of 3 rows"),  # each is known once
        ([[1, 0, 0], [1, 0, 0]], [[1, 1, 1], [1, 1, 1]], "1 of 3 rows, the same at each sync"),
        ([[1, 0, 0], [0, 1, 0]], [[1, 1, 1], [1, 1, 1]], "33% of the rows, others at each sync"),
    ],
)
def test_whether_rows_are_the_same_is_said_of_rows_that_are_known_twice(stale, known, said):
    assert str(StaleRows(np.array(stale) > 0, np.array(known) > 0, 0.0, 0.0)) == said


def test_rows_that_follow_again_are_believed():
    walk = Walk(looks=32)
    stale, healthy = walk.engine(HELD["never_synced"]), walk.engine(HELD[""])
    rows = np.arange(ROWS)[:, None] % 10 < 3
    engine = [np.where(rows & (k < 14), stale[k], healthy[k]) for k in range(32)]

    steps = walk.follow(engine)

    assert steps[13].cause == "part_of_rows" and steps[-1].outcome == "holds"
    assert any("engine follows again since version" in n for s in steps for n in s.notes)


@pytest.mark.parametrize("values", [[-1, -1, 2, 0], [3, -1, -2, -2, 1], [-1] * 9, [0, 0], [2]])
def test_the_probability_of_signs_is_that_of_enumeration(values):
    sizes = [abs(v) for v in values if v]
    sums = [sum(signs) for signs in itertools.product(*((-s, s) for s in sizes))]

    found = sign_probability(np.array(values))

    assert found == pytest.approx(np.mean([one <= sum(values) for one in sums]))


PASSING = {
    "one missed": (lambda k: k - (k == 8), 9, {"stopped"}),
    "stopped for a while": (lambda k: 5 if 5 <= k <= 10 else k, 11, {"stopped"}),
    "late for a while": (lambda k: k - (6 < k < 13), 13, {"stopped", "late"}),
}


@pytest.mark.parametrize("name", PASSING)
@pytest.mark.parametrize("step", [0.06, 0.02], ids=["moves", "hardly moves"])
def test_an_engine_that_follows_again_is_believed_after_evidence(name, step):
    held, over, causes = PASSING[name]
    walk = Walk(1, looks=32, step=step)

    steps = walk.follow(walk.engine(held))

    assert any(s.outcome == "violated" for s in steps[6:over])
    assert {s.cause for s in steps} <= {"", "undecided", "unexplained"} | causes
    assert not any(s.outcome == "violated" for s in steps[-6:])
    if step > 0.05:
        assert steps[-1].outcome == "holds"
        assert any("engine follows again since version" in n for s in steps for n in s.notes)


def test_an_engine_that_becomes_late_is_late_and_not_dropped_or_stopped():
    for step in (0.06, 0.02):
        walk = Walk(1, looks=32, step=step)

        steps = walk.follow(walk.engine(lambda k: k - (k > 6)))

        assert steps[-1].cause == "late"
        assert {s.cause for s in steps[10:]} <= {"late", "undecided", "unexplained", "stopped"}


@pytest.mark.parametrize(
    ("seed", "looks", "held"),
    [(0, 16, HELD["late 1"]), (1, 24, PASSING["stopped for a while"][0])],
    ids=["late", "a fault that passed"],
)
def test_a_restart_continues_and_a_cut_off_line_is_dropped(tmp_path, seed, looks, held):
    walk, state, at = Walk(seed, looks=looks), tmp_path / "runs" / "follow.jsonl", looks - 8
    engine = walk.engine(held)
    whole = walk.follow(engine)

    first = Follow(PROBES, state=state)
    for k in range(at):
        first.observe(k, walk.train[k], engine[k])
    with state.open("a") as file:
        file.write('{"schema": 1, "fol')
    again = Follow(PROBES, state=state)
    steps = [again.observe(k, walk.train[k], engine[k]) for k in range(at, looks)]

    assert [str(s) for s in steps] == [str(s) for s in whole[at:]]
    assert len(state.read_text().splitlines()) == looks


def test_all_comparisons_of_a_run_spend_alpha_once(monkeypatch):
    """Over syncs, engines, windows, rivals, patterns that pass, and looks at following again."""
    asked, spent, slope = [], {}, Window.slope

    def spied(window, first, second, alpha):
        kept, look = window.kept, window.newest
        known = [n for n, s in kept.items() if window.replica in s.infer]
        share = 0.1 / 3 / (look * (look + 1)) / len(ages(known, look))
        if any(window.replica in s.violated for s in kept.values()):
            share /= 5  # it may follow again, over the last 1, 2, 4 and 8 syncs
        names = sorted(getattr(rival, "name", rival) for rival in (first, second))
        passes = STOP in names
        asked.append((alpha, 0.1 * share / 256 if passes else 0.9 * share / 9, passes))
        if "follows" in names:
            spent[look, window.replica, window.since, window.stacked, tuple(names)] = alpha
        return slope(window, first, second, alpha)

    monkeypatch.setattr(Window, "slope", spied)
    walk = Walk(1, looks=24)
    engines = {n: walk.engine(PASSING["stopped for a while"][0]) for n in ("a", "b")}
    engines |= {"late": walk.engine(HELD["late 1"])}
    steps = walk.follow(
        lambda k: {name: scores[k] for name, scores in engines.items()},
        confidence=0.9,
        parts=lambda k: {"half": walk.part[k]},
    )

    alphas, by_hand, passes = zip(*asked, strict=True)
    assert alphas == pytest.approx(by_hand, rel=1e-12) and 0 < sum(passes) < len(passes)
    assert {n for step in steps for n, r in step.replicas.items() if r.cause} == {*engines}
    assert any(stacked != STACKED for *_, stacked, _ in spent)
    assert 0.01 < sum(spent.values()) <= 0.1 * 0.9


def test_there_are_no_more_patterns_than_share_their_alpha():
    pairs = [(since, newest) for newest in range(1, 60) for since in range(newest)]
    assert max(len(passing(*pair, kind)) for pair in pairs for kind in ("late", "dropped")) <= 256
