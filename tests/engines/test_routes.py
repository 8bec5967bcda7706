# Routes of experts that engine `transformers` records, against the router's own numbers.

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines.checkpoint import quiet
from servanda.engines.worker import spawn
from servanda.errors import MeasurementError
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch

ROOT = Path(__file__).parents[2]
LAYERS, EXPERTS, PICKED, WIDTH = 3, 8, 2, 6
PROMPTS = ((5, 6, 7, 8, 9), (3, 4), (10, 11, 12))
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": PICKED,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": 0,
}
# architecture -> what its config has beside
MIXTURES = {
    "qwen3_moe": {"num_experts": EXPERTS, "head_dim": 32},
    "qwen2_moe": {"num_experts": EXPERTS, "shared_expert_intermediate_size": 32},
    "olmoe": {"num_experts": EXPERTS},
    "mixtral": {"num_local_experts": EXPERTS},
    "gpt_oss": {"num_local_experts": EXPERTS, "head_dim": 32},
}
# a router that picks groups of experts before it picks experts
GROUPED = {
    "deepseek_v3": {
        "n_routed_experts": EXPERTS,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 0,
        "num_key_value_heads": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
}


def made(folder, kind):
    """A small model of random weights, and the tokenizer of a shipped one."""
    config = transformers.AutoConfig.for_model(kind, **SMALL | (MIXTURES | GROUPED)[kind])
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "models" / "tiny-lm" / name, folder)
    return model


def opened(folder, **kernel):
    kernel = {"engine": "transformers", "model": str(folder), "batch_size": 3} | kernel
    return open_engine(Kernel(**kernel))


def routed(model, text, at):
    """Experts of the positions from `at` on, [T, L, K]: the largest of what its routers report."""
    with torch.no_grad():
        logits_L = model(torch.tensor([text]), output_router_logits=True).router_logits
    best_L = [row.float().topk(PICKED).indices.sort().values for row in logits_L]
    return torch.stack(best_L, dim=1)[at:].numpy()


@pytest.mark.parametrize("kind", MIXTURES)
def test_they_are_those_of_the_position_that_predicts_the_token(tmp_path, kind):
    model, engine = made(tmp_path, kind), opened(tmp_path)
    drawn = engine.generate(Batch((0, 1, 2), PROMPTS, WIDTH), Sampling(), 1)
    given = Batch((0, 1, 2), PROMPTS, WIDTH, drawn.continuations)

    expected = np.concatenate(
        [
            routed(model, [*prompt, *new[:-1]], len(prompt) - 1)
            for prompt, new in zip(PROMPTS, drawn.continuations, strict=True)
        ]
    )
    assert drawn.routes.shape == (len(drawn.token_N), LAYERS, PICKED)
    for trace in (
        drawn,
        *(engine.score(given, Sampling(), path) for path in ("decode", "prefill")),
    ):
        assert np.array_equal(trace.routes, expected)


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_gates_are_the_scores_of_the_picked_experts(tmp_path, kind):
    model, engine = made(tmp_path, kind), opened(tmp_path)
    batch, drawn = given(engine)

    with torch.no_grad():
        logits_L = [
            model(torch.tensor([[*p, *new[:-1]]]), output_router_logits=True).router_logits
            for p, new in zip(batch.prompts, batch.continuations, strict=True)
        ]
    score_NLE = np.concatenate(
        [
            torch.stack(layers, dim=1)[len(p) - 1 :].numpy()
            for p, layers in zip(batch.prompts, logits_L, strict=True)
        ]
    )
    picked_NLK = np.take_along_axis(score_NLE, drawn.routes.astype(int), axis=-1)
    # of a softmax over all experts and of one over the picked ones the shares are the same
    share_NLK = torch.from_numpy(picked_NLK).softmax(dim=-1).numpy()
    for trace in (
        drawn,
        *(engine.score(batch, Sampling(), path) for path in ("decode", "prefill")),
    ):
        assert np.array_equal(trace.gates[..., 0], trace.routes)
        gate_NLK = trace.gates[..., 1]
        np.testing.assert_allclose(
            gate_NLK / gate_NLK.sum(axis=-1, keepdims=True), share_NLK, atol=1e-5
        )


def test_a_dense_model_has_none():
    engine = opened(ROOT / "models" / "tiny-lm")
    drawn = engine.generate(Batch((0, 1, 2), PROMPTS, 2), Sampling(), 1)
    assert drawn.routes is None and drawn.gates is None


def test_a_cached_token_is_routed_by_no_forward(tmp_path):
    made(tmp_path, "qwen3_moe")
    trace = opened(tmp_path, prefix_cache=2).generate(Batch((0, 1), PROMPTS[:2], 2), Sampling(), 1)
    assert trace.routes is None


# replay: a kernel that scores with the experts of another


def given(engine, seed=1):
    drawn = engine.generate(Batch((0, 1, 2), PROMPTS, WIDTH), Sampling(), seed)
    return Batch((0, 1, 2), PROMPTS, WIDTH, drawn.continuations), drawn


def others(batch, seed=0):
    """Experts of nobody's choice."""
    rng = np.random.default_rng(seed)
    return tuple(
        np.sort(
            rng.permuted(np.tile(np.arange(EXPERTS), (len(row), LAYERS, 1)), axis=-1)[..., :PICKED]
        ).astype(np.int16)
        for row in batch.continuations
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", ["prefill", "decode"])
@pytest.mark.parametrize("kind", MIXTURES | GROUPED)
def test_the_replay_of_its_own_experts_changes_no_bit(tmp_path, kind, path):
    made(tmp_path, kind)
    engine = opened(tmp_path)
    batch, _ = given(engine)
    own = engine.score(batch, Sampling(), path)
    again = engine.score(replace(batch, routes=own.routes_S), Sampling(), path)
    for name, column in own.columns.items():
        np.testing.assert_array_equal(again.columns[name], column, err_msg=name)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("kind", MIXTURES | GROUPED)
def test_given_experts_are_used_in_every_layer_on_both_paths(tmp_path, kind, chunk):
    made(tmp_path, kind)
    engine = opened(tmp_path, prefill_chunk=chunk)
    batch, drawn = given(engine)
    routes = others(batch)
    prefill, decode = (
        engine.score(replace(batch, routes=routes), Sampling(), path)
        for path in ("prefill", "decode")
    )
    np.testing.assert_array_equal(prefill.routes, np.concatenate(routes))
    np.testing.assert_array_equal(decode.routes, np.concatenate(routes))
    np.testing.assert_allclose(prefill.columns["logp"], decode.columns["logp"], atol=1e-4)
    assert np.abs(prefill.columns["logp"] - drawn.columns["logp"]).max() > 0.01
    own = engine.score(batch, Sampling(), "prefill")  # nothing is left behind
    np.testing.assert_allclose(own.columns["logp"], drawn.columns["logp"], atol=1e-4)


def test_a_layer_and_a_token_without_a_given_expert_pick_by_themselves(tmp_path):
    made(tmp_path, "qwen3_moe")
    engine = opened(tmp_path)
    batch, _ = given(engine)
    routes = others(batch)
    for route in routes:
        route[:, 1] = -1
        route[-1:] = -1
    found = engine.score(replace(batch, routes=routes), Sampling(), "prefill").routes
    known = np.concatenate(routes) >= 0
    np.testing.assert_array_equal(found[known], np.concatenate(routes)[known])


@pytest.mark.slow
def test_given_experts_travel_to_the_process_of_an_engine(tmp_path):
    made(tmp_path, "qwen3_moe")
    here = opened(tmp_path)
    batch, _ = given(here)
    batch = replace(batch, routes=others(batch))
    there = spawn(here.kernel, "train")
    try:
        found = there.score(batch, Sampling(), "prefill")
    finally:
        there.close()
    wanted = here.score(batch, Sampling(), "prefill")
    np.testing.assert_array_equal(found.columns["logp"], wanted.columns["logp"])


def test_the_experts_of_another_mixture_are_refused(tmp_path):
    made(tmp_path, "qwen3_moe")
    engine = opened(tmp_path)
    batch, _ = given(engine)
    fewer = tuple(route[:, :2] for route in others(batch))
    with pytest.raises(MeasurementError, match="are of 2 layers, and this model has 3 routers"):
        engine.score(replace(batch, routes=fewer), Sampling(), "prefill")
    one = tuple(route[..., :1] for route in others(batch))
    with pytest.raises(
        MeasurementError,
        match=r"1 experts a token were recorded, and a router \(Qwen3MoeTopKRouter\) has 0 calls",
    ):
        engine.score(replace(batch, routes=one), Sampling(), "prefill")
    more = tuple(route + EXPERTS for route in others(batch))
    with pytest.raises(MeasurementError, match=r"expert \d+ was recorded, and a layer of this"):
        engine.score(replace(batch, routes=more), Sampling(), "prefill")
    with pytest.raises(MeasurementError, match="of 3 layers, and this model has 0 routers"):
        opened(ROOT / "models" / "tiny-lm").score(
            replace(batch, routes=others(batch)), Sampling(), "prefill"
        )


def test_a_prefix_cache_and_a_replay_exclude_each_other(tmp_path):
    made(tmp_path, "qwen3_moe")
    engine = opened(tmp_path, prefix_cache=2)
    batch, _ = given(engine)
    with pytest.raises(MeasurementError, match="exclude each other"):
        engine.score(replace(batch, routes=others(batch)), Sampling(), "decode")


def test_a_replay_that_fails_leaves_nothing_to_the_next_call(tmp_path):
    made(tmp_path, "qwen3_moe")
    engine = opened(tmp_path)
    batch, drawn = given(engine)
    odd = tuple(route + EXPERTS for route in others(batch))
    with pytest.raises(MeasurementError):
        engine.score(replace(batch, routes=odd), Sampling(), "decode")
    again = engine.generate(replace(batch, continuations=()), Sampling(), 1)
    np.testing.assert_array_equal(again.routes, drawn.routes)
    np.testing.assert_array_equal(again.columns["logp"], drawn.columns["logp"])
