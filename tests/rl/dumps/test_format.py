# What a dump is held to, what its slices are called, and what their shape fits.

import pytest

from servanda.contract.presets import PRESETS
from servanda.engines import engine_names
from servanda.judgement.slices.rules import Cut, Term
from servanda.rl.dumps import format
from servanda.rl.dumps.diagnosis import explained, fewest, likely, within
from servanda.rl.steps import contract as of_run
from servanda.rl.steps.drift import WORST, StepDrift, Trend, concentration
from servanda.theory.stats.interval import units_at_best
from tests.kit import parse

TRAINERS = [name for name, of in PRESETS.items() if of == "reinforcement learning"]


@pytest.mark.parametrize("name", TRAINERS)
def test_every_preset_of_a_trainer_completes_to_a_contract_that_lints(name):
    text, contract = of_run.contract_of(name, "made", ())

    assert parse(text, "again", engines=engine_names())[0] == contract
    assert contract.workload.source == "trainer" and contract.claim == "realised"
    assert contract.weights.changes == "every_step"
    assert {k.engine for k in (contract.kernels.train, contract.kernels.infer)} == {"external"}
    metrics = [clause.metric for clause in contract.observability.clauses]
    assert metrics == ["coherence", "usable_ratio"]
    limit = next(c.at_most for c in contract.statistical if c.metric == "tv" and c.enforced)
    assert of_run.needed(name) >= units_at_best(limit, 0.05)


@pytest.mark.parametrize(
    ("format_", "framework", "stale", "preset"),
    [
        ("nemo", "NeMo-RL", False, "nemo-grpo"),
        ("prime-rl", "prime-rl", True, "prime-rl"),
        ("slime", "slime or miles", False, "slime"),
        ("skyrl", "SkyRL", False, "verl-sync"),
        ("skyrl", "SkyRL", True, "verl-async"),
        ("own", "TRL 1.16", False, "trl"),
        ("own", "Servanda", False, "verl-sync"),
    ],
)
def test_the_preset_follows_from_the_format(format_, framework, stale, preset):
    assert of_run.guessed(format_, framework, stale=stale)[0] == preset


def test_every_importer_has_a_preset():
    from servanda.rl.dumps.formats import FORMATS

    for name, importer in FORMATS.items():
        assert of_run.guessed(name, importer.framework, stale=False)[0] in TRAINERS


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("all", "all trained tokens"),
        ("turn-1-to-2", "turns 1 to 2"),
        ("stale-0", "tokens 0 updates old"),
        ("stale-2-on", "tokens 2 and more updates old"),
        ("position<16", "response tokens before 16"),
        ("position>=64", "response tokens from 64 on"),
        ("length=256..1024", "contexts of 256 to 1024 tokens"),
        ("replica-r1", "replica r1"),
    ],
)
def test_slices_have_names_that_people_use(name, shown):
    assert format.place(name) == shown


def cut(name, **terms):
    """field__op=value, dots as one _: labels_replica__in=("a",)."""
    split = [(*key.split("__"), value) for key, value in terms.items()]
    return Cut(name, tuple(Term(f.replace("_", ".", 1), op, value) for f, op, value in split))


# slices as bits: replica a 1, b 2, positions below 16 4, above 8; their names say nothing
CUTS = (
    cut("start-2", labels_replica__in=("a",)),
    cut("stale-1", labels_replica__in=("b",)),
    cut("env-x", context_position__lt=16),
    cut("replica-x", context_position__gte=16),
)


def atoms(**tv):
    """1000 tokens in each of the four corners, with the given means."""
    corners = {"a_low": 1 | 4, "a_high": 1 | 8, "b_low": 2 | 4, "b_high": 2 | 8}
    return {bits: [1000, 1000 * tv.get(name, 0.01)] for name, bits in corners.items()}


def test_a_token_in_two_slices_is_counted_once():
    inside, outside = within(atoms(), 2 | 8)
    assert (inside.n, outside.n) == (3000, 1000)


def test_what_is_explained_is_the_excess_over_all_other_tokens():
    found = atoms(b_low=0.11, b_high=0.11, a_high=0.06)
    # base .01; excess .1 + .1 + .05, of which b has .2
    assert explained(found, 2, 2 | 8) == pytest.approx(0.8)
    assert explained(atoms(), 2, 2 | 8) is None


def test_one_replica_is_the_cause_and_all_of_them_are_none():
    found = atoms(b_low=0.2, b_high=0.2)
    assert likely(CUTS, ["stale-1"], found, None).startswith("replica b: its weights")
    assert likely(CUTS, ["start-2", "stale-1"], found, None) == ""


def test_late_positions_fit_an_error_that_grows_along_the_answer():
    found = atoms(a_high=0.2, b_high=0.2)
    told = likely(CUTS, ["replica-x"], found, None)
    assert told.startswith("an error that grows along") and told.endswith("(from 0.01 to 0.2)")
    assert likely(CUTS, ["env-x"], found, None) == ""
    # red, and yet hardly worse than the beginning: nothing grows
    level = atoms(a_high=0.2, b_high=0.2, a_low=0.19, b_low=0.19)
    assert likely(CUTS, ["replica-x"], level, None) == ""


@pytest.mark.parametrize("prefix", ["start", "stale", "env", "replica", "position", "length"])
def test_a_slice_of_a_users_label_gets_no_invented_cause(prefix):
    """`start-page` beside `start-ads` is a topic, and reports no tool boundary."""
    names = [f"{prefix}-page", f"{prefix}-ads"]
    cuts = tuple(cut(n, labels_topic__in=(n,)) for n in names)
    found = {1: [1000, 200.0], 2: [1000, 10.0]}

    told = likely(cuts, names[:1], found, None)

    assert told == (
        f"topic {prefix}-page alone, for an unknown reason; "
        "100 % of the excess over the limit lies there"
    )


def test_the_starts_of_turns_are_told_by_their_fields():
    """1: the whole of turn 2; 3: its first tokens; 4: turn 1."""
    cuts = (
        cut("b", context_turn__gte=2),
        cut("first-words", context_turn__gte=2, context_turn_position__lt=4),
        cut("a", context_turn__lte=1),
    )
    found = {1: [1000, 10.0], 3: [100, 30.0], 4: [1000, 10.0]}
    told = likely(cuts, ["first-words"], found, None)
    assert told.startswith(
        "the first tokens after a tool result, perhaps lost or tokenised differently; 100 %"
    )
    # the first tokens of turn 1 come after no tool
    first = (cut("start-2", context_turn__lte=1, context_turn_position__lt=4),)
    assert likely(first, ["start-2"], {1: [100, 30.0], 0: [1000, 10.0]}, None) == ""


def test_staleness_is_told_only_where_old_tokens_diverge_more_than_fresh_ones():
    cuts = (cut("s0", outcome_staleness__lte=0), cut("s1", outcome_staleness__gte=1))
    worse, alike = ({1: [1000, 10.0], 2: [500, tv]} for tv in (100.0, 5.0))
    told = likely(cuts, ["all"], worse, None)
    assert told.startswith("staleness: tokens sampled by older weights have a mean tv of 0.2, ")
    assert likely(cuts, ["all"], alike, None) == "" == likely(cuts, [], worse, None)


SURE, UNSURE = Trend(1.8, (1.5, 2.1), 5), Trend(1.8, (0.9, 2.7), 5)


def test_a_trend_is_worth_a_word_only_where_its_interval_is_above_1():
    told = likely(CUTS, [], atoms(), SURE)
    assert told.startswith("drift that grows, x1.8 in the last 5 steps: unexplained")
    assert likely(CUTS, [], atoms(), UNSURE) == ""


def test_how_drift_is_spread_over_sequences_tells_a_cache_and_names_no_weights():
    few, alike = (likely(CUTS, [], atoms(), SURE, c) for c in (0.93, 0.39))
    assert "in few sequences (93 % of it in 30 % of the tokens): a prefix cache" in few
    assert "in all sequences alike (39 %" in alike and "unexplained" in alike
    assert "cache" not in alike and "preflight" in alike


def test_concentration_is_the_share_of_the_worst_tokens_by_sequence():
    alike = StepDrift(1, drift=[(1.0, 10)] * 10)
    assert concentration([alike]) == pytest.approx(WORST)
    one = StepDrift(1, drift=[(0.0, 10)] * 9 + [(5.0, 10)])
    assert concentration([one]) == pytest.approx(1.0)
    # lengths do not count: a long sequence drifts more in sum, and not by token
    long = StepDrift(1, drift=[(9.0, 90), (1.0, 10)])
    assert concentration([long]) == pytest.approx(WORST)
    assert concentration([StepDrift(1), StepDrift(2, drift=[(0.0, 4)])]) is None


def test_the_fewest_slices_are_left_out_that_leave_the_rest_within_its_limits():
    """turn-2 is red only for the starts it shares: 1 is start-2, 2 is turn-2, 4 is turn-1."""
    names = ["start-2", "turn-2", "turn-1"]
    atoms = {4: [1000, 5.0], 2: [500, 2.5], 1 | 2: [50, 30.0]}
    assert fewest(names, {"start-2": 0.025, "turn-2": 0.025}, atoms) == ("start-2",)
    assert fewest(names, {"all": 0.02, "turn-2": 0.025}, atoms) == ("turn-2",)
    # what is red by another metric is left out whatever its mean
    assert fewest(names, {"turn-1": None, "start-2": 0.025}, atoms) == ("start-2", "turn-1")
    assert fewest(names, {"all": 0.001}, atoms) == ()
