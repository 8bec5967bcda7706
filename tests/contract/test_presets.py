# Presets: contracts that lint clean, cite their limits, and fit what differs.

import itertools
import re

import pytest

from servanda.contract.model import Kernel
from servanda.contract.presets import PRESETS, fitting, preset_text, title
from servanda.engines import engine_names
from servanda.errors import ContractError
from tests.kit import parse

LIMITS = {  # whole, slice: mean total variation
    "vllm-upgrade": (0.010, 0.015),
    "new-gpu": (0.010, 0.015),
    "fp8": (0.015, 0.030),
    "fp8-kv": (0.015, 0.030),
    "nvfp4": (0.040, 0.080),
    "nemo-grpo": (0.025, 0.025),
    "verl-sync": (0.025, 0.025),
    "trl": (0.025, 0.025),
    "slime": (0.025, 0.025),
    "verl-async": (0.050, 0.050),
    "prime-rl": (0.050, 0.050),
    "fp8-rollout": (0.050, 0.050),
    "mxfp8-rollout": (0.025, 0.025),
    "nvfp4-rollout": (0.050, 0.050),
}


def read(name):
    return parse(preset_text(name), name, engines=engine_names())[0]


def enforced(name, slice_):
    tv = [c for c in read(name).statistical if c.metric == "tv" and c.enforced]
    return next(c.at_most for c in tv if slice_ in c.slices)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_contract_with_the_limits_we_sign(name):
    contract = read(name)
    assert contract.metadata.name == name and title(name)
    assert (enforced(name, "all"), enforced(name, "depth")) == LIMITS[name]
    # a trainer's step uses these tokens; a promotion speaks of tomorrow's
    claim = "population" if PRESETS[name] == "serving" else "realised"
    assert contract.claim == claim


@pytest.mark.parametrize("name", PRESETS)
def test_every_limit_has_its_reason_above_it(name):
    lines = preset_text(name).splitlines()
    warns = re.compile(r"-warn|id: fidelity")
    for above, line in itertools.pairwise(lines):
        if "at_most:" in line or "at_least:" in line:
            assert above.lstrip().startswith("#") or warns.search(line), line


def kernel(quantization):
    return Kernel(engine="transformers", model="m", quantization=quantization)


@pytest.mark.parametrize(
    ("today", "candidate", "name", "why"),
    [
        (None, None, "vllm-upgrade", "neither is quantised: a change of build, not of weights"),
        ("w8a8", "w8a8", "vllm-upgrade", "both are w8a8: a change of build, not of weights"),
        (None, "int8_dynamic", "fp8", "B is int8_dynamic and A is not quantised"),
        ("w8a8", None, "fp8", "B is not quantised and A is w8a8"),
        ("w8a8", "int4_g32", "nvfp4", "B is int4_g32 and A is w8a8"),
        (None, "w4a16_g128", "nvfp4", "B is w4a16_g128 and A is not quantised"),
        (None, "fp8_e5m2_channel", "fp8", "B is fp8_e5m2_channel and A is not quantised"),
        (None, "nvfp4", "nvfp4", "B is nvfp4 and A is not quantised"),
    ],
)
def test_what_differs_chooses_the_preset_and_says_why(today, candidate, name, why):
    assert fitting(kernel(today), kernel(candidate)) == (name, why)


def test_another_cache_has_a_preset_of_its_own():
    today, candidate = kernel(None), kernel(None).model_copy(update={"kv_cache": "fp8_e4m3"})

    why = "the cache of B is fp8_e4m3 and that of A is the engine's own"
    assert fitting(today, candidate) == ("fp8-kv", why)


def test_an_unknown_preset_gets_a_suggestion():
    with pytest.raises(ContractError) as caught:
        preset_text("nvpf4")
    assert str(caught.value) == "there is no preset 'nvpf4'\n  hint: did you mean 'nvfp4'?"
    assert caught.value.exit_code == 2
