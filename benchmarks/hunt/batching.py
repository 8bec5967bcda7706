# Continuous batching of Transformers, beside one request at a time: whether the greedy tokens are
# the same.  Four requests of different lengths share a batch.

from __future__ import annotations

import logging
import warnings

import torch
from transformers import GenerationConfig

from benchmarks.hunt import architectures

NAMES = ("cohere2", "deepseek_v3", "falcon", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss")
NAMES += ("llama", "llama4_text", "mistral", "mixtral", "olmo3", "opt", "phi3", "qwen3", "smollm3")
LENGTHS = (29, 18, 7, 33)
NEW = 16


@torch.no_grad()
def measured(name: str) -> dict[str, float | str]:
    """Of each request 0 if its tokens are the same, infinity if not, or why there are none."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    noise = torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, 1000, (1, n), generator=noise) for n in LENGTHS]
    model = architectures.model(name)
    usual = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
    shared = GenerationConfig(eos_token_id=-1, num_blocks=64, max_batch_tokens=64, **usual)
    try:
        replies = model.generate_batch(
            inputs=[p[0].tolist() for p in prompts], generation_config=shared, progress_bar=False
        )
    except Exception as error:  # a library raises anything
        text = (str(error).splitlines() or [""])[0]
        return {f"{n} tokens": f"{type(error).__name__}: {text[:90]}" for n in LENGTHS}
    found: dict[str, float | str] = {}
    by_prompt = {tuple(reply.prompt_ids): reply for reply in replies.values()}
    for prompt in prompts:
        length = prompt.shape[1]
        reply = by_prompt.get(tuple(prompt[0].tolist()))
        alone = model.generate(prompt, eos_token_id=None, **usual)[0, length:].tolist()
        together = [] if reply is None else list(reply.generated_tokens)[:NEW]
        same = 0.0 if together == alone else float("inf")
        found[f"{length} tokens"] = same if together else "the request failed: an error is logged"
    return found
