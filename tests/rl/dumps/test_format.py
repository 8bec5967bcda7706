# What a dump is held to, what its slices are called, and what their shape fits.

import pytest

from servanda.contract.presets import PRESETS
from servanda.engines import engine_names
from servanda.rl.steps import contract as of_run
from servanda.rl.steps import format
from servanda.rl.steps.judge import fewest, within
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
    assert metrics == ["coherence", "usable_ratio", "outlier_tokens"]
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


# slices as bits: replica a 1, b 2, positions below 16 4, above 8


def atoms(**tv):
    """1000 tokens in each of the four corners, with the given means."""
    corners = {"a_low": 1 | 4, "a_high": 1 | 8, "b_low": 2 | 4, "b_high": 2 | 8}
    return {bits: [1000, 1000 * tv.get(name, 0.01)] for name, bits in corners.items()}


def test_a_token_in_two_slices_is_counted_once():
    inside, outside = within(atoms(), 2 | 8)
    assert (inside.n, outside.n) == (3000, 1000)


def test_the_fewest_slices_are_left_out_that_leave_the_rest_within_its_limits():
    """turn-2 is red only for the starts it shares: 1 is start-2, 2 is turn-2, 4 is turn-1."""
    names = ["start-2", "turn-2", "turn-1"]
    atoms = {4: [1000, 5.0], 2: [500, 2.5], 1 | 2: [50, 30.0]}
    assert fewest(names, {"start-2": 0.025, "turn-2": 0.025}, atoms) == ("start-2",)
    assert fewest(names, {"all": 0.02, "turn-2": 0.025}, atoms) == ("turn-2",)
    # what is red by another metric is left out whatever its mean
    assert fewest(names, {"turn-1": None, "start-2": 0.025}, atoms) == ("start-2", "turn-1")
    assert fewest(names, {"all": 0.001}, atoms) == ()
