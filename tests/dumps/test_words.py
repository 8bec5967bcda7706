# What a dump is held to, what its slices are called, and what their shape fits.

import pytest

from servanda import language
from servanda.dumps import presetting, words
from servanda.dumps.causes import explained, fewest, likely, within
from servanda.dumps.steps import Trend
from servanda.engines import engine_names
from servanda.presets import PRESETS
from servanda.stats import units_at_best

TRAINERS = [name for name, of in PRESETS.items() if of == "reinforcement learning"]


@pytest.mark.parametrize("name", TRAINERS)
def test_every_preset_of_a_trainer_completes_to_a_contract_that_lints(name):
    text, contract = presetting.contract_of(name, "made", ())

    assert language.parse(text, "again", engines=engine_names())[0] == contract
    assert contract.workload.source == "trainer" and contract.claim == "realised"
    assert contract.weights.changes == "every_step"
    assert {k.engine for k in (contract.kernels.train, contract.kernels.infer)} == {"external"}
    metrics = [clause.metric for clause in contract.observability.clauses]
    assert metrics == ["coherence", "usable_ratio"]
    limit = next(c.at_most for c in contract.statistical if c.metric == "tv" and c.enforced)
    assert presetting.needed(name) >= units_at_best(limit, 0.05)


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
    assert presetting.guessed(format_, framework, stale=stale)[0] == preset


def test_every_importer_has_a_preset():
    from servanda.importers import FORMATS

    for name, importer in FORMATS.items():
        assert presetting.guessed(name, importer.framework, stale=False)[0] in TRAINERS


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("all", "all trained tokens"),
        ("turn-1-to-2", "turns 1 to 2"),
        ("stale-0", "tokens 0 updates old"),
        ("stale-2-on", "tokens 2 and more updates old"),
        ("position<16", "answer tokens before 16"),
        ("position>=64", "answer tokens from 64 on"),
        ("length=256..1024", "contexts of 256 to 1024 tokens"),
        ("replica-r1", "replica r1"),
    ],
)
def test_slices_have_names_that_people_use(name, shown):
    assert words.place(name) == shown


# slices as bits: replica-a 1, replica-b 2, position<16 4, position>=16 8
NAMES = ("replica-a", "replica-b", "position<16", "position>=16")


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
    assert likely(NAMES, ["replica-b"], found, None).startswith("replica b itself")
    assert likely(NAMES, ["replica-a", "replica-b"], found, None) == ""


def test_late_positions_fit_an_error_that_grows_along_the_answer():
    found = atoms(a_high=0.2, b_high=0.2)
    assert likely(NAMES, ["position>=16"], found, None).startswith("an error that grows along")
    assert likely(NAMES, ["position<16"], found, None) == ""


def test_a_trend_is_a_cause_only_where_its_interval_is_above_1():
    sure, unsure = Trend(1.8, (1.5, 2.1), 5), Trend(1.8, (0.9, 2.7), 5)
    assert likely(NAMES, [], atoms(), sure).startswith("drift that grows with the steps")
    assert likely(NAMES, [], atoms(), unsure) == ""


def test_the_fewest_slices_are_left_out_that_leave_the_rest_within_its_limits():
    """turn-2 is red only for the starts it shares: 1 is start-2, 2 is turn-2, 4 is turn-1."""
    names = ["start-2", "turn-2", "turn-1"]
    atoms = {4: [1000, 5.0], 2: [500, 2.5], 1 | 2: [50, 30.0]}
    assert fewest(names, {"start-2": 0.025, "turn-2": 0.025}, atoms) == ("start-2",)
    assert fewest(names, {"all": 0.02, "turn-2": 0.025}, atoms) == ("turn-2",)
    # what is red by another metric is left out whatever its mean
    assert fewest(names, {"turn-1": None, "start-2": 0.025}, atoms) == ("start-2", "turn-1")
    assert fewest(names, {"all": 0.001}, atoms) == ()
