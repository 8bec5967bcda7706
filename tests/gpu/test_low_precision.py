# Low precision on a GPU: the emulation has the CPU's bits, and FP8 products are the device's own.

import numpy as np
import pytest
import torch

from servanda.engines.low_precision.model import (
    QUANTIZED,
    ROUNDED,
    QuantizedLinear,
    has_tensor_cores,
)
from tests.gpu.test_gpu import MIXED, batch, logits, opened

OWN = ("fp8_tensor", "fp8_channel")  # multiplied by tensor cores where a GPU has them for FP8


def drawn(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def layer(name):
    linear = torch.nn.Linear(128, 64, bias=False)
    linear.weight.data.copy_(drawn(64, 128, 0))
    return QuantizedLinear(linear, QUANTIZED[name])


@pytest.mark.parametrize("name", [*QUANTIZED])
def test_a_device_holds_the_bits_of_the_cpu(name):
    weight, x = drawn(64, 128, 0), drawn(16, 128, 1)
    for format_, given in ((QUANTIZED[name].weight, weight), (QUANTIZED[name].inputs, x)):
        if format_ is not None:
            assert torch.equal(format_.rounded(given.cuda()).cpu(), format_.rounded(given))


@pytest.mark.parametrize("name", [*QUANTIZED])
def test_a_product_is_that_of_the_cpu_up_to_its_sum(name):
    on_cpu, x = layer(name), drawn(16, 128, 1)
    own = has_tensor_cores(torch.device("cuda"), QUANTIZED[name])
    assert own == (name in OWN and torch.cuda.get_device_capability() >= (8, 9))
    expected = on_cpu(x).detach()

    found = layer(name).cuda()(x.cuda()).detach().cpu()

    # tensor cores return bfloat16, and sum with fewer bits than float32 has
    torch.testing.assert_close(
        found, expected, rtol=2**-6 if own else 1e-4, atol=0.05 if own else 1e-3
    )


@pytest.mark.parametrize("kind", [*ROUNDED])
@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_a_cache_in_low_precision_is_that_of_the_cpu(kind, path):
    found = logits(opened(device="cuda", kv_cache=kind), path, batch(*MIXED))
    expected = logits(opened(kv_cache=kind), path, batch(*MIXED))

    # a key at the middle of two numbers of the type may round to either
    assert np.median(np.abs(found - expected)) < 1e-3
