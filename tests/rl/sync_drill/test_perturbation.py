# Slopes, held against what is put in.

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.rl.sync_drill.response_slope import part_slopes, response_slope
from servanda.rl.sync_drill.result import Part, Response
from servanda.rl.sync_drill.vocabulary import drawn, ranges
from servanda.rl.sync_drill.weight_groups import blocks, weight_groups

slopes = st.floats(-2, 3)


@given(slopes, st.integers(0, 99))
def test_the_slope_that_was_put_in_comes_out(slope, seed):
    train_N = np.random.default_rng(seed).normal(size=50)

    found = response_slope(train_N, slope * train_N)

    assert found.follow == pytest.approx(slope, abs=1e-9) and found.residual_nats < 1e-9


@given(st.lists(slopes, min_size=2, max_size=8), st.integers(0, 99))
def test_parts_that_were_changed_at_once_are_told_apart(follows, seed):
    parts_PN = np.random.default_rng(seed).normal(size=(len(follows), 200))

    found = part_slopes([*parts_PN], parts_PN.sum(axis=0), np.array(follows) @ parts_PN)

    assert [follow for follow, _ in found] == pytest.approx(follows, abs=1e-6)


def test_the_standard_error_covers():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        train_N = rng.normal(size=100)
        found = response_slope(train_N, 0.7 * train_N + rng.normal(size=100))
        inside += abs(found.follow - 0.7) < 1.96 * found.spread
    assert 0.92 < inside / 400 < 0.98


@given(st.floats(5, 500), st.integers(0, 99))
def test_a_token_that_decides_a_part_alone_makes_it_no_sure_loss(large, seed):
    """White's standard error has no such token's rest: the slope passes through it."""
    rng = np.random.default_rng(seed)
    part_N = np.zeros(640)
    part_N[:8] = rng.choice([-1.0, 1.0], 8)
    part_N[0] = large
    rest_N = 0.1 * rng.normal(size=640)
    change_N = part_N + rest_N
    change_N[0] = rest_N[0]  # the engine did not use the part there

    ((follow, spread),) = part_slopes([part_N], part_N, change_N)

    part = Part("expert 4", follow, spread, 12)
    assert not part.deaf and not part.partly_deaf
    whole = response_slope(part_N, change_N)
    assert whole.follow == pytest.approx(follow) and whole.spread > 0.5


def test_parts_that_do_the_same_are_not_told_apart():
    x = np.arange(5.0)

    assert all(np.isnan(follow) for follow, _ in part_slopes([x, 2 * x], 3 * x, x))


def test_tensors_of_real_models_fall_into_their_groups():
    names = {
        "model.embed_tokens.weight": ["model.embed_tokens.weight", "lm_head.weight"],
        **{
            n: [n]
            for n in (
                "model.layers.0.self_attn.q_proj.weight",
                "model.layers.0.self_attn.q_norm.weight",
                "model.layers.0.mlp.experts.3.up_proj.weight",
                "model.layers.0.input_layernorm.weight",
                "model.norm.weight",
                "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
                "transformer.h.1.ln_1.weight",
                "transformer.h.1.attn.c_attn.bias",
                "v_head.summary.weight",
            )
        },
    }

    assert {g.name: sorted(g.parts) for g in weight_groups(names)} == {
        "embed/lm_head": ["model.embed_tokens"],
        "norms.q_norm": ["layers.0"],
        "norms.input_layernorm": ["layers.0"],
        "norms.ln_1": ["layers.1"],
        "norms.norm": ["model.norm"],
        "layers.0.attn": ["self_attn.q_proj"],
        "layers.0.mlp": ["mlp.experts.3"],
        "layers.0.adapter": ["self_attn.q_proj.lora_A.default"],
        "layers.1.attn": ["attn.c_attn.bias"],
        "rest": ["v_head.summary"],
    }


def test_a_large_model_takes_a_dozen_syncs_and_a_small_one_a_sync_a_group():
    kinds = ("self_attn.q_proj", "mlp.up_proj", "input_layernorm")
    large = weight_groups({f"layers.{i}.{k}.weight": ["x"] for i in range(36) for k in kinds})
    small = weight_groups({f"layers.{i}.{k}.weight": ["x"] for i in range(4) for k in kinds})

    # one class of norms here; several share a sync
    assert len(blocks(large)) == 11 and max(map(len, blocks(large))) <= 8
    assert len(blocks(small)) == len(small) == 9


@pytest.mark.parametrize(
    ("follow", "moved", "mark"),
    [
        *[(0.93, 24, "warns"), (0.95, 12, "holds"), (0.86, 12, "warns"), (0.86, 5, "holds")],
        *[(0.7, 5, "warns"), (0.7, 3.2, "holds"), (0.45, 2, "violated"), (1.2, 12, "warns")],
    ],
)
def test_a_slope_is_held_as_close_to_one_as_its_nudge_can_tell(follow, moved, mark):
    """Sides that are a floor apart tell the slope of a nudge of m floors to 1 / m."""
    found = Response("layers.0.mlp", "mlp", 0, follow, 0.01, 1.0, moved, 1.0, "layers.0.mlp")

    assert found.mark == mark


def test_a_part_is_deaf_only_where_that_is_sure():
    assert Part("lm_head.weight", 0.27, 0.05).deaf
    assert not Part("v_proj.lora_A.default", 0.33, 0.15).deaf  # of a sync that works


def test_a_part_that_is_lost_in_part_is_wrong_where_that_is_sure():
    """One expert of four that were bundled."""
    assert Part("mlp.experts.0 .. mlp.experts.3", 0.75, 0.01, 12).partly_deaf
    assert not Part("mlp.experts.0 .. mlp.experts.3", 0.75, 0.03, 12).partly_deaf
    # of an engine of four bits, that works
    assert not Part("v_proj.lora_B.default", 0.70, 0.07, 1.3).partly_deaf


def test_experts_of_a_layer_are_bundled():
    names = [f"layers.0.mlp.experts.{i}.{p}.weight" for i in range(128) for p in ("up", "down")]

    (group,) = weight_groups({name: [name] for name in names})

    assert len(group.parts) == 32 and [*group.tensors] == names
    assert next(iter(group.parts)) == "mlp.experts.0 .. mlp.experts.3"


@given(st.integers(2, 5000), st.integers(1, 400), st.integers(0, 99))
def test_ranges_of_a_vocabulary_hold_each_probed_id_once(size, count, seed):
    probed = np.random.default_rng(seed).integers(0, size, count)

    found = ranges(size, [size // 2], probed)

    assert all(sum(low <= token < high for low, high in found) == 1 for token in probed)
    assert all(any(low <= token < high for token in probed) for low, high in found)
    if size - 1 in probed:
        assert found[-1] == (size - 1, size)


@given(st.integers(30, 200_000), st.integers(0, 9))
def test_whatever_end_of_a_vocabulary_is_lost_a_probe_has_it_several_times(size, seed):
    """Any first or last rows, and any shard of 128 in a row."""
    rows = drawn(size, [], 16, 41, seed)
    tokens = np.array(rows).ravel()

    assert min(np.count_nonzero(tokens == 0), np.count_nonzero(tokens == size - 1)) >= 3
    shard = (tokens * 128) // size
    assert {*np.unique(shard)} == {*np.unique((np.arange(size) * 128) // size)}
