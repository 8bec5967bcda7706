# Low precision against roundings of ml_dtypes, and products in float64, one number at a time.

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from servanda.engines.low_precision.model import (
    E2M1,
    E4M3,
    E5M2,
    QUANTIZED,
    ROUNDED,
    QuantizedExperts,
    QuantizedLinear,
    RoundedCache,
    product_of_torch,
    quantize_,
    take_over,
)
from servanda.errors import MeasurementError

names = pytest.mark.parametrize("name", [*QUANTIZED])
by_inputs = pytest.mark.parametrize("name", [k for k, v in QUANTIZED.items() if v.inputs])
NO_INPUTS = [k for k, v in QUANTIZED.items() if not v.inputs]

INT4 = np.arange(-7, 8, dtype=np.float64)
INT8 = np.arange(-127, 128, dtype=np.float64)


def numbers_of(dtype):
    """Every finite number of a type of ml_dtypes, float64, ascending."""
    bits = 4 if "float4" in str(dtype) else 8
    every = np.arange(2**bits, dtype=np.uint8).view(dtype).astype(np.float64)
    return np.unique(every[np.isfinite(every)])


E4M3_NUMBERS = numbers_of(np.dtype(ml_dtypes.float8_e4m3fn))
E5M2_NUMBERS = numbers_of(np.dtype(ml_dtypes.float8_e5m2))
E2M1_NUMBERS = numbers_of(np.dtype(ml_dtypes.float4_e2m1fn))


def float_scale(amax, most):
    return amax / most


def power_scale(amax, most):
    """The least power of two with amax / scale <= most."""
    return 2.0 ** math.ceil(math.log2(amax / most)) if amax else 1.0


# of weights: numbers, largest, rows and columns of a block (None: all), rule of the scale
ORACLES = {
    "int8_weight_only": (INT8, 127, (1, None), float_scale),
    "w8a8": (INT8, 127, (1, None), float_scale),
    "int4_g32": (INT4, 7, (1, 32), float_scale),
    "w4a16_g128": (np.arange(-8, 8.0), 7.5, (1, 128), float_scale),
    "fp8_weight_only": (E4M3_NUMBERS, 448, (1, None), float_scale),
    "fp8_tensor": (E4M3_NUMBERS, 448, (None, None), float_scale),
    "fp8_channel": (E4M3_NUMBERS, 448, (1, None), float_scale),
    "fp8_block": (E4M3_NUMBERS, 448, (128, 128), float_scale),
    "fp8_e5m2_channel": (E5M2_NUMBERS, 57344, (1, None), float_scale),
    "mxfp8": (E4M3_NUMBERS, 448, (1, 32), power_scale),
    "mxfp4_weight_only": (E2M1_NUMBERS, 6, (1, 32), power_scale),
    "nvfp4": (E2M1_NUMBERS, 6, (1, 16), None),
    "nvfp4_weight_only": (E2M1_NUMBERS, 6, (1, 16), None),
}


def blocks(shape, block):
    rows, columns = (size or whole for size, whole in zip(block, shape, strict=True))
    for r in range(0, shape[0], rows):
        for c in range(0, shape[1], columns):
            yield slice(r, r + rows), slice(c, c + columns)


def scales_of(name, weight):
    """The scale of each weight, float64, by the rule of the format."""
    _, most, block, rule = ORACLES[name]
    scales = np.empty(weight.shape)
    whole = np.float32(np.abs(weight).max()) / np.float32(most * 448)
    for place in blocks(weight.shape, block):
        amax = np.abs(weight[place]).max()
        if rule is not None:
            scales[place] = rule(float(amax), most)
        else:  # NVFP4: a scale in e4m3, times one in float32 of the whole tensor
            inner = np.float32(amax) / np.float32(most) / whole
            scales[place] = np.float64(inner.astype(ml_dtypes.float8_e4m3fn)) * whole
    return scales


def linear(weight, bias=None):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        layer.weight.copy_(torch.as_tensor(weight))
        if bias is not None:
            layer.bias.copy_(torch.as_tensor(bias))
    return layer


def quantized(name, weight, bias=None):
    return QuantizedLinear(linear(weight, bias), QUANTIZED[name])


def random_weight(rows=5, columns=128, seed=0):
    """With rows of very different sizes, as outlier channels are."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(size=(rows, 1)))
    return (rng.normal(size=(rows, columns)) * sizes).astype(np.float32)


@pytest.mark.parametrize(
    ("grid", "dtype"),
    [
        (E4M3, ml_dtypes.float8_e4m3fn),
        (E5M2, ml_dtypes.float8_e5m2),
        (E2M1, ml_dtypes.float4_e2m1fn),
    ],
)
def test_a_grid_rounds_as_ml_dtypes_does_and_saturates(grid, dtype):
    """At every number of the type, between each two, and just beside each middle."""
    at = numbers_of(np.dtype(dtype))
    middle = (at[1:] + at[:-1]) / 2
    values = np.concatenate(
        [at, middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)]
    ).astype(np.float32)
    values = np.append(values, np.float32(-0.0)) if len(values) % 2 else values

    ours = grid.to_values(grid.to_codes(torch.from_numpy(values))).numpy()

    assert ours.tolist() == values.astype(dtype).astype(np.float32).tolist()
    beyond = torch.tensor([2 * grid.most, -3 * grid.most])
    assert grid.to_values(grid.to_codes(beyond)).tolist() == [grid.most, -grid.most]


@names
def test_each_weight_is_the_nearest_multiple_of_its_scale(name):
    weight = random_weight(rows=130, columns=256)
    numbers, scales = ORACLES[name][0], scales_of(name, weight)

    held = quantized(name, weight).dequantize().numpy().astype(np.float64)

    multiple = held / scales
    nearest = np.abs(multiple[..., None] - numbers).min(axis=-1)
    assert nearest.max() < 1e-5 * numbers.max()  # every weight is a number of the format
    moved = np.abs(weight - held)
    best = np.abs((weight / scales)[..., None] - numbers).min(axis=-1) * scales
    assert (moved <= best + np.abs(weight) * 1e-6 + scales * 1e-5).all()  # and none is nearer


@pytest.mark.slow
@names
@given(power=st.integers(-100, 100))
def test_scaling_a_weight_by_a_power_of_two_scales_what_is_held(name, power):
    weight = random_weight()

    held = quantized(name, weight).dequantize()
    scaled = quantized(name, np.ldexp(weight, power)).dequantize()

    assert torch.equal(scaled, torch.ldexp(held, torch.tensor(power)))


@pytest.mark.parametrize("name", NO_INPUTS)
@pytest.mark.parametrize("bias", [None, np.arange(5, dtype=np.float32)])
def test_without_a_format_of_inputs_the_product_is_that_of_the_held_weight(name, bias):
    layer = quantized(name, random_weight(), bias)
    x = random_weight(7, seed=1)

    y = layer(torch.as_tensor(x)).detach().numpy()

    held = layer.dequantize().numpy().astype(np.float64)
    np.testing.assert_allclose(y, x @ held.T + (0 if bias is None else bias), rtol=1e-5, atol=1e-4)
    if bias is not None:
        return
    coarse = layer(torch.ones(2, 128, dtype=torch.bfloat16))
    assert coarse.dtype == torch.bfloat16
    assert torch.equal(layer.dequantize(torch.bfloat16), layer.dequantize().to(torch.bfloat16))


@by_inputs
@pytest.mark.parametrize("bias", [None, np.arange(5, dtype=np.float32)])
def test_with_one_the_product_is_that_of_two_held_factors_summed_in_float32(name, bias):
    layer = quantized(name, random_weight(), bias)
    x = random_weight(7, seed=1)
    # a token has the scales that a weight of one row has
    held_x = np.stack([quantized(name, row[None]).dequantize().numpy()[0] for row in x])

    y = layer(torch.as_tensor(x)[None])[0].detach().numpy()

    held = layer.dequantize().numpy().astype(np.float64)
    expected = held_x.astype(np.float64) @ held.T + (0 if bias is None else bias)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)


@by_inputs
def test_a_token_is_rounded_alike_in_any_company(name):
    inputs, x = QUANTIZED[name].inputs, torch.as_tensor(random_weight(7, seed=1))

    assert torch.equal(inputs.rounded(x)[2:3], inputs.rounded(x[2:3]))


@pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="this torch has no public FP8 product")
@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_channel"])
def test_the_kernel_of_torch_gives_the_emulated_product(name):
    """As it runs on a GPU; torch has it for the CPU as well."""
    weight, x = random_weight(32, 64), torch.as_tensor(random_weight(16, 64, seed=1))
    layer = quantized(name, weight)
    real = product_of_torch(x, layer.codes, layer.scale, QUANTIZED[name], None)

    # it returns bfloat16, whose rounding is half of 2^-7 of a number; sums near 0 cancel
    np.testing.assert_allclose(real.float(), layer(x), rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "stored_bytes"),
    [
        ("int8_weight_only", 5 * 128 + 5 * 4),
        ("int4_g32", 5 * 128 // 2 + 5 * 4 * 4),
        ("fp8_channel", 5 * 128 + 5 * 4),
        ("nvfp4", 5 * 128 // 2 + 5 * 8 * 4),
    ],
)
def test_the_layer_keeps_codes_and_scales_and_nothing_else(name, stored_bytes):
    state = quantized(name, random_weight()).state_dict()

    assert sum(t.numel() * t.element_size() for t in state.values()) == stored_bytes


@names
def test_zeros_stay_zeros(name):
    assert not quantized(name, np.zeros((2, 128), dtype=np.float32)).dequantize().any()


@names
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_number_stays_visible_where_its_scale_reaches(name, odd):
    weight = random_weight(rows=130, columns=256)
    weight[1, 3] = odd
    whole = ORACLES[name][3] is None  # a scale of NVFP4 reaches the whole tensor
    place = next(blocks(weight.shape, (None, None) if whole else ORACLES[name][2]))
    if ORACLES[name][2] == (1, None):
        place = (1, slice(None))
    elif not whole and ORACLES[name][2][0] == 1:
        place = (1, place[1])

    finite = quantized(name, weight).dequantize().isfinite().numpy()

    assert not finite[place].any()
    assert finite.sum() == finite.size - finite[place].size


def tiny_llama(intermediate=256):
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=intermediate,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def tiny_moe():
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=128,
        moe_intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return Qwen3MoeForCausalLM(config).eval()


@names
def test_every_linear_layer_is_replaced_but_the_head_which_stays_tied(name):
    model = tiny_llama()

    quantize_(model, name)

    left = [path for path, m in model.named_modules() if isinstance(m, nn.Linear)]
    new = [path for path, m in model.named_modules() if isinstance(m, QuantizedLinear)]
    assert left == ["lm_head"]
    assert len(new) == 7
    assert model.lm_head.weight is model.model.embed_tokens.weight


@names
@torch.inference_mode()
def test_experts_are_quantised_as_the_same_matrices_in_linear_layers_are(name):
    model, layer = tiny_moe(), None
    experts = model.model.layers[0].mlp.experts
    up, down = experts.gate_up_proj.clone(), experts.down_proj.clone()
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(1))
    pick = torch.arange(9)[:, None] % 4
    weight = torch.linspace(0.1, 1, 9)[:, None]

    quantize_(model, name)
    y = experts(x, pick, weight)

    for e in range(4):
        layer = [QuantizedLinear(linear(w[e]), QUANTIZED[name]) for w in (up, down)]
        rows = pick[:, 0] == e
        gate, value = layer[0](x[rows]).chunk(2, dim=-1)
        expected = layer[1](F.silu(gate) * value) * weight[rows]
        torch.testing.assert_close(y[rows], expected)
    router = model.model.layers[0].mlp.gate
    assert isinstance(router.weight, nn.Parameter)  # routers are left as they are


@names
@torch.inference_mode()
def test_weights_that_a_sync_sends_are_quantised_as_at_the_start(name):
    old, new = tiny_moe(), tiny_moe()
    named = dict(new.state_dict())
    for model in (old, new):
        quantize_(model, name)

    assert take_over(old, named.items(), torch.float32) == named.keys()

    ids = torch.arange(8)[None]
    assert torch.equal(old(ids).logits, new(ids).logits)


def test_a_layer_that_does_not_divide_into_blocks_is_named():
    with pytest.raises(MeasurementError) as error:
        quantize_(tiny_llama(intermediate=40), "int4_g32")

    assert str(error.value) == (
        "model.layers.0.mlp.down_proj: a format with blocks of 32 input features does not hold a "
        "layer that has 40\n"
        "  hint: use a quantization with a scale for each channel, such as int8_weight_only"
    )


def test_experts_in_a_layout_of_their_own_are_refused():
    config = GptOssConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        head_dim=32,
    )

    with pytest.raises(MeasurementError) as error:
        quantize_(GptOssForCausalLM(config), "fp8_channel")

    assert str(error.value) == (
        "model.layers.0.mlp.experts: GptOssExperts stores its experts in a layout that no "
        "quantization here has\n"
        "  hint: remove quantization, or use an engine that has this architecture quantised"
    )


def test_an_expert_that_is_used_otherwise_than_by_linear_is_refused():
    experts = QuantizedExperts(torch.randn(2, 32, 32), QUANTIZED["fp8_channel"])

    with pytest.raises(MeasurementError, match="quantised experts are used by matmul"):
        torch.matmul(torch.ones(1, 32), experts[0])


def test_an_unknown_quantization_is_answered_with_the_nearest():
    with pytest.raises(MeasurementError) as error:
        quantize_(tiny_llama(), "fp8_chanel")

    assert str(error.value) == (
        "engine 'transformers' has no quantization 'fp8_chanel'\n"
        "  hint: did you mean 'fp8_channel'?"
    )


NUMBERS_OF_CACHES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}


@pytest.mark.parametrize("kind", [*ROUNDED])
def test_a_cache_holds_keys_and_values_in_its_type(kind):
    cache = RoundedCache(tiny_llama().config, kind)
    first, second = torch.randn(2, 3, 2, 5, 64, generator=torch.Generator().manual_seed(0))

    for part in (first, second):
        keys, values = cache.update(part, 2 * part, 0)

    given = torch.cat([first, second], dim=2).numpy()
    if kind in NUMBERS_OF_CACHES:
        expected = given.astype(NUMBERS_OF_CACHES[kind]).astype(np.float32)
    else:
        numbers, most = (E4M3_NUMBERS, 448) if "fp8" in kind else (INT8, 127)
        scale = np.abs(given).max(axis=-1, keepdims=True) / most
        expected = numbers[np.abs((given / scale)[..., None] - numbers).argmin(axis=-1)] * scale
    np.testing.assert_allclose(keys, expected, rtol=1e-6)
    assert torch.equal(
        values,
        RoundedCache(tiny_llama().config, kind).update(
            2 * torch.cat([first, second], dim=2), keys, 0
        )[0],
    )


def test_a_cache_of_latent_attention_is_refused():
    with pytest.raises(MeasurementError, match="keep its latent vectors"):
        RoundedCache(DeepseekV3Config(), "fp8_e4m3")
