# The trainer's scores as its engine receives it, and with groups of weights as at the start.

import copy

import numpy as np
import pytest
import torch

from servanda.errors import ContractError
from servanda.rl.follow.follow import rows_of
from servanda.rl.follow.sent_weights import SentWeights
from servanda.rl.follow.stale_parts import StaleParts
from servanda.rl.sync_drill.trainee import forward_logprobs
from tests.rl.sync_drill.toys import VOCABULARY, Toy
from tests.trainers import Lora

ROWS = rows_of(VOCABULARY)


def bits(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_scores_are_those_of_a_module_of_rounded_weights():
    toy = Toy()
    before, other = bits(toy), copy.deepcopy(toy)
    for parameter in other.parameters():
        parameter.data = parameter.data.bfloat16().double()

    found = SentWeights(toy, "bfloat16")(ROWS)

    assert np.array_equal(found, forward_logprobs(other.eval(), ROWS))
    assert not np.allclose(found, forward_logprobs(copy.deepcopy(toy).eval(), ROWS), atol=1e-6)
    assert same(before, bits(toy)) and toy.training
    assert toy.lm_head.weight is toy.embed.weight


def test_a_small_update_of_bfloat16_weights_is_none():
    toy = Toy()
    for parameter in toy.parameters():
        parameter.data = parameter.data.bfloat16().double()
    sent = SentWeights(toy, "bfloat16")
    before = sent(ROWS)
    with torch.no_grad():
        for parameter in toy.parameters():
            parameter *= 1 + 1e-4

    assert np.array_equal(sent(ROWS), before)
    assert not np.array_equal(SentWeights(toy)(ROWS), before)


def test_adapters_are_merged_before_they_are_rounded():
    toy, other = Toy(), Toy()
    lora = Lora(toy.layers[0].attn, seed=3).double()
    toy.layers[0].attn = lora
    merged = other.layers[0].attn.weight.detach() + lora.get_delta_weight("default").detach()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(parameter.bfloat16())
        other.layers[0].attn.weight.copy_(merged.bfloat16())
    before = bits(toy)

    found = SentWeights(toy, "bfloat16")(ROWS)

    assert np.array_equal(found, forward_logprobs(other.eval(), ROWS))
    assert same(before, bits(toy))


def test_the_weights_are_put_back_if_scoring_raises():
    toy = Toy()
    before = bits(toy)

    def fails(rows):
        raise RuntimeError("out of memory")

    for scores in (SentWeights(toy, "bfloat16", fails), StaleParts(toy, fails).scores):
        with pytest.raises(RuntimeError, match="out of memory"):
            scores(ROWS)
        assert same(before, bits(toy)) and toy.training


def test_a_dtype_that_torch_lacks_is_refused():
    with pytest.raises(ContractError, match="torch has no dtype 'bf16'"):
        SentWeights(Toy(), "bf16")


def test_a_group_is_scored_as_at_the_start_and_the_others_as_now():
    toy = Toy()
    start, stale = copy.deepcopy(toy).eval(), StaleParts(toy)
    with torch.no_grad():
        for parameter in toy.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    before, other = bits(toy), copy.deepcopy(toy).eval()
    other.layers[1].mlp = start.layers[1].mlp

    found = stale.scores(ROWS)

    assert [*found] == stale.names and "layers.1.mlp" in found
    assert np.array_equal(found["layers.1.mlp"], forward_logprobs(other, ROWS))
    assert [*stale.scores(ROWS, ["layers.0.attn"])] == ["layers.0.attn"]
    assert same(before, bits(toy))
