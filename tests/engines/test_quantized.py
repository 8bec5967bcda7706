# Quantised linear layers against a dequantisation written one weight at a time.

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from servanda.engines.quantized import (
    GROUP,
    QUANTIZED,
    Int4GroupLinear,
    Int8WeightOnlyLinear,
    quantize_,
)
from servanda.errors import MeasurementError

names = pytest.mark.parametrize("name", [*QUANTIZED])


def linear(weight, bias=None):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        layer.weight.copy_(torch.as_tensor(weight))
        if bias is not None:
            layer.bias.copy_(torch.as_tensor(bias))
    return layer


def random_weight(rows=5, columns=64, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


def integers_and_scales(layer):
    """Two float64 arrays [O, I], from the stored bytes, one weight at a time."""
    if isinstance(layer, Int8WeightOnlyLinear):
        integers = layer.weight.numpy().astype(np.float64)
        scales = np.broadcast_to(layer.scale.numpy().astype(np.float64), integers.shape)
        return integers, scales
    packed, scale = layer.packed.numpy(), layer.scale.numpy()
    rows, groups, _ = packed.shape
    integers, scales = np.empty((2, rows, groups * GROUP))
    for o in range(rows):
        for i in range(groups * GROUP):
            byte = int(packed[o, i // GROUP, i % GROUP // 2])
            integers[o, i] = (byte // 16 if i % 2 else byte % 16) - 8
            scales[o, i] = scale[o, i // GROUP, 0]
    return integers, scales


weights = st.builds(
    lambda rows, power: np.array(rows, dtype=np.float32) * np.float32(2.0**power),
    st.lists(
        st.lists(st.floats(-1, 1, width=32), min_size=GROUP, max_size=GROUP),
        min_size=1,
        max_size=3,
    ),
    st.integers(-140, 100),
)


@names
@given(weight=weights)
def test_no_weight_moves_by_more_than_half_its_scale(name, weight):
    """Down to weights that float32 holds only as subnormal numbers."""
    integers, scales = integers_and_scales(QUANTIZED[name](linear(weight)))

    moved = np.abs(weight.astype(np.float64) - integers * scales)

    # the quotient weight / scale is itself rounded, to 127 * 2**-24 of a scale
    assert (moved <= scales * (0.5 + 127 * 2.0**-24)).all()


@names
@given(weight=weights)
def test_the_largest_weight_of_a_scale_uses_the_whole_range(name, weight):
    most, group = {"int8_weight_only": (127, weight.shape[1]), "int4_g32": (7, GROUP)}[name]

    integers, _ = integers_and_scales(QUANTIZED[name](linear(weight)))

    largest = np.abs(weight).reshape(len(weight), -1, group).max(axis=-1)
    used = np.abs(integers).reshape(len(weight), -1, group).max(axis=-1)
    assert (used[largest > 1e-30] == most).all()
    assert (used <= most).all()


@names
@pytest.mark.parametrize("bias", [None, np.arange(5, dtype=np.float32)])
def test_the_product_is_that_of_the_dequantised_weight(name, bias):
    layer = QUANTIZED[name](linear(random_weight(), bias))
    x = random_weight(7, 64, seed=1)
    integers, scales = integers_and_scales(layer)

    y = layer(torch.as_tensor(x)).detach().numpy()

    expected = x.astype(np.float64) @ (integers * scales).T + (0 if bias is None else bias)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@names
def test_the_weight_is_rounded_to_the_activations_dtype_once(name):
    layer = QUANTIZED[name](linear(random_weight()))
    integers, scales = integers_and_scales(layer)
    float32 = torch.as_tensor((integers * scales).astype(np.float32))

    assert torch.equal(layer.dequantize(), float32)
    assert torch.equal(layer.dequantize(torch.bfloat16), float32.to(torch.bfloat16))
    assert layer(torch.ones(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "stored_bytes"),
    [("int8_weight_only", 5 * 64 + 5 * 4), ("int4_g32", 5 * 64 // 2 + 5 * 2 * 4)],
)
def test_the_layer_keeps_integers_and_scales_and_nothing_else(name, stored_bytes):
    state = QUANTIZED[name](linear(random_weight())).state_dict()

    assert sum(t.numel() * t.element_size() for t in state.values()) == stored_bytes


@names
def test_a_row_of_zeros_stays_one(name):
    layer = QUANTIZED[name](linear(np.zeros((2, 64), dtype=np.float32)))

    assert not layer.dequantize().any()


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_number_stays_visible_where_its_scale_reaches(odd):
    weight = random_weight()
    weight[1, 3] = odd

    by_row = Int8WeightOnlyLinear(linear(weight)).dequantize().isfinite().numpy()
    by_group = Int4GroupLinear(linear(weight)).dequantize().isfinite().numpy()

    assert by_row.all(axis=1).tolist() == [True, False, True, True, True]
    assert not by_row[1].any()
    assert not by_group[1, :GROUP].any()
    assert by_group[1, GROUP:].all()
    assert by_group[[0, 2, 3, 4]].all()


def tiny_llama(intermediate=96):
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=intermediate,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


@names
def test_every_linear_layer_is_replaced_but_the_head_which_stays_tied(name):
    model = tiny_llama()

    quantize_(model, name)

    left = [path for path, m in model.named_modules() if isinstance(m, nn.Linear)]
    new = [path for path, m in model.named_modules() if type(m) is QUANTIZED[name]]
    assert left == ["lm_head"]
    assert len(new) == 7
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_layer_that_does_not_divide_into_groups_is_named():
    with pytest.raises(MeasurementError) as error:
        quantize_(tiny_llama(intermediate=40), "int4_g32")

    assert str(error.value) == (
        "model.layers.0.mlp.down_proj: int4_g32 groups 32 input features, and a layer has 40\n"
        "  hint: use int8_weight_only for this model"
    )


def test_an_unknown_quantization_is_answered_with_those_there_are():
    with pytest.raises(MeasurementError) as error:
        quantize_(tiny_llama(), "w8a8")

    assert str(error.value) == (
        "engine 'transformers' has no quantization 'w8a8'\n"
        "  hint: it has int8_weight_only and int4_g32; leave the key out for none"
    )
