# The trained policy: a Hugging Face module in float32, and its logprobs of given answers.
#
# A prompt is run once for all of its answers: its keys and values are shared, and gradients
# flow through them.
# Axes: P prompts, S answers, T columns of a prompt, W tokens of an answer, V vocabulary.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.experiment.adapter import with_adapter
from servanda.engines.checkpoint import quiet

Ids = Sequence[Sequence[int]]


def open_policy(model: str | Path, adapter_rank: int = 0, seed: int = 0) -> nn.Module:
    """The module that is trained, in float32 and eager; all of it, or an adapter on it."""
    with quiet():
        module = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
    module.eval()  # no dropout: training and scoring are one function
    return with_adapter(module, adapter_rank, seed) if adapter_rank else module


def logp_after(
    module: Any, prompts: Ids, answers: Ids, group_S: ArrayLike, temperature: float
) -> Tensor:
    """Logprobs of every token at each place of an answer, [S, W, V], nats.

    Args:
        prompts: [P].
        answers: [S]; columns after the last token of one are of no use.
        group_S: the prompt of each answer.
    """
    columns = max(map(len, prompts))
    ids_PT = torch.tensor([[0] * (columns - len(p)) + [*p] for p in prompts])
    real_PT = torch.tensor([[0] * (columns - len(p)) + [1] * len(p) for p in prompts])
    position_PT = (real_PT.cumsum(-1) - 1).clamp_min(0)
    cache = DynamicCache(config=module.config)
    first_P1V = module(
        input_ids=ids_PT,
        attention_mask=real_PT,
        position_ids=position_PT,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    rows_S = torch.as_tensor(group_S)
    logits = [first_P1V[rows_S]]
    fed_SW = padded(answers)[:, :-1]
    if fed_SW.shape[1]:
        cache.batch_select_indices(rows_S)
        real_ST = torch.cat([real_PT[rows_S], torch.ones_like(fed_SW)], dim=-1)
        logits.append(
            module(
                input_ids=fed_SW,
                attention_mask=real_ST,
                position_ids=position_PT[rows_S, -1:] + 1 + torch.arange(fed_SW.shape[1]),
                past_key_values=cache,
                use_cache=True,
            ).logits
        )
    return torch.log_softmax(torch.cat(logits, dim=1) / temperature, dim=-1)


def logprobs_of(
    module: Any, prompts: Ids, answers: Ids, group_S: ArrayLike, temperature: float
) -> Tensor:
    """Logprobs of the tokens of answers, [S, W], nats; 0 after an answer's last token."""
    logp_SWV = logp_after(module, prompts, answers, group_S, temperature)
    logp_SW = logp_SWV.gather(-1, padded(answers)[..., None])[..., 0]
    return torch.where(mask_of(answers), logp_SW, 0.0)


def padded(answers: Ids) -> Tensor:
    """Token ids [S, W], 0 after an answer's last."""
    width = max(map(len, answers))
    return torch.tensor([[*answer, *[0] * (width - len(answer))] for answer in answers])


def mask_of(answers: Ids) -> Tensor:
    """Whether an answer has a token there, [S, W]."""
    length_S1 = torch.tensor([len(answer) for answer in answers])[:, None]
    return torch.arange(int(length_S1.max())) < length_S1
