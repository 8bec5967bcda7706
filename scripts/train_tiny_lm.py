# Trains the tiny language models that ship in models/: tokenizer first, then weights.
#
# models/tiny-lm is a 2.6 M parameter Llama on the synthetic language of corpus.py, in about
# eight minutes on two free cores.  Rows are 512 tokens long, so the model has met every position
# up to 511.  The weights are rounded to bfloat16 once, at the end: float32 and bfloat16 engines
# then start from the same numbers.
#
# models/tiny-qwen3 is for tests of what must not depend on the architecture: norms of queries and
# keys, one key-value head, another depth, another width of the MLP.  It has the same tokenizer
# and corpus, and few steps, three minutes on one core: such tests want trained weights, not good
# ones.  Its held-out losses, in nats per token: arith .42, code 1.07, json .89, prose 1.57.
#
# models/tiny-moe is a mixture of 16 experts, four of which a token is routed to in each of three
# layers: for the routes of experts.  It is trained with the loss that balances their loads.
#
#     python scripts/train_tiny_lm.py
#     python scripts/train_tiny_lm.py --architecture qwen3 --threads 1
#     python scripts/train_tiny_lm.py --architecture qwen3_moe --threads 1

import argparse
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

import corpus

MODELS = Path(__file__).resolve().parent.parent / "models"

CONTEXT = 512
VOCAB = 1024
TOKENIZER_DOCUMENTS = 3000  # a domain
TOKENIZER_SEED, TRAIN_SEED, HELDOUT_SEED = 1, 2, 3

# The share of all training tokens.  Sums are the only domain with an algorithm to learn.
SHARES = {"arith": 0.46, "code": 0.18, "json": 0.18, "prose": 0.18}
SECTION_TOKENS = (40, 600)  # documents of one domain come in runs of about this length
HELDOUT_ROWS = 16  # a domain
LOG_STEPS = 100
SMOOTHING = 0.05  # of the printed loss


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to train."""

    steps: int = 1900
    rows: int = 4
    peak: float = 3e-3
    final: float = 1e-4
    warmup_steps: int = 60
    weight_decay: float = 0.05
    clip: float = 1.0
    threads: int = 2

    def rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        turn = math.pi * (step - self.warmup_steps) / (self.steps - self.warmup_steps)
        return self.final + (self.peak - self.final) * (1 + math.cos(turn)) / 2


@dataclass(frozen=True)
class Shipped:
    """A model of the repository; its name is that of its folder in models/."""

    name: str
    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]
    layers: int
    heads: tuple[int, int]  # of queries; of keys and values
    mlp: int
    steps: int
    more: dict[str, Any] = field(default_factory=dict)  # of its config alone


SHIPPED = {
    "llama": Shipped("tiny-lm", LlamaConfig, LlamaForCausalLM, 4, (4, 2), 512, Recipe.steps),
    "qwen3": Shipped("tiny-qwen3", Qwen3Config, Qwen3ForCausalLM, 3, (4, 1), 256, steps=500),
    "qwen3_moe": Shipped(
        *("tiny-moe", Qwen3MoeConfig, Qwen3MoeForCausalLM, 3, (4, 1), 256),
        steps=600,
        more={
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "router_aux_loss_coef": 0.01,
        },
    ),
}


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every digit is a token of its own."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[corpus.END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (
        text
        for domain in corpus.DOMAINS
        for text in islice(corpus.documents(domain, "train", TOKENIZER_SEED), TOKENIZER_DOCUMENTS)
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=corpus.END_OF_TEXT,
        pad_token=corpus.END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def architecture(shipped: Shipped, eos: int) -> PreTrainedConfig:
    """Every in_features is a multiple of 256, so that block-quantised formats fit too."""
    return shipped.config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=shipped.mlp,
        num_hidden_layers=shipped.layers,
        num_attention_heads=shipped.heads[0],
        num_key_value_heads=shipped.heads[1],
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=eos,
        **shipped.more,
    )


def rows(tokenizer: PreTrainedTokenizerFast, split: corpus.Split, seed: int) -> Iterator[list]:
    """Endless rows of CONTEXT + 1 ids; a row starts with a document and changes domain."""
    rng = random.Random(f"rows/{split}/{seed}")
    sources = {domain: corpus.documents(domain, split, seed) for domain in SHARES}
    while True:
        row: list[int] = []
        while len(row) <= CONTEXT:
            (domain,) = rng.choices([*SHARES], [*SHARES.values()])
            row += section(tokenizer, sources[domain], rng.randint(*SECTION_TOKENS))
        yield row[: CONTEXT + 1]


def section(tokenizer: PreTrainedTokenizerFast, source: Iterator[str], at_least: int) -> list[int]:
    """Whole documents of one source, each closed by end-of-text."""
    ids: list[int] = []
    while len(ids) < at_least:
        ids += [*tokenizer.encode(next(source)), tokenizer.eos_token_id]
    return ids


def train(model: PreTrainedModel, data: Iterator[list], recipe: Recipe) -> None:
    """AdamW under bfloat16 autocast; prints a line every LOG_STEPS."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.97),
        fused=True,
    )
    model.train()
    # a router alone sends most tokens to few experts
    routed = {"output_router_logits": True} if hasattr(model.config, "num_experts") else {}
    started, running = time.monotonic(), 0.0
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        batch = torch.tensor(list(islice(data, recipe.rows)))
        with torch.autocast("cpu", torch.bfloat16):
            answer = model(batch[:, :-1], use_cache=False, **routed)
        loss = cross_entropy(answer.logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        if routed:
            loss = loss + model.config.router_aux_loss_coef * answer.aux_loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running += (loss.item() - running) * (SMOOTHING if step else 1)
        if (step + 1) % LOG_STEPS == 0 or step == recipe.steps - 1:
            elapsed = time.monotonic() - started
            speed = (step + 1) * recipe.rows * CONTEXT / elapsed
            print(f"step {step + 1:5d}  loss {running:.3f}  {elapsed:4.0f} s  {speed:.0f} tok/s")


@torch.no_grad()
def heldout_losses(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Mean nats per token on full rows of each domain that training has not seen."""
    model.eval()
    losses = {}
    for domain in corpus.DOMAINS:
        source = corpus.documents(domain, "heldout", HELDOUT_SEED)
        batch = torch.tensor(
            [section(tokenizer, source, CONTEXT + 1)[: CONTEXT + 1] for _ in range(HELDOUT_ROWS)]
        )
        logits = model(batch[:, :-1], use_cache=False).logits
        losses[domain] = cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()).item()
    return losses


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Hugging Face layout, weights in bfloat16."""
    eos = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=eos)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    cli = argparse.ArgumentParser(description="Train a model of models/ from nothing.")
    cli.add_argument("--architecture", choices=SHIPPED, default="llama")
    cli.add_argument("--out", type=Path, help="default: its folder in models/")
    cli.add_argument("--steps", type=int, help="default: those of the model that ships")
    cli.add_argument("--threads", type=int, default=Recipe.threads, help="1 on a busy machine")
    given = cli.parse_args()
    shipped = SHIPPED[given.architecture]
    recipe = Recipe(steps=given.steps or shipped.steps, threads=given.threads)

    disable_progress_bar()
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(TRAIN_SEED)
    tokenizer = train_tokenizer()
    model = shipped.model(architecture(shipped, tokenizer.eos_token_id))
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    train(model, rows(tokenizer, "train", TRAIN_SEED), recipe)
    save(model, tokenizer, given.out or MODELS / shipped.name)
    for domain, loss in heldout_losses(model.float(), tokenizer).items():
        print(f"held-out loss  {domain:6s} {loss:.3f} nats/token")


if __name__ == "__main__":
    main()
