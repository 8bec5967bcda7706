# Experts that a router picks: one that a sync leaves out is named, and one that no probe token is
# routed to is said to be untested.

import copy

import pytest

pytest.importorskip("torch")

from servanda.rl.sync_drill.result import Part
from tests.rl.sync_drill.mixtures import (
    EXPERTS,
    UNREACHED,
    Routed,
    drilled,
    tiny_moe,
)
from tests.rl.sync_drill.toys import Toy


def toy(stacked, lost=None, seed=0):
    module = Toy()
    module.layers[0].mlp = Routed(stacked).double()
    named = "" if lost is None else expert(stacked, lost)
    return drilled(module, copy.deepcopy(module).eval(), named, seed)


def expert(stacked, number):
    return f"expert {number}" if stacked else f"mlp.experts.{number}"


def untested(result, stacked):
    what = f"{expert(stacked, UNREACHED)} of layers.0.mlp"
    return [spot.text for spot in result.blind_spots if what in spot.text]


layouts = pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "apart"])


@pytest.mark.sampled(4)
@layouts
@pytest.mark.parametrize("seed", range(3))
def test_a_sync_that_works_holds_and_says_which_expert_no_token_is_routed_to(stacked, seed):
    result = toy(stacked, seed=seed)

    assert result.outcome == "holds", str(result)
    (text,) = untested(result, stacked)
    assert text == (
        "no probe token changes with some parts, such as an expert that none is routed to: "
        f"{expert(stacked, UNREACHED)} of layers.0.mlp; pass rows that reach them as tokens="
    )


@pytest.mark.sampled(4)
@layouts
@pytest.mark.parametrize("lost", [e for e in range(EXPERTS) if e != UNREACHED])
def test_an_expert_that_the_sync_leaves_out_is_named(stacked, lost):
    result = toy(stacked, lost)

    assert result.cause == "experts_stale", str(result)
    (wrong,) = (group for group in result.groups if group.mark == "violated")
    assert (wrong.name, wrong.lost) == ("layers.0.mlp", (expert(stacked, lost),))
    assert untested(result, stacked)


@layouts
def test_an_expert_that_no_token_reaches_is_untested_and_never_called_synced(stacked):
    result = toy(stacked, UNREACHED)

    assert result.outcome == "holds" and untested(result, stacked)
    (group,) = (group for group in result.groups if group.name == "layers.0.mlp")
    (part,) = (part for part in group.parts if part.name == expert(stacked, UNREACHED))
    assert part.unseen and not part.deaf and not part.partly_deaf


def test_a_part_without_any_effect_is_neither_right_nor_wrong():
    part = Part("expert 3", float("nan"), float("inf"), 0.0)

    assert part.unseen and not part.deaf and not part.partly_deaf


@pytest.mark.slow
def test_an_expert_of_few_tokens_is_named_where_rounding_flips_routes():
    pytest.importorskip("transformers")

    result = tiny_moe(0, "expert 2")

    assert result.cause == "experts_stale", str(result)
    (wrong,) = result.groups
    assert wrong.lost == ("expert 2",)


@pytest.mark.slow
def test_an_expert_of_one_token_is_not_called_lost_where_rounding_routes_that_elsewhere():
    """The sync works; expert 4 has one token in float32, which bfloat16 sends to another expert."""
    pytest.importorskip("transformers")

    result = tiny_moe(2, seed=5)

    assert result.outcome == "holds", str(result)
    assert any("expert 4 of layers.2.mlp" in spot.text for spot in result.blind_spots)
