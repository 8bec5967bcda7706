# Routes of experts that engine `transformers` records, against the router's own numbers.

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines.checkpoint import quiet
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


def made(folder, kind):
    """A small model of random weights, and the tokenizer of a shipped one."""
    config = transformers.AutoConfig.for_model(kind, **SMALL | MIXTURES[kind])
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


def test_a_dense_model_has_none():
    engine = opened(ROOT / "models" / "tiny-lm")
    assert engine.generate(Batch((0, 1, 2), PROMPTS, 2), Sampling(), 1).routes is None


def test_a_cached_token_is_routed_by_no_forward(tmp_path):
    made(tmp_path, "qwen3_moe")
    trace = opened(tmp_path, prefix_cache=2).generate(Batch((0, 1), PROMPTS[:2], 2), Sampling(), 1)
    assert trace.routes is None
