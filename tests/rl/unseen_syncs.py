# Weight syncs, faulty and healthy, that were written without a look at how the drill works or which
# faults it knows: each has a real sender and receiver, and a fault is a mistake in one of them.

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import transformers
from torch import nn
from torch.nn.functional import linear
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from servanda.rl.sync_drill.trainee import Trainee, forward_logprobs
from tests.rl.served_weights import LONGEST, TOKENS, small_model

WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "moe_intermediate_size": 24}
COUNTS = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
SHAPE = WIDTHS | COUNTS | EXPERTS | {"vocab_size": TOKENS, "max_position_embeddings": LONGEST}
RANK, ALPHA, RANK_PATTERN = 4, 4, {"down_proj": 16}
QKV, GATE_UP = [f"self_attn.{x}_proj" for x in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]
NORMED = {"input_layernorm": QKV, "post_attention_layernorm": GATE_UP}  # a norm, what is after it
LAYERS = ("model.layers.0.", "model.layers.1.")


class Case(NamedTuple):
    name: str
    what: str
    kind: str
    causes: str
    make: Callable


CASES: list[Case] = []


def case(kind, trainer, causes="", engines=1, engine=None, before=None):
    """Adds a sync of a state `s` and of a snapshot of the trainer's weights, `now`."""

    def added(sync):
        def make():
            model = trainer()
            opened = [engine() if engine else copy.deepcopy(model) for _ in range(engines)]
            s = SimpleNamespace(trainer=model, engines=opened, engine=opened[0], before=before)
            s.serving, s.held, s.syncs = opened, state(model), 0
            s.random = torch.Generator().manual_seed(0)

            @torch.no_grad()
            def synced():
                s.syncs += 1
                sync(s, state(model))

            if engine:  # one of another form is begun with the trainer's weights
                synced()
            return Trainee(model, synced, partial(dealt, s))

        what = " ".join(sync.__doc__.split())
        CASES.append(Case(sync.__name__, what, kind, causes, make))
        return sync

    return added


def dealt(s, rows):
    """Logprobs of rows that are dealt out in turn to the engines that serve."""
    out, n = [None] * len(rows), len(s.serving)
    for rank, engine in enumerate(s.serving[: len(rows)]):
        if s.before:
            s.before(s, engine)
        out[rank::n] = forward_logprobs(engine, rows[rank::n])
    return out


def built(family, **more):
    config = getattr(transformers, f"{family}Config")(initializer_range=0.2, **(SHAPE | more))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for bias in [w for name, w in model.named_parameters() if name.endswith("bias")]:
            nn.init.normal_(bias, std=0.2)  # they begin as zeros
    return model


def state(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@torch.no_grad()
def load(model, named):
    held = dict(model.named_parameters())
    for name, value in named.items():
        held[name].copy_(value)


def int8(weight, dim=None):
    """Symmetric int8 values and their scale: of the tensor, or of each of its rows."""
    top = weight.abs().max() if dim is None else weight.abs().amax(dim, keepdim=True)
    scale = top.clamp_min(1e-8) / 127
    return torch.round(weight / scale).to(torch.int8), scale


class LoraLinear(nn.Module):
    def __init__(self, base, rank, scale):
        super().__init__()
        (outputs, inputs), random = base.weight.shape, torch.Generator().manual_seed(rank)
        self.weight, self.scale = base.weight, scale
        self.lora_a = nn.Parameter(0.2 * torch.randn(rank, inputs, generator=random))
        self.lora_b = nn.Parameter(0.1 * torch.randn(outputs, rank, generator=random))

    def forward(self, x):
        return linear(x, self.weight) + self.scale * linear(linear(x, self.lora_a), self.lora_b)


def lora_model(slot=None):
    """Adapters as they are trained, or an engine's: slots of one rank, and no scale."""
    model = small_model()
    for layer in model.model.layers:
        for block, name in ((layer.self_attn, "q_proj"), (layer.mlp, "down_proj")):
            rank = slot or RANK_PATTERN.get(name, RANK)
            lora = LoraLinear(getattr(block, name), rank, 1.0 if slot else ALPHA / rank)
            setattr(block, name, lora)
    return model


def of_two_ranks(name, value, bias_ranks):
    """The weight that two tensor-parallel ranks' shards of a GPT-2 weight amount to."""
    if "c_attn" in name:  # its thirds are the queries, the keys and the values
        thirds = value.chunk(3, -1)
        ranks = [torch.cat([third.chunk(2, -1)[r] for third in thirds], -1) for r in (0, 1)]
        pairs = zip(*(rank.chunk(3, -1) for rank in ranks), strict=True)
        return torch.cat([part for pair in pairs for part in pair], -1)
    if "c_proj.bias" in name:  # each rank adds its own before the sum over ranks
        return sum(value if rank in bias_ranks else torch.zeros_like(value) for rank in (0, 1))
    dim = 0 if "c_proj" in name else -1
    return torch.cat(value.chunk(2, dim), dim) if "c_" in name else value


@case("fault", small_model, "Sparse changes are written at wrong places; dense ones arrive.")
def sparse_gap_bytes(s, now):
    """A sparse sync sends each tensor's changed values, with their places as gaps from the one
    before. A gap is one byte: one of 256 or more wraps, and the value lands elsewhere."""
    for name, weight in now.items():
        places = (weight != s.held[name]).flatten().nonzero().flatten()
        gaps = torch.diff(places, prepend=places.new_zeros(1)).to(torch.uint8)
        target = s.engine.get_parameter(name).view(-1)
        target[gaps.long().cumsum(0)] = weight.flatten()[places]
    s.held = now


@case(
    "fault",
    partial(small_model, tied=False, seed=1),
    "A tensor that changed at one sync and not at the next is old again after the next.",
    engines=2,
)
def shadow_buffer(s, now):
    """The engine has two buffers of weights: a sync writes the tensors that changed into the idle
    one and swaps. The idle buffer lacks what the sync before wrote, so those tensors go back."""
    load(s.engines[1], {n: v for n, v in now.items() if not torch.equal(v, s.held[n])})
    s.engines.reverse()
    s.serving, s.held = s.engines[:1], now


@case(
    "fault",
    partial(built, "Qwen3Moe"),
    "Redundant copies of some experts are not updated, and some requests use those.",
    engines=2,
)
def redundant_experts(s, now):
    """The engine keeps a second copy of the busiest experts, and each data-parallel rank uses the
    copy near it. A sync looks up one slot per expert, so second copies keep their first weights."""
    slots_hold, nearest = [0, 1, 2, 3, 0, 2], ([0, 1, 2, 3], [4, 1, 5, 3])
    experts = [n for n in now if ".experts." in n]
    if s.syncs == 1:
        s.slots = {n: s.held[n][slots_hold] for n in experts}
    for name in experts:
        for expert, value in enumerate(now[name]):
            s.slots[name][slots_hold.index(expert)] = value
    for rank, places in zip(s.engines, nearest, strict=True):
        load(rank, now | {n: s.slots[n][places] for n in experts})


@case("fault", lora_model, "down_proj's adapter is merged 4 times too large.", engine=small_model)
def lora_rank_pattern(s, now):
    """The trainer's adapters have rank 4, and rank 16 in down_proj by a rank pattern; a sync merges
    them. It scales each by alpha over the rank of the config, not over that of the layer."""
    for name in [n for n in now if n.endswith("lora_a")]:
        stem = name.removesuffix("lora_a")
        product = now.pop(stem + "lora_b") @ now.pop(name)
        now[stem + "weight"] += ALPHA / RANK * product
    load(s.engine, now)


@case(
    "fault",
    partial(small_model, seed=2),
    "Parts of a fused layer (q and k, gate) are dequantised with the scale of another part.",
)
def fused_scale(s, now):
    """The engine has int8 weights, with one scale for each of the fused QKV and gate-up tensors. A
    sync quantises each part by its own scale, and the part that comes last leaves its scale."""
    for layer in LAYERS:
        for parts in (QKV, GATE_UP):
            fused = SimpleNamespace(values={}, scale=None)
            for name in [f"{layer}{part}.weight" for part in parts]:
                fused.values[name], fused.scale = int8(now[name])
            now |= {name: values * fused.scale for name, values in fused.values.items()}
    load(s.engine, now)


@case(
    "fault",
    partial(small_model, tied=False),
    "The layers' norm weights lag one sync behind the other weights.",
)
def folded_norms(s, now):
    """The engine folds the weights of each norm into the projections after it, as they arrive one
    by one. A layer's norms arrive after its projections, which so get the norms of last time."""
    norm_of = {f"{n}{p}": f"{n}{norm}" for n in LAYERS for norm in NORMED for p in NORMED[norm]}
    for name, value in now.items():
        if norm := norm_of.get(name.removesuffix(".weight")):
            value = value * s.held[f"{norm}.weight"]
        elif "layernorm" in name:
            s.held[name], value = value, torch.ones_like(value)
        load(s.engine, {name: value})


def restarted(s, engine):
    """A replica ends after each four batches, the one later than the other."""
    engine.batches = getattr(engine, "batches", 2 * s.engines.index(engine)) + 1
    if engine.batches % 4 == 0:
        load(engine, s.held)


@case(
    "fault",
    partial(small_model, seed=3),
    "A replica that restarts between syncs serves an old checkpoint until the next sync.",
    engines=2,
    before=restarted,
)
def restarted_replica(s, now):
    """A sync broadcasts to two replicas, which are restarted after so many batches each. A
    restarted one loads the last checkpoint, that of every fifth sync, and serves it."""
    if s.syncs % 5 == 0:
        s.held = now
    for replica in s.engines:
        load(replica, now)


@case("fault", partial(built, "Mistral"), "From the tenth sync on the engine loads the ninth's.")
def latest_by_text(s, now):
    """A sync saves a checkpoint under the name of its step, and has the engine load the latest. The
    latest is the last in the order of text, so that from step 10 on it is step 9."""
    s.folder = getattr(s, "folder", {}) | {f"step_{s.syncs}": now}
    load(s.engine, s.folder[sorted(s.folder)[-1]])


@case("fault", partial(built, "GPT2"), "Biases of row-parallel c_proj are doubled.")
def bias_of_each_rank(s, now):
    """The engine runs GPT-2 on two tensor-parallel ranks, and sums their partial results in the
    output projections. A sync gives both ranks the whole bias of these, which so counts twice."""
    load(s.engine, {n: of_two_ranks(n, v, bias_ranks=(0, 1)) for n, v in now.items()})


@case("fault", partial(built, "Qwen3"), "A buffer, rotary inv_freq, is lost: positions are void.")
def buffers_after_sleep(s, now):
    """The engine sleeps while the trainer works, which frees all its memory; a sync wakes it and
    sends the parameters. The rotary frequencies are a buffer, which nobody restores."""
    for tensor in (*s.engine.parameters(), *s.engine.buffers()):
        tensor.zero_()  # new pages
    load(s.engine, now)


@case("healthy", partial(small_model, seed=4), engine=partial(small_model, tied=False))
def rotated_residual(s, now):
    """The engine holds its residual stream in another basis, as rotated quantisation schemes do,
    with the norms folded in. Each sync rotates all weights anew, so the function is the same."""
    turn = torch.linalg.qr(torch.randn(32, 32, generator=s.random)).Q
    embedding = now["model.embed_tokens.weight"]
    now["lm_head.weight"] = embedding * now["model.norm.weight"] @ turn
    now["model.embed_tokens.weight"] = embedding @ turn
    for layer in LAYERS:
        for norm, parts in NORMED.items():
            for name in [f"{layer}{part}.weight" for part in parts]:
                now[name] = now[name] * now[f"{layer}{norm}.weight"] @ turn
        for name in (f"{layer}self_attn.o_proj.weight", f"{layer}mlp.down_proj.weight"):
            now[name] = turn.T @ now[name]
    load(s.engine, {n: torch.ones_like(v) if v.dim() == 1 else v for n, v in now.items()})


@case("healthy", partial(small_model, tied=False, seed=5))
def int8_rows(s, now):
    """The engine has int8 projections with a scale for each output row. Each sync quantises the
    weights it sends, and sends values and scales together."""
    for name in [n for n in now if "proj" in n]:
        values, scale = int8(now[name], -1)
        now[name] = values * scale
    load(s.engine, now)


@case("healthy", partial(small_model, seed=6))
def int8_differences(s, now):
    """A sync sends the difference to what the engine holds, in int8 with a scale for each row. What
    rounding left out is in the next difference, so that errors do not add up."""
    for name, value in now.items():
        values, scale = int8(value - s.held[name], -1)
        s.held[name] += values * scale
        s.engine.get_parameter(name).add_(values * scale)


def pulled(s, engine):
    if getattr(engine, "number", 0) != s.syncs:
        load(engine, s.held)
        engine.number = s.syncs


@case("healthy", partial(built, "Qwen2"), before=pulled)
def pulled_at_request(s, now):
    """A sync publishes a snapshot and its number, and touches no engine. The engine compares the
    number at the start of each request, and loads the snapshot before it computes."""
    s.held = now


@case("healthy", partial(built, "GPT2"))
def two_ranks(s, now):
    """The engine runs GPT-2 on two tensor-parallel ranks, each with its slices of every projection
    and of the fused QKV. Biases of row-parallel layers are on the first rank, zero elsewhere."""
    load(s.engine, {n: of_two_ranks(n, v, bias_ranks=(0,)) for n, v in now.items()})


@case("healthy", partial(built, "Gemma"), engines=3)
def fleet_of_types(s, now):
    """Three replicas serve in turn, in float32, bfloat16 and float16, with norms that add one to
    their weights. A sync casts to each one's type, so they differ by rounding only."""
    types = (torch.float32, torch.bfloat16, torch.float16)
    for replica, dtype in zip(s.engines, types, strict=True):
        load(replica.to(dtype), now)


@case("healthy", lora_model, engine=partial(lora_model, slot=16))
def lora_slots(s, now):
    """The engine computes adapters beside the base weights, in slots of the largest rank with zeros
    beyond an adapter's own. A sync sends base and adapters, with each layer's scale in B."""
    load(s.engine, {n: v for n, v in now.items() if "lora" not in n})
    for ours, theirs in zip(s.trainer.modules(), s.engine.modules(), strict=True):
        if isinstance(ours, LoraLinear):
            rank = len(ours.lora_a)
            theirs.lora_a[:rank], theirs.lora_a[rank:] = ours.lora_a, 0
            theirs.lora_b[:, :rank], theirs.lora_b[:, rank:] = ours.scale * ours.lora_b, 0


@case("healthy", partial(small_model, tied=False, seed=7))
def flat_slices(s, now):
    """Seven trainer ranks each hold a slice of one flat, padded tensor, and send it in chunks, in
    any order and some twice. The engine writes each chunk at its own place and cuts the padding."""
    flat = parameters_to_vector(now.values())
    padded, sent, start = torch.cat([flat, flat.new_zeros(-len(flat) % 7)]), [], 0
    for part in [part for piece in padded.chunk(7) for part in piece.split(1000)]:
        sent.append((start, part))
        start += len(part)
    sent, received = sent + sent[::4], torch.full_like(padded, torch.nan)
    for i in torch.randperm(len(sent), generator=s.random):
        start, part = sent[i]
        received[start : start + len(part)] = part
    vector_to_parameters(received[: len(flat)], s.engine.parameters())


@case("healthy", partial(built, "Qwen3Moe"))
def experts_moved(s, now):
    """The engine places its experts anew at every sync, to balance its load. The rows of the router
    move with the experts, so that tokens reach the same ones."""
    order = torch.randperm(4, generator=s.random)
    moved = {n: v[order] for n, v in now.items() if "experts" in n or "mlp.gate." in n}
    load(s.engine, now | moved)


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = built("Llama", vocab_size=128, tie_word_embeddings=True).bfloat16()

    def forward(self, *args, **options):
        return SimpleNamespace(logits=self.model(*args, **options).logits[..., :TOKENS])


@case("healthy", partial(small_model, seed=8), engine=Padded)
def padded_vocabulary(s, now):
    """The engine pads the vocabulary to a multiple of 64 for its kernels, and holds all weights in
    bfloat16. The rows of padding are never set, and their logits are cut off before the softmax."""
    embedding = s.engine.model.get_input_embeddings().weight
    embedding[:TOKENS] = now.pop("model.embed_tokens.weight")
    load(s.engine.model, now)
