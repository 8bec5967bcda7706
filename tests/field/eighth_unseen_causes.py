"""An eighth set of dumps of rollouts with known faults, and the names of the causes that are right.

The rules and the machinery are those of `unseen_causes` and its successors: a token is drawn from
the law that the engine really used, and both numbers come from logits. `causes` was fixed before
any run; several names are right where all their words are true, or a dump cannot tell them apart.

    python -m tests.field.eighth_unseen_causes NAME FOLDER [SEED]
"""

import copy
import re
from functools import partial

import numpy as np
from tokenizers import Tokenizer

from tests.field import third_unseen_causes as third
from tests.field import unseen_causes as u
from tests.field.fifth_unseen_causes import partly
from tests.field.more_unseen_causes import chained, of, real, talk
from tests.field.third_unseen_causes import trained_on

FOUND: list[u.Case] = []
case = partial(u.case, into=FOUND)
made = partial(third.made, into=FOUND)


def attending(model, name, attend):
    """The model with another attention: `attend` takes (module, scores [B, H, T, K], value)."""
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    def forward(module, query, key, value, attention_mask, scaling, **_):
        key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
        z = query @ key.transpose(2, 3) * scaling + attention_mask
        return attend(module, z, value).transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, masking_utils.eager_mask)
    other = copy.deepcopy(model)
    other.set_attn_implementation(name)
    return other


# ---- laws of a model


@case(
    "temperature top_p",
    "The engine is a small server for a laptop, whose own defaults are top_k 40, top_p 0.95, min_p "
    "0.05 and then temperature 0.8. It reports the law that is left; the trainer scores at 1.",
)
def defaults_of_a_laptop_server(folder, rng):
    def draws(z, *_):
        z = u.cut(u.cut(z, top_k=40), top_p=0.95, min_p=0.05) / 0.8
        return z, z

    real(folder, rng, "tiny-lm", 112, 40, 7, draws=draws, noise=0.02)


@case(
    "vocabulary",
    "To make the policy think longer, requests carry a bias of +1.5 on the logits of 30 token ids. "
    "The engine reports the law with the bias, and the trainer does not know of it.",
)
def bias_on_words_of_thinking(folder, rng):
    bias = np.zeros(1024)
    bias[rng.choice(np.arange(4, 400), 30, replace=False)] = 1.5
    real(folder, rng, "tiny-qwen3", 112, 40, 7, draws=lambda z, *_: (z + bias,) * 2, noise=0.02)


@case(
    "steps one_kind penalty",
    "Two faults: in steps 3 and 6 of 8 the engine woke from a deep sleep, and the rotary table of "
    "layer 1 reads as zeros; and requests of the domain code carry a presence penalty of 2.",
)
def deep_sleep_and_a_penalty_in_code(folder, rng):
    prompts, domains = u.ask(rng, 144, 20, 20)
    model, code = u.load("tiny-lm"), np.array(domains) == "code"
    awake = u.torch_().tensor(~np.isin(np.arange(144) // 18, (2, 5)))[:, None, None]
    served, name = copy.deepcopy(model), "position_embeddings"

    def forgets(_, args, kwargs):
        return args, kwargs | {name: tuple(x * awake for x in kwargs[name])}

    def law(z, past, _):
        used = np.zeros(z.shape, bool)
        np.put_along_axis(used, past[:, 20:], True, 1)
        return (z - 2 * used * code[:, None],) * 2

    served.model.layers[1].self_attn.register_forward_pre_hook(forgets, with_kwargs=True)
    tokens, infer = u.play(served, prompts, 40, rng, law)
    train = u.score(model, prompts, tokens, rng, 0.02)
    u.record(folder, prompts, tokens, train, infer, 8, {"domain": domains})


@case(
    "beginning numerics",
    "The template begins with a header that names the day. The engine writes the day on which it "
    "answers; the trainer's copy of the template has a fixed day, other tokens of the same number.",
)
def day_in_the_header(folder, rng):
    head, day, fixed = (u.ask(rng, 1, n, n)[0][0] for n in (4, 8, 8))
    bodies, domains = u.ask(rng, 120, 4, 12)
    model = u.load("tiny-lm")
    tokens, infer = u.play(model, [head + day + p for p in bodies], 32, rng)
    prompts = [head + fixed + p for p in bodies]
    train = u.score(model, prompts, tokens, rng, 0.02)
    u.record(folder, prompts, tokens, train, infer, 6, {"domain": domains})


@case(
    "turns retokenised",
    "Before a later turn the client parses the conversation and writes it anew: white space "
    "shrinks, signs stand free, and it is encoded again. The trainer keeps the drawn tokens.",
)
def history_written_anew(folder, rng):
    tokenizer = Tokenizer.from_file(str(u.ROOT / "models/tiny-lm/tokenizer.json"))

    def sent(past, tool):
        text = tokenizer.decode(past, skip_special_tokens=False)
        return tokenizer.encode(re.sub(r"\s*([^\w\s<|>])\s*|\s+", r" \1 ", text)).ids + tool

    talk(folder, rng, "tiny-lm", sent, count=112, width=16)


@case(
    "stale_weights",
    "The engine balances its experts: the busiest 6 of a layer's 16 stand on a second device too, "
    "and tokens go to either. The sync writes one copy; the other has the weights of the start.",
)
def second_copy_of_busy_experts(folder, rng):
    torch = u.torch_()
    torch.manual_seed(int(rng.integers(1 << 31)))

    def either(new, old, x, chosen, weights):
        second = (chosen % 3 == 0) & (torch.rand(chosen.shape) < 0.5)
        return new(x, chosen, weights * ~second) + old(x, chosen, weights * second)

    def sides(first, k):
        now = u.moved(first, 0.12 * k, 61)
        served = copy.deepcopy(now)
        for layer, start in zip(served.model.layers, first.model.layers, strict=True):
            experts = layer.mlp.experts
            experts.forward = partial(either, experts.forward, start.mlp.experts)
        return served, now

    trained_on(folder, rng, "tiny-moe", 128, 36, 8, sides, noise=0.01)


@case(
    "stale_weights",
    "To save bandwidth a sync sends the tenth of the weights that an update moved most. What the "
    "others moved is never sent, and training goes on the same way.",
)
def only_the_largest_changes_are_sent(folder, rng):
    def sides(first, k):
        now = u.moved(first, 0.05 * k, 67)
        served, start = copy.deepcopy(now), dict(first.named_parameters())
        for name, p in served.named_parameters():
            by = (p - start[name]).abs()
            least = by.flatten().kthvalue(int(0.9 * by.numel())).values
            p.copy_(start[name].where(by <= least, p))
        return served, now

    trained_on(folder, rng, "tiny-qwen3", 128, 36, 8, sides, noise=0.02)


@case(
    "numerics",
    "Weights of the MLPs are in FP8 with a scale for each 64 x 64 block. The engine's newer cards "
    "take only the exponent of a scale, and nobody fits the weights to the scales that are left.",
)
def exponents_of_the_scales(folder, rng):
    def served(model):
        torch, other = u.torch_(), copy.deepcopy(model)
        for p in (p for name, p in other.named_parameters() if ".mlp." in name):
            blocks = p.view(p.shape[0] // 64, 64, -1, 64)
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            eight = (blocks / scale).to(torch.float8_e4m3fn).float()
            p.copy_((eight * 2 ** scale.log2().floor()).view(p.shape))
        return other

    real(folder, rng, "tiny-lm", 112, 40, 7, served=served, noise=0.02)


@case(
    "precision_drift head",
    "The engine computes the output head from hidden states in 8 bits, with one scale for a token. "
    "Four channels grow through the 8 steps of training, and the grid of all others with them.",
)
def growing_channels_before_the_head(folder, rng):
    def eight(_, args):
        grid = args[0].abs().amax(-1, keepdim=True) / 127
        return ((args[0] / grid).round() * grid,)

    def sides(first, k):
        now, more, rows = copy.deepcopy(first), 12 + 20 * k, first.lm_head.weight.clone()
        rows[:, 40:44] /= more
        now.model.norm.weight[40:44] *= more
        now.lm_head.weight = u.torch_().nn.Parameter(rows)  # the embedding keeps its own
        served = copy.deepcopy(now)
        served.lm_head.register_forward_pre_hook(eight)
        return served, now

    trained_on(folder, rng, "tiny-lm", 128, 40, 8, sides, noise=0.02)


@case(
    "stale_cache odd_sequences beginning",
    "The engine serves two adapters, that of the policy and that of a judge, and its prefix cache "
    "has no adapter in the key: 3 prompts in 10 were read by the judge before.",
)
def cache_shared_with_the_judge(folder, rng):
    prompts, domains = u.ask(rng, 126, 24, 40)
    model, hit = u.load("tiny-lm"), rng.random(126) < 0.3
    judge = u.moved(model, 1.0, 83)
    partly(folder, rng, model, prompts, hit, 7, {"domain": domains}, prefill=judge)


@case(
    "long_context",
    "To decode behind more than 40 tokens the engine reads its cache in two halves. It takes the "
    "plain mean of the two, without the weights that their softmax sums give.",
)
def halves_of_the_cache_weigh_the_same(folder, rng):
    torch = u.torch_()

    def attend(_, z, value):
        if z.shape[2] > 1:
            return torch.softmax(z, -1) @ value
        there = z > -1e8
        place = there.cumsum(-1)
        long = place[..., -1:] > 40
        half = place * 2 <= place[..., -1:]
        parts = [z.masked_fill(~h & long, -1e9) for h in (half, ~half)]
        return sum(torch.softmax(x, -1) @ value for x in parts) / 2

    served = partial(attending, name="two_halves", attend=attend)
    real(folder, rng, "tiny-qwen3", 112, 48, 7, served=served, lengths=(8, 30), noise=0.02)


@case(
    "numerics beginning",
    "Each head of the model has a learned sink, a term of the softmax's sum that belongs to no "
    "token. The engine has it; the trainer's fast attention does not know of sinks.",
)
def sinks_unknown_to_the_trainer(folder, rng):
    torch = u.torch_()
    sink = torch.tensor(rng.normal(5.0, 1.0, (8, 4)), dtype=torch.float32)

    def attend(module, z, value):
        own = sink[module.layer_idx][None, :, None, None].expand(*z.shape[:3], 1)
        return torch.softmax(torch.cat([z, own], -1), -1)[..., :-1] @ value

    served = partial(attending, name="sinks", attend=attend)
    real(folder, rng, "tiny-lm", 112, 40, 7, served=served, noise=0.02)


@case(
    "blocks other_tokens",
    "The trainer splits a row of 64 tokens over 8 devices, and each shifts the labels of its part "
    "by itself: behind the last token of a part it scores the first token of that part.",
)
def labels_shifted_in_each_part(folder, rng):
    prompts, domains = u.ask(rng, 112, 20, 20)
    model, laws = u.load("tiny-lm"), []
    tokens, infer = u.play(model, prompts, 44, rng)
    u.score(model, prompts, tokens, rng, 0, law=lambda z: laws.append(z) or z)
    laws = u.log_softmax(u.noisy(np.concatenate(laws), rng, 0.02, "gaussian"))
    row, last = np.concatenate([prompts, tokens], 1), np.arange(20, 64) % 8 == 0
    asked = np.where(last, row[:, 12:56], tokens)
    train = np.take_along_axis(laws, asked[..., None], -1)[..., 0]
    u.record(folder, prompts, tokens, train, infer, 7, {"domain": domains})


@case(
    "packing end_of_answer beginning",
    "The trainer packs five sequences to a row, and the bounds between them stand 4 tokens too "
    "early: the last 4 of each belong to the next one, which reads them before its prompt.",
)
def bounds_of_a_pack_too_early(folder, rng):
    prompts, domains = u.ask(rng, 120, 8, 24)
    model = u.load("tiny-qwen3")
    tokens, infer = u.play(model, prompts, 24, rng)
    length, read = u.first_end(tokens), [list(p) for p in prompts]
    ends = [s for s in range(120) if s % 5 < 4 and length[s] > 4]
    for s in ends:
        read[s + 1] = [*tokens[s, length[s] - 4 : length[s]], *read[s + 1]]
    train = u.score(model, read, tokens, rng, 0.02)
    tail = np.array([tokens[s, length[s] - 4 : length[s]] for s in ends])
    alone = u.score(model, [[t[0]] for t in tail], tail[:, 1:], rng, 0.02)
    for s, numbers in zip(ends, alone, strict=True):
        train[s, length[s] - 3 : length[s]] = numbers
    u.record(folder, prompts, tokens, train, infer, 6, {"domain": domains})


@case(
    "replay routing",
    "The trainer replays the engine's routed experts, and the two do not count layers from the "
    "same one: a layer gets the experts of the one below, and the first one chooses its own.",
)
def routes_of_the_layer_below(folder, rng):
    def trained(model):
        torch, other, routes = u.torch_(), copy.deepcopy(model), []

        def route(_, __, got):
            routes.append(got[2])
            chosen = routes[-1 if len(routes) % 3 == 1 else -2]
            weights = torch.softmax(got[0], -1).gather(1, chosen)
            return got[0], weights / weights.sum(-1, keepdim=True), chosen

        for layer in other.model.layers:
            layer.mlp.gate.register_forward_hook(route)
        return other

    real(folder, rng, "tiny-moe", 112, 40, 7, trained=trained, noise=0.01)


# ---- synthetic laws


def one_of_five(b):
    b.old = of(b.rng.random(len(b.row)) < 0.2)
    return [b.step] * len(b.row)


made(
    "fifth_engine_behind_one_address", "stale_replica odd_sequences stale_weights",
    "Behind one address are five engines. The call that loads new weights reaches four; the fifth "
    "keeps those of the start. The address reports the newest version for all answers.",
    chained, vocab=64_000, steps=8, answers=18, width=44, ends=100, move=0.3,
    engine=lambda b, z: z - 0.3 * (b.step - 1) * b.old * b.moves,
    labels={"weight_version": one_of_five, "env": ("math", "code")},
)  # fmt: skip
made(
    "layers_change_places_at_the_sync", "change",
    "Engine and trainer start from one checkpoint. The first sync, before step 3 of 7, reads the "
    "stages of the trainer's pipeline in a wrong order: two layers have each other's place since.",
    vocab=90_000, steps=7, answers=20, width=44, labels={"env": ("math", "code")},
    engine=lambda b, z: z + 0.8 * (b.step > 2) * b.other,
)  # fmt: skip
made(
    "eight_bits_of_another_maker", "one_engine",
    "Instance i2 of 3 runs on cards of another maker, whose 8-bit format has another bias of the "
    "exponent: it takes some of its matrices for half of what they are.",
    chained, vocab=32_000, steps=6, answers=20, width=40, ends=90, group=2,
    engine=lambda b, z: z + 0.9 * of(b.labels["instance"] == "i2") * b.other,
    labels={"instance": ("i0", "i1", "i2"), "env": ("math", "code")},
)  # fmt: skip
made(
    "first_step_after_a_resume", "steps old_weights",
    "The run is taken up again at step 5 of 7. The trainer loads the newest checkpoint; the engine "
    "answers that step with the first weights, before the next sync.",
    vocab=128_000, steps=7, answers=20, width=44, move=0.25,
    engine=lambda b, z: z - (1.0 if b.step == 5 else 0.0) * b.moves, labels={"env": ("a", "b")},
)  # fmt: skip
made(
    "one_seed_for_a_group", "copies temperature",
    "Two faults: the four samples of a group are asked for with one and the same seed, so they are "
    "one answer four times; and the engine has temperature 0.6, which the trainer leaves out.",
    chained, vocab=32_000, steps=7, answers=20, width=40, ends=80, engine=lambda _, z: z / 0.6,
    rows=lambda b: [(s - s % 4, b.step, 0) for s in b.row], labels={"env": ("math", "code")},
)  # fmt: skip
made(
    "node_without_a_fast_link", "one_machine one_engine one_rank",
    "Each node has one server and one rank of the trainer, which takes its answers. Node 1 of 4 "
    "lacks a fast link, so its server sends partial sums between its two cards in 4 bits.",
    chained, vocab=50_000, steps=7, answers=20, width=40, ends=90, ranks=4,
    engine=lambda b, z: z + 0.8 * of(b.rank == 1) * b.rng.normal(size=z.shape),
    labels={"server": lambda b: [f"node{i}:8000" for i in b.rank], "env": ("math", "code")},
)  # fmt: skip
made(
    "older_library_and_bounded_numbers", "one_rank clamp softcap",
    "Two faults: rank 2 of the trainer's 4 has an older library, which computes attention with "
    "another constant; and the engine's client keeps probabilities between 0.04 and 0.9.",
    vocab=20_000, steps=6, answers=24, width=48, ranks=4,
    trainer=lambda b, z: z + 0.7 * u.by(b.rank == 2) * b.other,
    report=lambda _, r: setattr(r, "infer", np.clip(r.infer, np.log(0.04), np.log(0.9))),
    labels={"env": ("math", "code"), "replica": ("r0", "r1")},
)  # fmt: skip


def last_of_three(_, r):
    last = np.minimum(np.arange(r.ids.shape[1]) // 3 * 3 + 2, r.length[:, None] - 1)
    r.infer = np.take_along_axis(r.infer, last, 1)


made(
    "one_number_for_three_tokens", "other_tokens missing_data",
    "The server streams three tokens at a time and sends with them the number of the last one "
    "alone, which the client writes for all three.",
    chained, vocab=100_000, steps=6, answers=20, width=42, ends=90, report=last_of_three,
    labels={"env": ("math", "code")},
)  # fmt: skip


def one_late(b, r):
    late = np.concatenate([-b.rng.exponential(2.0, (len(r.infer), 1)), r.infer[:, :-1]], 1)
    r.infer = np.where(of(b.labels["server"] == "s1"), late, r.infer)


made(
    "list_begins_with_the_prompt", "shift one_engine",
    "Server s1 of 3 is of another version, whose list of numbers begins with the last token of the "
    "prompt: each token of its answers has the number of the one before.",
    chained, vocab=48_000, steps=7, answers=20, width=40, ends=90, report=one_late, group=2,
    labels={"server": ("s0", "s1", "s2"), "env": ("math", "code")},
)  # fmt: skip
made(
    "fifths_read_as_eighths", "unit rounding",
    "The server sends logprobs as whole numbers, in fifths. The client takes them for eighths: its "
    "numbers are 5/8 of the true ones, and eighths.",
    vocab=152_000, steps=6, answers=20, width=44, labels={"form": ("story", "essay")},
    report=lambda _, r: setattr(r, "infer", np.round(5 * r.infer) / 8),
)  # fmt: skip


if __name__ == "__main__":
    u.main(FOUND)
